"""The store for an event loop. Store clients block, so each call runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kintsugi.core.errors import Unavailable
from kintsugi.store.protocol.interface import ChunkStore

Result = TypeVar("Result")

THREADS_MAX = 32
"""Maximum number of concurrent calls; further ones wait. The limits of requests bound their number."""


class ThreadedStore:
    """Runs calls to `store` in threads, for one event loop. Closes `store` when it is closed."""

    def __init__(self, store: ChunkStore, threads_max: int = THREADS_MAX) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads_max, "kintsugi-store")

    async def run(self, call: Callable[[ChunkStore], Result]) -> Result:
        """Return the result of `call` on the store. Raises its errors, and `Unavailable` after `close`.

        A cancelled caller does not wait. Its call is dropped if it has not started; otherwise the call ends
        by its own deadline.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, call, self._store)
        except RuntimeError:
            raise Unavailable("this gateway is closed") from None
        return await running

    def run_here(self, call: Callable[[ChunkStore], Result]) -> Result:
        """As `run`, in the caller's thread. Call it from a thread without an event loop."""
        return call(self._store)

    async def close(self) -> None:
        """Close the store, which ends running calls, and wait for them. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._store.close()
        self._pool.shutdown(cancel_futures=True)
