"""How many engines and shards there should be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.serving.autoscaling import (
    BUSY_SHARE_MAX,
    EngineLoad,
    EnginePolicy,
    ShardLoad,
    ShardPolicy,
    engines_wanted,
    shards_wanted,
)

amounts = st.floats(0, 1e7)
counts = st.integers(1, 64)


def test_idle_engines_go_down_to_one() -> None:
    assert engines_wanted(EngineLoad(8, 0, 1000, 0.0), 500) == 1


def test_what_waits_is_shared_so_that_nobody_waits_longer_than_allowed() -> None:
    assert engines_wanted(EngineLoad(4, 2000, 1000, 0.5), 500) == 4
    assert engines_wanted(EngineLoad(4, 2100, 1000, 0.5), 500) == 5


def test_busy_engines_get_help_before_a_queue_is_there() -> None:
    assert engines_wanted(EngineLoad(2, 0, 1000, 1.9), 500) == 3


def test_a_burst_doubles_at_most() -> None:
    assert engines_wanted(EngineLoad(2, 1e6, 1000, 2.0), 500) == 4


@given(
    engines=counts, waiting=amounts, more=amounts, rate=amounts, busy=st.floats(0, 1), limit=st.floats(1, 1e5)
)
def test_more_work_never_means_fewer_engines(
    engines: int, waiting: float, more: float, rate: float, busy: float, limit: float
) -> None:
    less = engines_wanted(EngineLoad(engines, waiting, rate, busy * engines), limit)
    grown = engines_wanted(EngineLoad(engines, waiting + more, rate, busy * engines), limit)
    busier = engines_wanted(EngineLoad(engines, waiting, rate, engines), limit)
    assert 1 <= less <= grown <= 2 * engines
    assert less <= busier


@given(engines=counts, waiting=amounts, rate=st.floats(1, 1e6), limit=st.floats(10, 1e5))
def test_with_as_many_as_are_wanted_nobody_waits_too_long(
    engines: int, waiting: float, rate: float, limit: float
) -> None:
    wanted = engines_wanted(EngineLoad(engines, waiting, rate, 0.0), limit)
    if wanted < 2 * engines:
        assert 1e3 * waiting / (rate * wanted) <= limit * (1 + 1e-6)


@given(engines=counts, busy=st.floats(0, 1))
def test_the_same_work_on_the_wanted_number_wants_no_other(engines: int, busy: float) -> None:
    """Or the number would swing forever."""
    work = busy * engines
    wanted = engines_wanted(EngineLoad(engines, 0, 1000, work), 500)
    assert engines_wanted(EngineLoad(wanted, 0, 1000, min(work, wanted)), 500) == max(
        1, min(wanted, -int(-min(work, wanted) // BUSY_SHARE_MAX))
    )


@given(shards=counts, used=st.floats(0, 1), returns=st.floats(0, 100))
def test_shards_change_one_at_a_time(shards: int, used: float, returns: float) -> None:
    wanted = shards_wanted(ShardLoad(shards, used * shards * 1e9, shards * 1e9, returns))
    assert abs(wanted - shards) <= 1
    assert wanted >= 1


@given(shards=counts, used=st.floats(0, 1), returns=st.floats(0, 100), more=st.floats(0, 100))
def test_more_regretted_evictions_never_mean_fewer_shards(
    shards: int, used: float, returns: float, more: float
) -> None:
    def wanted(rate: float) -> int:
        return shards_wanted(ShardLoad(shards, used * shards * 1e9, shards * 1e9, rate))

    assert wanted(returns) <= wanted(returns + more)


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (ShardLoad(2, 1.9e9, 2e9, 1.0), 3),
        (ShardLoad(2, 1.9e9, 2e9, 0.01), 2),
        (ShardLoad(2, 0.5e9, 2e9, 50.0), 2),
        (ShardLoad(4, 1.0e9, 4e9, 0.0), 3),
        (ShardLoad(4, 1.0e9, 4e9, 0.1), 4),
        (ShardLoad(1, 0.0, 1e9, 0.0), 1),
        (ShardLoad(3, 0.0, 0.0, 0.0), 3),
    ],
)
def test_shards_follow_regretted_evictions_and_bytes(load: ShardLoad, wanted: int) -> None:
    assert shards_wanted(load) == wanted


def context(metrics: dict[str, dict[str, float]] | None, current: int) -> SimpleNamespace:
    return SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=current, target_num_replicas=current
    )


def test_policies_keep_the_number_until_somebody_reports() -> None:
    assert EnginePolicy()(context(None, 3)) == (3, {})
    assert ShardPolicy()(context({}, 3)) == (3, {})


def test_policies_read_what_replicas_report() -> None:
    engines = {
        "waiting_tokens": {"a": 900.0, "b": 600.0},
        "tokens_per_s": {"a": 1000.0, "b": 0.0},
        "busy_share": {"a": 0.4, "b": 0.2},
    }
    assert EnginePolicy()(context(engines, 2)) == (3, {})
    shards = {"used_bytes": {"a": 9.0}, "capacity_bytes": {"a": 10.0}, "returns_per_s": {"a": 2.0}}
    assert ShardPolicy()(context(shards, 1)) == (2, {})
