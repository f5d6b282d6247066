"""What the stream computes while the engine is idle, and what a request that arrives ends."""

from __future__ import annotations

import asyncio

import pytest

from kintsugi.core.report import LADDER
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


@pytest.mark.parametrize("kind", ["save", "blend"])
def test_a_request_that_arrives_ends_the_twin_which_is_run_again(kind: str) -> None:
    life = Life()
    life.twins.arrival, life.twins.arrives_in = (lambda: life.stream.note_arrival(0)), kind
    life.serve(DECLINED)
    life.run()
    assert (life.stream.pending, life.stream.counts.pairs, life.stream.counts.interrupted) == (1, 0, 1)
    life.run()
    assert (life.stream.pending, life.tally().pairs, life.tally(NEXT).pairs) == (0, 1, 1)


def test_after_an_interruption_no_pair_is_recorded_twice() -> None:
    life = Life()
    life.serve(DECLINED)
    life.twins.arrival = lambda: setattr(life.twins, "arrival", lambda: life.stream.note_arrival(0))
    life.run()  # the second trial is interrupted
    assert (life.tally().pairs, life.tally(NEXT).pairs, life.stream.pending) == (1, 0, 1)
    life.run()
    assert (life.tally().pairs, life.tally(NEXT).pairs, life.stream.pending) == (1, 1, 0)


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
