"""Chunks on their way into the store are bounded however short they are."""

from __future__ import annotations

import asyncio
import time

import pytest

from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway import chunks as gateway_chunks
from kintsugi.gateway.chunks import Saver
from kintsugi.store.protocol.save_times import CLOCKS_DIFFER_S
from tests.fakes.stub_backend import StubBackend, StubDelays


def chunks(start: int, count: int) -> list[tuple[ChunkKey, TokenIds]]:
    keys = [ChunkKey(number.to_bytes(32, "little")) for number in range(start, start + count)]
    return [(key, TokenIds.of([0])) for key in keys]


def test_chunks_of_one_token_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_chunks, "WAITING_CHUNKS_MAX", 10)

    async def ask() -> None:
        saver = Saver(StubBackend(StubDelays(save_s=0.001)))
        futures = saver.submit("tenant", chunks(0, 8))
        with pytest.raises(ResourceExhausted, match=r"8 chunks of .* wait to be prefilled, .* at most 10"):
            saver.submit("tenant", chunks(8, 3))
        assert saver.submit("tenant", chunks(0, 8)) == futures, "those that wait already are no more"
        await asyncio.gather(*futures)
        await saver.save("tenant", chunks(8, 3))
        await saver.close()

    asyncio.run(ask())


def test_what_is_erased_is_not_saved_and_what_is_put_after_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three chunks is with an engine; the others wait for their turn."""
    monkeypatch.setattr(gateway_chunks, "RUNNING_MAX", 1)
    monkeypatch.setattr(gateway_chunks, "BATCH_TOKENS", 1)

    async def ask() -> None:
        backend = StubBackend(StubDelays(save_s=0.05))
        saver = Saver(backend)
        first, second, third = saver.submit("tenant", chunks(0, 3))
        (other,) = saver.submit("other", chunks(0, 1))
        while not backend.seen.saves:
            await asyncio.sleep(0)
        asked_s = time.time()
        (later,) = saver.submit("late", chunks(5, 1))
        saver.drop_erased("late", None, asked_s - 2 * CLOCKS_DIFFER_S)
        saver.times.note("tenant", asked_s)
        saver.drop_erased("tenant", None, asked_s)
        assert not first.done(), "the store refuses it"
        assert [one.result().is_saved for one in (second, third)] == [False, False]
        once_more, again = saver.submit("tenant", chunks(0, 2))
        assert once_more is not first
        assert again is not second
        outcomes = await asyncio.gather(first, once_more, again, other, later)
        assert all(one.is_saved for one in outcomes)
        assert len(backend.seen.saves) == 5, "neither of those that were dropped"
        times = [save[5] for save in backend.seen.saves if save[1] == "tenant"]
        assert [at_s > asked_s for at_s in times] == [False, True, True]
        assert saver._waiting_tokens.total == saver._waiting_chunks.total == 0
        await saver.close()

    asyncio.run(ask())


def test_who_wants_a_chunk_for_longer_does_not_share_the_save_of_who_does_not() -> None:
    async def ask() -> None:
        backend = StubBackend(StubDelays(save_s=0.001))
        saver = Saver(backend)
        passing = saver.submit("tenant", chunks(0, 1), ttl_s=60.0)
        assert saver.submit("tenant", chunks(0, 1), ttl_s=60.0) == passing
        lasting = saver.submit("tenant", chunks(0, 1))
        assert lasting != passing
        await asyncio.gather(*passing, *lasting)
        assert sorted([save[4] for save in backend.seen.saves], key=str) == [60.0, None]
        assert saver._waiting_tokens.total == saver._waiting_chunks.total == 0
        await saver.close()

    asyncio.run(ask())
