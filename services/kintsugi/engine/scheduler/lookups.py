"""Lookups in the store on their own threads, so that no prompt waits for a store that does not answer.

Lookups run ahead of the blends, and their answers wait in memory until the request is blended or declined.
Both are bounded: lookups by `LOOKUPS_MAX`, answers by `ANSWER_BYTES_MAX`. While answers hold more than that,
no lookup begins; a request whose lookup could not begin waits in vLLM's queue until it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.logger import init_logger

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.errors import DeadlineExceeded, KintsugiError, NotBlendable, PermissionDenied, Unavailable
from kintsugi.core.layout import Codec
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.core.tokens import TokenIds
from kintsugi.engine.scheduler.matching import Match, in_codecs
from kintsugi.store.protocol.breaker import CircuitBreaker
from kintsugi.store.protocol.interface import ChunkStore

logger = init_logger(__name__)

LOOKUP_THREADS = 4
IDLE_WAIT_S = 0.002
"""How long a step waits for a lookup if the engine has nothing else to do. Polling at once would take the CPU
from the lookup's own thread."""
LOOKUPS_MAX = 256
"""Lookups that may wait. Beyond it, prompts are prefilled in full at once, not after a deadline each."""
ANSWER_BYTES_MAX = 64 << 20
"""Bytes of answers that may wait for their requests' turn."""
NO_ANSWER = (DeadlineExceeded, Unavailable)
"""Errors of a store that did not answer. With any other it did."""
SILENT = frozenset((*(error.__name__ for error in NO_ANSWER), "load_timeout", "stream_ended", "shard_silent"))
"""What a reason of a failed load begins with if the store did not answer, or broke off. A store that lacks
a chunk, or has damaged bytes of it, answers."""
SUSPENDED = "it failed lately and is not used for a moment"


@dataclass(eq=False)
class Lookup:
    """One request's lookup."""

    future: Future[Match]
    ask: Callable[[], Match]
    """Asks the store again for the same chunks."""
    answered_by_s: float
    """Monotonic time after which the lookup is given up."""
    is_taken: bool = False
    """Whether its answer has been used."""
    replaced_by: Match | None = None
    """What the scheduler's side made of the answer."""

    @property
    def is_waiting(self) -> bool:
        return not self.future.done()

    @property
    def answer(self) -> Match | None:
        """The match; None while waiting, and for a lookup that failed."""
        if self.is_waiting or self.future.cancelled() or self.future.exception() is not None:
            return None
        return self.replaced_by or self.future.result()


