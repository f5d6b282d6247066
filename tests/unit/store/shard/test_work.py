"""Work that is done in turn: each piece begins after the one before, and a future says how it ended."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import pytest

from kintsugi.store.shard.work import run_in_turn, uncancellable_future


def test_each_begins_once_the_one_before_has_ended() -> None:
    begun: list[Future[None]] = []

    def begin() -> Future[None]:
        begun.append(uncancellable_future())
        return begun[-1]

    futures = run_in_turn([begin, begin, begin])
    assert len(begun) == 1
    begun[0].set_exception(ValueError("the first failed"))
    assert len(begun) == 2
    begun[1].set_result(None)
    begun[2].set_result(None)
    with pytest.raises(ValueError, match="the first failed"):
        futures[0].result(0.0)
    assert [future.result(0.0) for future in futures[1:]] == [None, None]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_work_that_cannot_begin_has_failed_and_holds_nobody_up(broken: int) -> None:
    def begin(index: int) -> Future[None]:
        if index == broken:
            raise OSError("no")
        future = uncancellable_future()
        future.set_result(None)
        return future

    futures = run_in_turn([partial(begin, index) for index in range(3)])
    assert [type(future.exception(0.0)) for future in futures] == [
        OSError if index == broken else type(None) for index in range(3)
    ]
