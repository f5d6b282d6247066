"""A store that does not answer is left alone, and no prompt waits to find out whether it is back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.engine.protocol import WorkerReport
from kintsugi.engine.scheduler.side import SchedulerSide
from kintsugi.store.protocol.breaker import OPEN_S, CircuitBreaker
from tests.unit.engine.scheduler.test_content import IdleSpy
from tests.unit.engine.scheduler.test_side import StubStore, asked, request_of, said, side_of


@pytest.fixture
def store() -> StubStore:
    return StubStore()


@pytest.fixture
def side(store: StubStore) -> Iterator[SchedulerSide]:
    side = side_of(store)
    yield side
    side.close()


def heard_back(side: SchedulerSide, store: StubStore) -> None:
    for _ in range(10_000):
        side._lookups._prober.submit(int).result(10)
        if store.lookups and side._lookups._breaker._probe_s is None:
            return
    raise AssertionError("the store was not asked, or its answer forgotten")


def test_no_prompt_waits_to_find_out_whether_a_store_is_back(side: SchedulerSide, store: StubStore) -> None:
    now_s = 0.0
    side._lookups._breaker = CircuitBreaker(lambda: now_s, failures_max=1)
    store.is_down = True
    assert said(side, asked(side, "first"))["reason"].startswith("store_unavailable: Unavailable")
    while side._lookups._breaker._failures < 2:  # the first prompt's, and at once one on a thread
        side._lookups._prober.submit(int).result(10)
    for was_down in (True, False):
        store.is_down, store.lookups = was_down, 0
        now_s += OPEN_S
        request = request_of("probing")
        side.on_new_request(request)
        assert said(side, request)["reason"].startswith("store_unavailable: the store failed recently")
        heard_back(side, store)
        assert side._lookups._breaker.is_closed is not was_down
    assert said(side, asked(side, "later"))["reason"].startswith("no_chunk_cached")


def test_a_pass_that_the_store_left_waiting_suspends_the_store(side: SchedulerSide, store: StubStore) -> None:
    request = request_of("left waiting")
    side.on_new_request(request)
    store.is_down = True
    side.update(WorkerReport({"left waiting": Accounting(Outcome.FAILED, reason="load_timeout: layer 3")}))
    later = request_of("later")
    side.on_new_request(later)
    assert said(side, later)["reason"].startswith("store_unavailable: the store failed recently")


def test_idle_saves_are_told_that_the_store_is_suspended(side: SchedulerSide, store: StubStore) -> None:
    side.idle_saves = spy = IdleSpy()  # type: ignore[assignment]
    side.begin_step(SchedulerOutput.make_empty())
    store.is_down = True
    said(side, asked(side, "one"))
    side.begin_step(SchedulerOutput.make_empty())
    assert spy.is_store_suspended == [False, True]
