"""The page of metrics, generated from the objects that declare them."""

from __future__ import annotations

from scripts.reference.page import Entry, Page, Section, code, one_of

from tests.unit.surface import metrics

PROCESSES = {
    "gateway": "`/metrics` on the gateway's HTTP port.",
    "engine": "`/metrics` on an engine's metrics port. vLLM adds labels of its own to these families.",
    "shard": "`/metrics` on a shard's metrics port.",
    "operator": "`/metrics` on the operator's port.",
}


def page() -> Page:
    found = metrics.families()
    sections = [
        Section(process.capitalize(), PROCESSES[process], _entries(found[process]), "metric")
        for process in PROCESSES
    ]
    about = (
        "Prometheus metrics by the process that exports them. Histograms export `_bucket`, `_sum` and "
        "`_count`. [Alerts](../ALERTS.md) says what to do when one of them stands out."
    )
    return Page("reference/metrics.md", "Metrics", about, sections)


def _entries(families: dict[str, metrics.Family]) -> list[Entry]:
    return [
        Entry(one.exported, one.text, {"type": code(one.kind), "labels": one_of(one.labels)})
        for _, one in sorted(families.items())
    ]
