"""Questions to the store, on threads of their own: nobody's prompt waits for a store that does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from vllm.logger import init_logger

from kintsugi.core.errors import DeadlineExceeded, KintsugiError, NotBlendable, Unavailable
from kintsugi.core.layout import Codec
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.core.tokens import TokenIds
from kintsugi.engine.scheduler.matching import Match, in_codecs
from kintsugi.store.client.breaker import CircuitBreaker
from kintsugi.store.protocol.interface import ChunkStore

logger = init_logger(__name__)

LOOKUP_THREADS = 4
IDLE_WAIT_S = 0.002
"""How long a step waits for a lookup where the engine has nothing else to do: looking again at once would
take from the lookup's own thread what it needs to come to an end."""
LOOKUPS_MAX = 256
"""Lookups that may wait: beyond it prompts are prefilled in full at once, not after a deadline each."""


class Lookup:
    """What one request asked, answered or not."""

    def __init__(self, future: Future[Match], answered_by_s: float) -> None:
        self.future = future
        self.answered_by_s = answered_by_s
        """Monotonic time after which the store is no longer waited for."""
        self.is_taken = False

    @property
    def is_waiting(self) -> bool:
        return not self.future.done()

    @property
    def answer(self) -> Match | None:
        """None before it is there, and where there will be none."""
        if self.is_waiting or self.future.cancelled() or self.future.exception() is not None:
            return None
        return self.future.result()

    def cancel(self) -> None:
        self.future.cancel()


class Lookups:
    """Called from the scheduler's thread."""

    def __init__(
        self, store: ChunkStore, deadline_ms: float, codecs: Callable[[], frozenset[Codec] | None]
    ) -> None:
        """``codecs``: those of which chunks count as found when they are looked up; None: all."""
        self._store = store
        self._deadline_s = deadline_ms / 1e3
        self._codecs = codecs
        self._breaker = CircuitBreaker()
        """A store that does not answer costs a few prompts their deadline, not every one."""
        self._has_waited = False
        """Whether this step has waited for a lookup."""
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="kintsugi-lookup")

    def step_began(self) -> None:
        self._has_waited = False

    def check_store(self, space: ChunkSpace, token_ids: TokenIds) -> None:
        """Raise `NotBlendable` while the store is left alone; from time to time find out beside it whether it
        answers again, by asking for `token_ids`."""
        if self._breaker.is_closed:
            return
        if self._breaker.allows():
            self._threads.submit(self._ask_again, space, token_ids)
        raise NotBlendable("store_unavailable", "it failed lately and is left alone for a moment")

    def _ask_again(self, space: ChunkSpace, token_ids: TokenIds) -> None:
        """Find out whether the store answers in time again, on a thread of its own: no prompt waits."""
        answered_by_s = time.monotonic() + self._deadline_s
        try:
            self._store.find(space.namespace, [ChunkKey.of(space, token_ids)])
        except KintsugiError:
            self._breaker.failed()
        except Exception:
            self._breaker.failed()
            logger.exception("Asking the store whether it answers again broke")
        else:
            if time.monotonic() > answered_by_s:
                self._breaker.failed()
            else:
                self._breaker.record_success()

    def start(self, match: Callable[..., Match], space: ChunkSpace, where: Sequence[Any]) -> Lookup:
        future = self._threads.submit(self._find, match, space, where)
        return Lookup(future, time.monotonic() + self._deadline_s)

    def _find(self, match: Callable[..., Match], space: ChunkSpace, where: Sequence[Any]) -> Match:
        codecs = self._codecs()
        return in_codecs(match(self._store, space, where), codecs)

    def result(self, lookup: Lookup, is_alone: Callable[[], bool]) -> Match | None:
        """The answer once it is there, None before. Raises `NotBlendable` where it is given up.

        ``is_alone``: whether nothing else could be computed meanwhile.
        """
        if lookup.is_waiting and not self._has_waited and is_alone():
            self._has_waited = True
            wait((lookup.future,), IDLE_WAIT_S)
        if lookup.is_waiting:
            if time.monotonic() > lookup.answered_by_s:
                lookup.cancel()
                self._breaker.failed()
                raise NotBlendable("store_timeout", "lookup took too long")
            return None
        error = lookup.future.exception()
        if error is None:
            return lookup.future.result()
        if not isinstance(error, KintsugiError):
            logger.exception("Lookup failed", exc_info=error)
        if isinstance(error, (Unavailable, DeadlineExceeded)):
            self._breaker.failed()
        raise NotBlendable("store_unavailable", f"{type(error).__name__}: {error}")

    def take(self, lookup: Lookup) -> None:
        """Its answer is used, for the first time."""
        lookup.is_taken = True
        self._breaker.record_success()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
