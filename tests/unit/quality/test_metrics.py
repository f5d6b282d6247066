"""Measures of answers and distributions, on cases worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.quality import metrics


@pytest.mark.parametrize(
    ("text", "answers", "em", "f1", "rouge"),
    [
        (" The Attic.", ["attic"], 1, 1, 1),
        ("red attic", ["attic", "red attic"], 1, 1, 1),
        ("cellar", ["attic"], 0, 0, 0),
        ("big red attic", ["red attic now"], 0, 2 / 3, 2 / 3),
        ("attic red", ["red attic"], 0, 1, 1 / 2),
        ("", ["attic"], 0, 0, 0),
        ("the", ["a"], 1, 1, 1),
        ("anything", [], 0, 0, 0),
    ],
)
def test_answers(text: str, answers: list[str], em: float, f1: float, rouge: float) -> None:
    assert metrics.exact_match(text, answers) == em
    assert metrics.f1(text, answers) == pytest.approx(f1)
    assert metrics.rouge_l(text, answers) == pytest.approx(rouge)


def logs(*shares: float) -> dict[int, float]:
    return {token: math.log(share) for token, share in enumerate(shares) if share}


def test_kl_by_hand() -> None:
    full, blend = logs(0.5, 0.5), logs(0.25, 0.75)
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert metrics.kl_divergence(full, blend) == pytest.approx(expected)
    assert metrics.kl_divergence(full, full) == 0


def test_kl_of_disjoint_tops_is_large() -> None:
    full = {0: math.log(0.99), 1: math.log(0.005)}
    blend = {8: math.log(0.99), 9: math.log(0.005)}
    assert metrics.kl_divergence(full, blend) > 5


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_answer_of_no_distribution_is_the_worst(value: float) -> None:
    full = logs(0.9, 0.1)
    assert metrics.kl_divergence(full, dict.fromkeys(full, value)) == metrics.KL_MAX
    assert metrics.kl_divergence(dict.fromkeys(full, math.nan), full) == metrics.KL_MAX
    assert not metrics.same_top(full, dict.fromkeys(full, math.nan))


weights = st.lists(st.floats(0.01, 1), min_size=6, max_size=6)


@given(weights, weights, st.integers(1, 5))
def test_a_truncated_kl_is_a_lower_bound(p: list[float], q: list[float], kept: int) -> None:
    full = logs(*(value / sum(p) for value in p))
    blend = logs(*(value / sum(q) for value in q))
    whole = metrics.kl_divergence(full, blend)
    tops = [{token: d[token] for token in sorted(d, key=lambda t: -d[t])[:kept]} for d in (full, blend)]
    assert -1e-9 <= metrics.kl_divergence(*tops) <= whole + 1e-4


def test_the_top_token() -> None:
    assert metrics.same_top(logs(0.4, 0.4, 0.2), logs(0.6, 0.3, 0.1))
    assert not metrics.same_top(logs(0.4, 0.5), logs(0.6, 0.3))


def test_a_near_tie_of_full_prefill_is_no_change() -> None:
    near, clear, blend = logs(0.38, 0.40, 0.22), logs(0.30, 0.40, 0.30), logs(0.5, 0.4, 0.1)
    assert not metrics.same_top(near, blend)
    assert metrics.same_top(near, blend, metrics.TIE)
    assert not metrics.same_top(clear, blend, metrics.TIE)
    assert not metrics.same_top(near, logs(0.1, 0.2, 0.7), metrics.TIE), "a third token"
    assert not metrics.same_top({1: -0.1, 2: -3.0}, {8: -0.1, 9: -3.0}, metrics.TIE), "not among its tokens"


def test_percentiles_are_measured_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert metrics.percentile(values, 0.99) == 99
    assert metrics.percentile(values, 0.5) == 50
    assert metrics.percentile([3.0], 0.99) == 3


def test_intervals_hold_the_mean_and_shrink() -> None:
    few, many = metrics.bootstrap([0.0, 1.0] * 8), metrics.bootstrap([0.0, 1.0] * 200)
    assert few.low < few.mean == 0.5 == many.mean < few.high
    assert many.high - many.low < few.high - few.low
    assert metrics.bootstrap([1.0] * 9) == metrics.Interval(1, 1, 1)
    assert metrics.bootstrap([0.0, 1.0, 1.0]) == metrics.bootstrap([0.0, 1.0, 1.0])
