"""Blocking calls to the store, seen from an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import ChunkStore

WAIT_S = 10.0
KEY = ChunkKey(bytes(32))


class Gated(RamStore):
    """Lookups wait until the store is closed, as calls to a shard that does not answer do."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.opened = threading.Semaphore(0), threading.Event()

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        self.waiting.release()
        assert self.opened.wait(WAIT_S)
        raise Unavailable("the shard does not answer")

    def close(self) -> None:
        self.opened.set()


def ask(store: ChunkStore) -> list[str | None]:
    return store.tiers("acme", [KEY])


async def asking(store: ThreadedStore, gate: Gated) -> asyncio.Task[list[str | None]]:
    """A call that has a thread and waits."""
    task = asyncio.create_task(store.run(ask))
    assert await asyncio.to_thread(gate.waiting.acquire, timeout=WAIT_S)
    return task


def test_the_loop_goes_on_while_a_call_waits_and_closing_ends_it() -> None:
    async def run() -> None:
        gate = Gated()
        store = ThreadedStore(gate)
        task = await asking(store, gate)
        await asyncio.wait_for(store.run(lambda held: held.lookup("acme", [KEY])), WAIT_S)
        assert not task.done()
        await store.close()
        with pytest.raises(Unavailable, match="does not answer"):
            await task
        await store.close()
        with pytest.raises(Unavailable, match="closed"):
            await store.run(ask)

    asyncio.run(run())


def test_a_cancelled_caller_does_not_wait_and_its_call_may_never_run() -> None:
    async def run() -> None:
        gate = Gated()
        store = ThreadedStore(gate, threads_max=1)
        begun = await asking(store, gate)
        ran = False

        def mark(held: ChunkStore) -> None:
            nonlocal ran
            ran = True

        queued = asyncio.create_task(store.run(mark))
        await asyncio.sleep(0)
        for task in (begun, queued):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not gate.opened.is_set(), "nobody waited for the shard"
        gate.opened.set()
        await store.run(lambda held: held.lookup("acme", [KEY]))
        assert not ran
        await store.close()

    asyncio.run(run())
