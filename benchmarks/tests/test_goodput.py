"""Which rates count as goodput, and what is said where none does; reuse at both ends of many queries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.support import reuse
from benchmarks.support.figures import Figure
from benchmarks.support.goodput import Load, best_of, figures_of, is_steady
from benchmarks.support.load.report import Sample, summarize_samples

SLO_S = 2.0


def samples(*ttft_s: float | None) -> list[Sample]:
    return [Sample(at_s=10.0 * index, ttft_s=one, done_s=(one or 0) + 1) for index, one in enumerate(ttft_s)]


def load_of(server: str, *ttft_s: float | None, cpu_s: float = 9.0) -> Load:
    measured = samples(*ttft_s)
    summary = summarize_samples(measured, SLO_S)
    return Load(server, 2048, summary, cpu_s, 0.1, is_steady(measured, SLO_S))


def named(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


@pytest.mark.parametrize(
    ("ttft_s", "steady"),
    [
        ((1, 1, 1, 1, 1, 1, 1, 1, 1), True),
        ((9, 9, 9, 1, 1, 1, 1, 1, 1), True),
        ((1, 1, 1, 1, 1, 1, 1, 3, 3), False),
        ((1, 1, 1, 1, 1, 1, 1, None, None), False),
        ((1, 1, 1, 1, 1, 1, 1, 1, 9), True),
    ],
)
def test_a_rate_is_steady_if_its_last_third_is_in_time(ttft_s: tuple[float, ...], steady: bool) -> None:
    assert is_steady(samples(*ttft_s), SLO_S) is steady
    assert is_steady(samples(*ttft_s)[::-1], SLO_S) is steady, "they count in the order of their arrival"


@pytest.mark.parametrize(("unanswered", "steady"), [(0, True), (2, True), (3, False)])
def test_a_rate_is_steady_if_few_are_unanswered_when_the_last_comes(unanswered: int, steady: bool) -> None:
    """The last one itself has only come."""
    answers_s = [0.5] * (19 - unanswered) + [60.0] * (unanswered + 1)
    coming = [Sample(float(index), 0.1, done_s) for index, done_s in enumerate(answers_s)]
    assert is_steady(coming, SLO_S) is steady


def test_the_best_steady_rate_of_each_server_counts() -> None:
    growing = load_of("kintsugi", *[0.1] * 65, *[9.0] * 34)
    ours = load_of("kintsugi", *[9.0] * 8, *[0.5] * 9, cpu_s=17 / 3)
    plain = load_of("plain", *[1.0] * 9, cpu_s=9.0)
    assert growing.goodput_per_s > ours.goodput_per_s
    assert best_of([growing, ours, plain], "kintsugi") is ours
    found = named(figures_of([growing, ours, plain], SLO_S, 3.0, 3.2))
    assert found["goodput_slo"].value == SLO_S
    assert found["goodput_ratio"].value == pytest.approx(ours.goodput_per_s / plain.goodput_per_s)
    assert found["goodput_ratio"].holds is False
    assert found["cpu_per_answer_ratio"].value == pytest.approx(3.0)
    assert "not steady" in found["kintsugi_load0_goodput"].detail


def test_without_a_steady_rate_there_is_no_ratio() -> None:
    late = load_of("plain", *[9.0] * 9)
    found = named(figures_of([late, load_of("kintsugi", *[1.0] * 9)], SLO_S, 3.0, 3.2))
    assert found["goodput_ratio"].value is None
    assert found["goodput_ratio"].detail == "no steady rate with goodput: plain"


def test_reuse_compares_the_speed_up_of_either_end() -> None:
    plain = [2.0] * 20
    ours = [1.0] * 5 + [7.0] * 10 + [0.8] * 5
    first, *ends = reuse.figures_of(plain, ours, 5, "reuse", 0.95, "{}")
    assert first.value == pytest.approx(1.25)
    assert first.holds
    assert [end.value for end in ends] == pytest.approx([2.0, 2.5])


def test_every_document_begins_a_query_before_any_counts() -> None:
    plan = reuse.FULL
    drawn = reuse.queries(plan)
    assert len(drawn) == plan.workload.documents + plan.queries
    assert [query.documents[0] for query in drawn[: plan.workload.documents]] == list(range(14))
    assert all(len(set(query.documents)) == plan.workload.chunks for query in drawn)
    assert len({query.documents for query in drawn}) > 0.99 * len(drawn)


def test_both_servers_get_every_query(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def ask(server: Any, prompt: str, answer_tokens: int) -> Sample:
        asked.append((server.name, prompt))
        accounting = {"outcome": "blended"} if server.name == "kintsugi" else None
        return Sample(0.0, 2.0 if server.name == "plain" else 1.0, 2.0, accounting=accounting)

    monkeypatch.setattr(reuse, "ask_alone", ask)
    servers: Any = [SimpleNamespace(name=name) for name in ("plain", "kintsugi")]
    texts = [f"text {document}" for document in range(14)]
    first, *_ = reuse.measure(servers, texts, reuse.QUICK, "reuse", None)
    assert first.value == 1.0
    assert "{'blended': 24}" in first.detail
    assert [prompt for name, prompt in asked if name == "plain"] == [
        prompt for name, prompt in asked if name == "kintsugi"
    ]
    assert len(asked) == 2 * (14 + reuse.QUICK.queries)
