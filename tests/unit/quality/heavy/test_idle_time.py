"""What the stream computes while the engine is idle, and which computations an arriving request ends."""

from __future__ import annotations

import asyncio

import pytest

from kintsugi.core.report import LADDER
from kintsugi.quality.stream import INTERRUPTIONS_MAX
from tests.fakes.reports import open_report
from tests.unit.quality.heavy.test_stream import DECLINED, NEXT, SAFEST, FakeTwins, Life, blended


@pytest.mark.parametrize(("gap_s", "tried"), [(1.0, 1), (2.0, 2), (100.0, len(LADDER))])
def test_as_many_configurations_are_tried_as_the_time_between_two_answers_allows(
    gap_s: float, tried: int
) -> None:
    life = Life()
    life.serve(DECLINED)
    life.run()
    life.twins.calls.clear()
    life.now_s += gap_s
    life.serve(DECLINED)
    life.twins.on_done = lambda: setattr(life, "now_s", life.now_s + 0.5)
    life.run()
    assert life.twins.trials == [*LADDER[:tried]]


def test_a_request_that_arrives_ends_a_save_which_is_run_again() -> None:
    life = Life()
    life.twins.arrival, life.twins.arrives_in = (lambda: life.stream.note_arrival(0)), "save"
    life.serve(DECLINED)
    life.run()
    assert (life.stream.pending, life.stream.counts.pairs, life.stream.counts.interrupted) == (1, 0, 1)
    life.run()
    assert (life.stream.pending, life.tally().pairs, life.tally(NEXT).pairs) == (0, 1, 1)


def test_a_request_that_arrives_ends_no_blend_because_the_engine_pauses_it() -> None:
    life = Life()
    life.twins.arrival = lambda: life.stream.note_arrival(0)
    life.serve(DECLINED)
    life.run()
    assert (life.tally().pairs, life.stream.pending, life.stream.counts.interrupted) == (1, 0, 0)


def test_requests_that_arrive_quickly_do_not_end_a_full_prefill_for_ever() -> None:
    life = Life(open_report())
    life.twins.arrives_in = "full"
    life.serve(blended(SAFEST))
    for _ in range(INTERRUPTIONS_MAX + 1):
        assert life.stream.pending
        life.twins.arrival = lambda: life.stream.note_arrival(0)
        life.run()
    assert (life.stream.pending, life.stream.counts.interrupted) == (0, INTERRUPTIONS_MAX)
    assert life.stream.counts.pairs > 0


@pytest.mark.parametrize("kind", ["full", "audit"])
def test_a_served_blend_that_is_compared_is_not_compared_again(kind: str) -> None:
    life = Life(open_report())
    life.twins.arrival, life.twins.arrives_in = (lambda: life.stream.note_arrival(0)), kind
    life.serve(blended(SAFEST))
    life.run()
    assert life.stream.pending == (kind == "full")
    life.run()
    assert life.twins.kinds.count("full") == 1 + (kind == "full")


def test_a_request_behind_the_twins_ends_none() -> None:
    life = Life()
    life.twins.arrival = lambda: life.stream.note_arrival(FakeTwins.priority)
    life.serve(DECLINED)
    life.run()
    assert (life.tally().pairs, life.stream.counts.interrupted) == (1, 0)


def test_a_stream_that_is_cancelled_ends() -> None:
    life = Life()
    life.serve(DECLINED)

    async def cancel() -> None:
        task = asyncio.create_task(life.stream.run_one())
        life.twins.arrival = task.cancel  # type: ignore[assignment]
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
