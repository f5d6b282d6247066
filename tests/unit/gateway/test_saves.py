"""Chunks on their way into the store are bounded however short they are."""

from __future__ import annotations

import asyncio

import pytest

from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.spaces import ChunkKey
from kintsugi.core.tokens import TokenIds
from kintsugi.gateway import saves
from kintsugi.gateway.saves import Saver
from tests.fakes.stub_backend import StubBackend, StubDelays


def chunks(start: int, count: int) -> list[tuple[ChunkKey, TokenIds]]:
    keys = [ChunkKey(number.to_bytes(32, "little")) for number in range(start, start + count)]
    return [(key, TokenIds.of([0])) for key in keys]


def test_chunks_of_one_token_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "WAITING_CHUNKS_MAX", 10)

    async def ask() -> None:
        saver = Saver(StubBackend(StubDelays(save_s=0.001)))
        futures = saver.submit("tenant", chunks(0, 8))
        with pytest.raises(ResourceExhausted, match="8 chunks wait to be prefilled and at most 10"):
            saver.submit("tenant", chunks(8, 3))
        assert saver.submit("tenant", chunks(0, 8)) == futures, "those that wait already are no more"
        await asyncio.gather(*futures)
        await saver.save("tenant", chunks(8, 3))
        await saver.close()

    asyncio.run(ask())
