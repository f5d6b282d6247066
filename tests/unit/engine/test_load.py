"""What an engine says about its queue, on a clock that the test moves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.engine.watching import MEMORY_S, LoadMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_engine_that_did_nothing_predicts_nothing(clock: Clock) -> None:
    load = LoadMeter(clock)
    load.record_start("a", 1000)
    stats = load.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (1, 1, 1000)
    assert stats.tokens_per_s == 0.0


def test_queueing_is_what_waits_at_the_recent_rate(clock: Clock) -> None:
    load = LoadMeter(clock)
    load.record_start("a", 1000)
    clock.now_s += 0.5
    load.record_first_token("a")
    load.record_start("b", 3000)
    assert load.stats().tokens_per_s == pytest.approx(2000)
    assert load.stats().waiting_tokens == 3000


def test_idle_time_is_no_slowness(clock: Clock) -> None:
    load = LoadMeter(clock)
    for name in "abc":
        load.record_start(name, 100)
        clock.now_s += 0.1
        load.record_first_token(name)
        load.record_end(name)
        clock.now_s += 3600
    assert load.stats().tokens_per_s == pytest.approx(1000)
    assert load.stats().running == 0


def test_the_rate_follows_what_happened_lately(clock: Clock) -> None:
    load = LoadMeter(clock)
    for seconds in [10.0] * 5 + [1.0] * 60:
        load.record_start("a", 10_000)
        clock.now_s += seconds
        load.record_first_token("a")
        load.record_end("a")
    assert load.stats().tokens_per_s == pytest.approx(10_000, rel=0.01)


def test_the_busy_share_forgets(clock: Clock) -> None:
    load = LoadMeter(clock)
    load.record_start("a", 10)
    clock.now_s += MEMORY_S
    assert load.stats().busy_share == pytest.approx(1 - math.exp(-1))
    load.record_first_token("a")
    clock.now_s += 20 * MEMORY_S
    assert load.stats().busy_share < 1e-6


def test_a_request_ends_once_however_often_it_is_said(clock: Clock) -> None:
    load = LoadMeter(clock)
    load.record_start("a", 10)
    load.record_end("a")
    load.record_end("a")
    assert (load.stats().running, load.stats().waiting_tokens) == (0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["record_start", "record_first_token", "record_end"]),
            st.integers(0, 5),
            st.floats(0, 9),
        )
    )
)
def test_counts_are_never_negative(events: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    load = LoadMeter(clock)
    for event, name, wait_s in events:
        clock.now_s += wait_s
        if event == "record_start":
            load.record_start(str(name), 100)
        else:
            getattr(load, event)(str(name))
        stats = load.stats()
        assert 0 <= stats.waiting <= stats.running or event == "record_first_token"
        assert stats.waiting_tokens == 100 * stats.waiting
        assert 0.0 <= stats.busy_share <= 1.0
        assert stats.tokens_per_s >= 0.0
