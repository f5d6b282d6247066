"""Alerts: each asks for metrics and labels that exist, and links a section that says what to do."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.kubernetes.rendering import CHART, HELMS, NAMESPACE, RELEASE, REPOSITORY, one, rendered

RUNBOOKS = "https://runbooks.example.com/kintsugi"
SNAPSHOT = REPOSITORY / "tests/unit/surface/snapshots/metrics.json"
TARGET_LABELS = {"namespace", "pod", "job", "kintsugi_dev_service"}
"""Labels that the chart's monitors add."""
ALERTS = sorted(
    name
    for path in (CHART / "files/alerts").glob("*.yaml")
    for name in re.findall(r"- alert: (\w+)", path.read_text())
)
ASPECTS = ("**Meaning.**", "**Check.**", "**Fix.**")


def rules(helm: str = HELMS[1]) -> list[dict[str, Any]]:
    """The rules as helm renders them."""
    rule = one(rendered(helm, "ha"), "PrometheusRule")
    return [each for group in rule["spec"]["groups"] for each in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def exported() -> dict[str, set[str]]:
    """Labels of every metric that a process exports, under the name that Prometheus gives it."""
    found: dict[str, set[str]] = {}
    for families in json.loads(SNAPSHOT.read_text()).values():
        for family, shown in families.items():
            kind, labels = shown.rstrip("}").split("{")
            name = f"{family.removesuffix('_total')}_total" if kind == "counter" else family
            found[name] = {label.strip() for label in labels.split(",") if label}
    operator = {"kind", "namespace", "name"}
    return {
        name: labels | (operator | {"condition", "error"} if name.startswith("kintsugi_operator_") else set())
        for name, labels in found.items()
    }


def metrics_of(expression: str) -> dict[str, set[str]]:
    """The metrics that an expression asks for, each with the labels of its selector."""
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", "", expression)
    found = re.findall(r"\b(kintsugi[:_][\w:]+)(?:\{([^}]*)\})?", bare)
    return {name: set(re.findall(r"(\w+)\s*=", selector)) for name, selector in found}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_for_metrics_that_exist(name: str) -> None:
    known = exported() | {rule["record"]: TARGET_LABELS for rule in rules() if "record" in rule}
    expression = alerts()[name]["expr"]
    asked = metrics_of(expression)
    assert asked, "it asks for none of ours"
    for metric, labels in asked.items():
        assert metric in known, f"{name} asks for {metric}, which nobody exports"
        assert labels <= known[metric] | TARGET_LABELS, f"{name}: {metric} has no such label"
    for grouping in re.findall(r"\bby\s*\(([^)]*)\)", expression):
        labels = {label.strip() for label in grouping.split(",")}
        assert labels <= set().union(*(known[metric] for metric in asked)) | TARGET_LABELS
    assert expression.count("(") == expression.count(")")


def test_the_recorded_series_asks_for_metrics_that_exist() -> None:
    (recorded,) = [rule for rule in rules() if "record" in rule]
    assert set(metrics_of(recorded["expr"])) <= set(exported())


def test_what_an_alert_must_not_ask_for_is_found() -> None:
    assert metrics_of('sum by (kintsugi_dev_service) (rate(kintsugi_gone_total{pod="x"}[5m])) > 0') == {
        "kintsugi_gone_total": {"pod"}
    }
    assert "kintsugi_gone_total" not in exported()


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    page = (REPOSITORY / "docs/ALERTS.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.S | re.M))
    assert set(sections) == set(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{name.lower()}"
        assert [aspect for aspect in ASPECTS if aspect not in sections[name]] == []
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} <= set(rule["annotations"])


def test_alerts_are_about_this_release_alone() -> None:
    """Two releases in one cluster each have the rules."""
    for rule in rules():
        selectors = re.findall(r"\bkintsugi[:_][\w:]+\{([^}]*)\}", rule["expr"])
        assert selectors
        for selector in selectors:
            service = f'namespace="{NAMESPACE}",kintsugi_dev_service="{RELEASE}"'
            assert service in selector or f'job="{NAMESPACE}/{RELEASE}-operator"' in selector


def test_both_helms_render_the_same_rules_and_none_unasked() -> None:
    assert rules(HELMS[0]) == rules(HELMS[1])
    assert [each for each in rendered(HELMS[1], "defaults") if each["kind"] == "PrometheusRule"] == []


def test_monitors_give_series_the_labels_that_alerts_group_by() -> None:
    manifests = rendered(HELMS[1], "ha")
    gateway = one(manifests, "ServiceMonitor")["spec"]
    pods = one(manifests, "PodMonitor", f"{RELEASE}-pods")["spec"]
    assert gateway["targetLabels"] == pods["podTargetLabels"] == ["kintsugi.dev/service"]
    (operator,) = one(manifests, "PodMonitor", f"{RELEASE}-operator")["spec"]["podMetricsEndpoints"]
    assert operator["honorLabels"] is True
