"""Shadowing: a serving engine recomputes a share of its blended answers by full prefill.

`quality.shadow` decides what is sampled, what differs and when to trip. This module decides when to compute:
one answer at a time, while no request waits for its first token, with the lowest priority in vLLM's queue,
and for at most a share of the engine's time. Under constant load nothing is compared; samples that wait too
long are dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry

from kintsugi.core.deploy import EngineSpec
from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.core.spaces import ChunkSpace
from kintsugi.engine.asynchronous import AsyncEngine
from kintsugi.engine.local import Generation, Prompt
from kintsugi.gateway.fill import FILL_PRIORITY
from kintsugi.quality.effect import ShadowCounts
from kintsugi.quality.shadow import Shadow, ShadowConfig

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Interval between checks for waiting requests."""
SHADOW_PRIORITY = FILL_PRIORITY + 1
ANSWER_TIMEOUT_S = 300.0
SHADOW_SHARE = 0.005
"""Share of blended requests that an engine computes again in full."""
SHADOW_PER_MINUTE = 1.0
"""Blends per minute that an engine computes again if the share yields fewer."""
SHADOW_TIME_SHARE = 0.05
"""Maximum share of an engine's time that full prefills may take."""
_CLOSING = "the engine is about to stop"


class Shadowing:
    """Shadows one engine, on that engine's event loop. `close` it before the engine."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ShadowConfig,
        registry: CollectorRegistry | None = None,
        time_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``registry`` exports the counts; None: no export. ``time_share``: maximum share of the time that
        full prefills may take."""
        self._engine = engine
        self._time_share = time_share
        self._clock = clock
        self._rested_s = clock()
        """When the next full prefill may start."""
        self._answers = _InFull(engine, asyncio.get_running_loop())
        self._shadow = Shadow(self._answers, engine.store, engine.binding, config, registry=registry)
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="kintsugi-shadow")
        engine.watch(self._shadow)

    @property
    def counts(self) -> ShadowCounts:
        return self._shadow.counts

    async def _run(self) -> None:
        while not self._closing.is_set():
            while self._may_run():
                started_s = self._clock()
                try:
                    await asyncio.to_thread(self._shadow.run_pending)
                except KintsugiError as error:
                    log.warning("an answer was not shadowed: %s", error)
                except Exception:
                    log.exception("an answer could not be shadowed")
                self._rested_s = started_s + (self._clock() - started_s) / self._time_share
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), POLL_S)

    def _may_run(self) -> bool:
        idle = not self._engine.stats().waiting
        rested = self._clock() >= self._rested_s
        return bool(self._shadow.pending) and idle and rested and not self._closing.is_set()

    async def close(self) -> None:
        """Cancel the running prefill and wait for its thread. Nothing uses the engine or its store
        afterwards. Idempotent."""
        self._engine.watch(None)
        self._closing.set()
        self._answers.close()
        await asyncio.gather(self._task, return_exceptions=True)


class _InFull:
    """Computes full prefills and audits for `Shadow`, which calls it from another thread."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._lock = threading.Lock()
        self._answer: Future[Generation] | None = None
        self._closed = False

    def close(self) -> None:
        """Cancel the running prefill, and start no more."""
        with self._lock:
            self._closed = True
            if self._answer is not None:
                self._answer.cancel()

    def space(self, namespace: str) -> ChunkSpace:
        return self._engine.space(namespace)

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        """Compute full prefills, and audits for prompts with parameters. Raises `Unavailable` if the engine
        ends or is busy for too long."""
        answers = []
        for prompt in prompts:
            compute = self._engine.answer_in_full if prompt.params is None else self._engine.audit
            answer = self._submit_answer(compute(prompt, SHADOW_PRIORITY))
            try:
                answers.append(answer.result(ANSWER_TIMEOUT_S))
            except CancelledError:
                raise Unavailable(_CLOSING) from None
            except TimeoutError:
                answer.cancel()
                raise Unavailable(f"the engine was busy for {ANSWER_TIMEOUT_S:.0f} s") from None
        return answers

    def _submit_answer(self, work: Coroutine[Any, Any, Generation]) -> Future[Generation]:
        with self._lock:
            if self._closed:
                work.close()
                raise Unavailable(_CLOSING)
            self._answer = asyncio.run_coroutine_threadsafe(work, self._loop)
            return self._answer


def make_shadowing(
    spec: EngineSpec, engine: AsyncEngine, registry: CollectorRegistry | None = None
) -> Shadowing | None:
    """Return the shadowing of an engine; None for an engine whose report is not in the store.

    Such an engine blends without calibration, or by a report file, which cannot be revised for all engines.
    """
    if spec.allow_uncalibrated or not engine.is_held_to_the_store:
        return None
    config = ShadowConfig(SHADOW_SHARE, per_minute=SHADOW_PER_MINUTE)
    return Shadowing(engine, config, registry, SHADOW_TIME_SHARE)
