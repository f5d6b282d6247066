"""The store, for an event loop: its clients block, so each call runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kintsugi.core.errors import Unavailable
from kintsugi.store.protocol.interface import ChunkStore

Result = TypeVar("Result")

THREADS_MAX = 32
"""Maximum number of calls at a time; more wait, as many as there are requests."""


class ThreadedStore:
    """Runs calls to `store` in threads, for one event loop. Closes `store` when it is closed."""

    def __init__(self, store: ChunkStore, threads_max: int = THREADS_MAX) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads_max, "kintsugi-store")

    async def run(self, call: Callable[[ChunkStore], Result]) -> Result:
        """The result of `call` on the store. Raises what it raises, and `Unavailable` once this is closed.

        A caller that is cancelled does not wait. Its call never runs if it has no thread yet; one that has
        begun ends by its own deadline, and its result is dropped.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, call, self._store)
        except RuntimeError:
            raise Unavailable("this gateway is closed") from None
        return await running

    def run_here(self, call: Callable[[ChunkStore], Result]) -> Result:
        """As `run`, in the caller's thread, which is none of an event loop."""
        return call(self._store)

    async def close(self) -> None:
        """Close the store, which ends calls under way, and wait for them. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._store.close()
        self._pool.shutdown(cancel_futures=True)
