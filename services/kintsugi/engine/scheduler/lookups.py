"""Looks up chunks in the store on separate threads, so that no prompt waits for a store that does not answer.

Lookups run before the blends, and their answers stay in memory until the request is blended or declined.
`LOOKUPS_MAX` bounds the lookups and `ANSWER_BYTES_MAX` the answers. While answers exceed it no lookup begins,
and a request whose lookup cannot begin waits in vLLM's queue.
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
from kintsugi.core.spaces import ChunkKey, ChunkSpace, TokenIds
from kintsugi.engine.scheduler.matching import Match, in_codecs
from kintsugi.store.protocol.breaker import CircuitBreaker
from kintsugi.store.protocol.interface import ChunkStore

logger = init_logger(__name__)

LOOKUP_THREADS = 4
IDLE_WAIT_S = 0.002
"""Time that a step waits for a lookup if the engine has nothing else to compute. Polling without a wait would
take the CPU from the lookup's thread."""
LOOKUPS_MAX = 256
"""Maximum number of waiting lookups. Further prompts are prefilled in full at once."""
ANSWER_BYTES_MAX = 64 << 20
"""Maximum size of the answers that wait for their requests to be planned."""
NO_ANSWER = (DeadlineExceeded, Unavailable)
"""Errors of a store that did not answer. Every other error counts as an answer."""
SILENT = frozenset((*(error.__name__ for error in NO_ANSWER), "load_timeout", "stream_ended", "shard_silent"))
"""First words of the failure reasons of loads for which the store did not answer or ended the stream early. A
store that lacks a chunk or holds damaged bytes has answered."""
SUSPENDED = "the store failed recently and is not used until it answers again"


@dataclass(eq=False)
class Lookup:
    """The lookup of one request."""

    future: Future[Match]
    ask: Callable[[], Match]
    """Repeats the lookup of the same chunks."""
    answered_by_s: float
    """Monotonic time after which the lookup is given up."""
    is_taken: bool = False
    """Whether its answer has been used."""
    replaced_by: Match | None = None
    """The match that the scheduler's side derived from the answer."""

    @property
    def is_waiting(self) -> bool:
        return not self.future.done()

    @property
    def answer(self) -> Match | None:
        """The match; None while waiting and for a failed lookup."""
        if self.is_waiting or self.future.cancelled() or self.future.exception() is not None:
            return None
        return self.replaced_by or self.future.result()


class Lookups:
    """The lookups of an engine's requests. Called from the scheduler's thread."""

    def __init__(
        self, store: ChunkStore, deadline_ms: float, codecs: Callable[[], frozenset[Codec] | None]
    ) -> None:
        """``codecs`` returns the codecs of chunks that may be used; None: all."""
        self._store = store
        self._deadline_s = deadline_ms / 1e3
        self._codecs = codecs
        self._breaker = CircuitBreaker(failures_max=1)
        """The breaker opens at the first failure, so that a store that does not answer delays only one
        prompt. Only `_probe` closes it: an answer to an earlier lookup does not show that the store works
        now."""
        self._has_waited = False
        """Whether the current step has waited for a lookup."""
        self._open: set[Lookup] = set()
        """Lookups whose requests are not planned yet."""
        self._room: int | None = None
        """Number of lookups that may still begin in this step; None: not computed yet."""
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="kintsugi-lookup")
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="kintsugi-probe")
        """A separate thread, so that lookups and probes that hang do not delay each other."""
        self._probing: Future[None] | None = None

    def step_began(self) -> None:
        self._has_waited = False
        self._room = None

    @property
    def num_waiting(self) -> int:
        """Number of lookups that the store has not answered."""
        return sum(lookup.is_waiting for lookup in self._open)

    @property
    def has_room(self) -> bool:
        """Whether another lookup may begin. Computed once per step, because many requests may need it."""
        if self._room is None:
            answers = [lookup.answer for lookup in self._open]
            is_full = sum(answer.num_bytes for answer in answers if answer) >= ANSWER_BYTES_MAX
            self._room = 0 if is_full else max(0, LOOKUPS_MAX - self.num_waiting)
        return self._room > 0

    def name_key(self, namespace: str) -> bytes:
        """Return `ChunkSpace.name_key` of a namespace. Raises `NotBlendable` if its keys were destroyed or
        are not available."""
        try:
            return self._store.name_key(namespace)
        except PermissionDenied as error:
            raise NotBlendable("no_keys", str(error)) from error

    @property
    def is_store_suspended(self) -> bool:
        """Whether the store is not used because it failed recently."""
        return not self._breaker.is_closed

    def check_store(self, space: ChunkSpace, token_ids: TokenIds) -> None:
        """Raise `NotBlendable` while the store is suspended.

        From time to time, looks up ``token_ids`` on a thread to find out whether the store answers again.
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
        # Each lost chunk has its own reason.
        reasons = {reason.partition(":")[0] for reason in (accounting.reason or "").split("; ")}
        if lookup and accounting.outcome is Outcome.FAILED and reasons & SILENT:
            self._suspend(lookup)

    def _suspend(self, lookup: Lookup) -> None:
        """Stop using the store until it answers a probe in time. The first probe starts at once, because the
        store may only have been late. It looks up the same chunks, because others may be in a healthy
        shard."""
        if not self.is_store_suspended:
            self._breaker.record_failure()
            self._begin_probe(lookup.ask)

    def _begin_probe(self, ask: Callable[[], object]) -> None:
        self._probing = self._prober.submit(self._probe, ask)

    def _probe(self, ask: Callable[[], object]) -> None:
        """Close the breaker if the store answers in time."""
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
            logger.exception("The probe of the store failed because of a defect")
        if has_answered and time.monotonic() <= answered_by_s:
            self._breaker.record_success()
        else:
            self._breaker.record_failure()

    def start(self, match: Callable[..., Match], space: ChunkSpace, *where: Any) -> Lookup:
        """Start a lookup on a thread. ``where``: the further arguments of ``match``."""
        ask = partial(self._find, match, space, *where)
        lookup = Lookup(self._threads.submit(ask), ask, time.monotonic() + self._deadline_s)
        self._open.add(lookup)
        if self._room is not None:
            self._room -= 1
        return lookup

    def _find(self, match: Callable[..., Match], space: ChunkSpace, *where: Any) -> Match:
        return in_codecs(match(self._store, space, *where), self._codecs())

    def result(self, lookup: Lookup, is_alone: Callable[[], bool]) -> Match | None:
        """Return the match; None while waiting. Raises `NotBlendable` if the lookup failed or took too long.

        ``is_alone`` returns whether the engine has nothing else to compute.
        """
        if lookup.is_waiting and not self._has_waited and is_alone():
            self._has_waited = True
            wait((lookup.future,), IDLE_WAIT_S)
        if lookup.is_waiting:
            if time.monotonic() > lookup.answered_by_s:
                if not lookup.future.cancel():  # a cancelled lookup never reached the store
                    self._suspend(lookup)
                raise NotBlendable("store_timeout", "the lookup took too long")
            if self.is_store_suspended:  # Another prompt has found this out, so this one need not wait.
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
        """Drop the lookup of a request that has been planned or has ended. Idempotent."""
        if lookup is not None:
            lookup.future.cancel()
            self._open.discard(lookup)

    def close(self) -> None:
        for threads in (self._threads, self._prober):
            threads.shutdown(wait=False, cancel_futures=True)
