"""Coroutines that run to their end in the caller's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kintsugi.sdk.transport import iterate, run_to_completion


def test_a_coroutine_that_suspends_is_not_driven_blindly() -> None:
    async def suspend() -> None:
        await asyncio.sleep(0)

    coroutine = suspend()
    with pytest.raises(AssertionError, match="suspended"):
        run_to_completion(coroutine)
    coroutine.close()


def test_a_generator_that_is_left_early_is_closed() -> None:
    is_closed = False

    async def count() -> AsyncGenerator[int, None]:
        nonlocal is_closed
        try:
            for number in range(3):
                yield number
        finally:
            is_closed = True

    assert list(iterate(count())) == [0, 1, 2]
    is_closed = False
    numbers = iterate(count())
    assert next(numbers) == 0
    assert not is_closed
    numbers.close()  # type: ignore[attr-defined]
    assert is_closed