class Lookups:
    """Called from the scheduler's thread."""

    def __init__(
        self, store: ChunkStore, deadline_ms: float, codecs: Callable[[], frozenset[Codec] | None]
    ) -> None:
        """``codecs``: the codecs in which a chunk counts as found; None: all."""
        self._store = store
        self._deadline_s = deadline_ms / 1e3
        self._codecs = codecs
        self._breaker = CircuitBreaker(failures_max=1)
        """Opens at the first failure, so that a store that does not answer costs one prompt its deadline.
        Only `_probe` closes it: an answer from before the failure says nothing about the store now."""
        self._has_waited = False
        """Whether this step has waited for a lookup."""
        self._open: set[Lookup] = set()
        """Those whose requests are still to be planned."""
        self._room: int | None = None
        """Lookups that may still begin in this step; None until somebody asks."""
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="kintsugi-lookup")
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="kintsugi-probe")
        """Its own thread: lookups that hang do not delay a probe, nor a probe that hangs a lookup."""
        self._probing: Future[None] | None = None

    def step_began(self) -> None:
        self._has_waited = False
        self._room = None

    @property
    def num_waiting(self) -> int:
        """Lookups that the store has not answered."""
        return sum(lookup.is_waiting for lookup in self._open)

    @property
    def has_room(self) -> bool:
        """Whether another lookup may begin. Counts once a step: many requests may ask."""
        if self._room is None:
            answers = [lookup.answer for lookup in self._open]
            is_full = sum(answer.num_bytes for answer in answers if answer) >= ANSWER_BYTES_MAX
            self._room = 0 if is_full else max(0, LOOKUPS_MAX - self.num_waiting)
        return self._room > 0

    def name_key(self, namespace: str) -> bytes:
        """`ChunkSpace.name_key` of a namespace. Raises `NotBlendable` if its keys were destroyed or are not
        at hand."""
        try:
            return self._store.name_key(namespace)
        except PermissionDenied as error:
            raise NotBlendable("no_keys", str(error)) from error

    @property
    def is_store_suspended(self) -> bool:
        """Whether the store is not used because it failed lately."""
        return not self._breaker.is_closed

    def check_store(self, space: ChunkSpace, token_ids: TokenIds) -> None:
        """Raise `NotBlendable` while the store is not used because it failed lately.

        Now and then, look up `token_ids` on a thread to find out whether it answers again.
        """
        if not self.is_store_suspended:
            return
        is_probing = self._probing is not None and not self._probing.done()
        if not is_probing and self._breaker.allows():
            keys = [ChunkKey.of(space, token_ids)]
            self._begin_probe(partial(self._store.find, space.namespace, keys))
        raise NotBlendable("store_unavailable", SUSPENDED)

    def record_outcome(self, lookup: Lookup | None, accounting: Accounting) -> None:
        """Suspend the store if the blend that followed ``lookup`` failed because the store did not answer."""
        # Chunks that were lost together have a reason each.
        reasons = {reason.partition(":")[0] for reason in (accounting.reason or "").split("; ")}
        if lookup and accounting.outcome is Outcome.FAILED and reasons & SILENT:
            self._suspend(lookup)

    def _suspend(self, lookup: Lookup) -> None:
        """Use the store no more until it answers a probe in time. The first probe starts at once, because the
        store may only have been late, and asks for the same chunks: others may be in a shard that is well."""
        if not self.is_store_suspended:
            self._breaker.record_failure()
            self._begin_probe(lookup.ask)

    def _begin_probe(self, ask: Callable[[], object]) -> None:
        self._probing = self._prober.submit(self._probe, ask)

    def _probe(self, ask: Callable[[], object]) -> None:
        """Find out whether the store answers in time again."""
        answered_by_s = time.monotonic() + self._deadline_s
        has_answered = True
        try:
            ask()
        except NO_ANSWER:
            has_answered = False
        except KintsugiError:
            pass  # A refusal is an answer.
        except Exception:
            has_answered = False
            logger.exception("The check whether the store answers again failed")
        if has_answered and time.monotonic() <= answered_by_s:
            self._breaker.record_success()
        else:
            self._breaker.record_failure()

    def start(self, match: Callable[..., Match], space: ChunkSpace, *where: Any) -> Lookup:
        """``where``: the further arguments of ``match``."""
        ask = partial(self._find, match, space, *where)
        lookup = Lookup(self._threads.submit(ask), ask, time.monotonic() + self._deadline_s)
        self._open.add(lookup)
        if self._room is not None:
            self._room -= 1
        return lookup

    def _find(self, match: Callable[..., Match], space: ChunkSpace, *where: Any) -> Match:
        return in_codecs(match(self._store, space, *where), self._codecs())

    def result(self, lookup: Lookup, is_alone: Callable[[], bool]) -> Match | None:
        """The match, None while waiting. Raises `NotBlendable` where the lookup failed or took too long.

        ``is_alone``: whether the engine has nothing else to compute.
        """
        if lookup.is_waiting and not self._has_waited and is_alone():
            self._has_waited = True
            wait((lookup.future,), IDLE_WAIT_S)
        if lookup.is_waiting:
            if time.monotonic() > lookup.answered_by_s:
                if not lookup.future.cancel():  # else no thread was free, and the store was not asked
                    self._suspend(lookup)
                raise NotBlendable("store_timeout", "lookup took too long")
            if self.is_store_suspended:  # Another prompt found out, so this one need not wait, too.
                raise NotBlendable("store_unavailable", SUSPENDED)
            return None
        error = lookup.future.exception()
        if error is None:
            return lookup.answer
        if not isinstance(error, KintsugiError):
            logger.exception("Lookup failed", exc_info=error)
        if isinstance(error, NO_ANSWER):
            self._suspend(lookup)
        raise NotBlendable("store_unavailable", f"{type(error).__name__}: {error}")

    def release(self, lookup: Lookup | None) -> None:
        """The request has been planned or has ended, and its answer waits no more. Idempotent."""
        if lookup is not None:
            lookup.future.cancel()
            self._open.discard(lookup)

    def close(self) -> None:
        for threads in (self._threads, self._prober):
            threads.shutdown(wait=False, cancel_futures=True)
