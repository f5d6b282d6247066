"""Shadowing by an engine that serves: a share of its blends is computed once more in full, behind everybody.

`quality.shadow` decides what is sampled, what differs and when to trip. Here is when: one at a time, while
nobody waits for a first token, and behind all requests in vLLM's queue. Under a load that never lets up
nothing is compared; what waits too long is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future

from prometheus_client import CollectorRegistry

from kintsugi.core.deploy import EngineSpec
from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.engine.asynchronous import AsyncEngine
from kintsugi.engine.local import Generation, Prompt
from kintsugi.quality.shadow import Shadow, ShadowConfig, ShadowCounts
from kintsugi.serving.fill import FILL_PRIORITY

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks whether somebody waits: a shadow has time."""
SHADOW_PRIORITY = FILL_PRIORITY + 1
ANSWER_TIMEOUT_S = 300.0


class Shadowing:
    """Of one engine, on the event loop that it lives in. `close` it before the engine."""

    def __init__(
        self, engine: AsyncEngine, config: ShadowConfig, registry: CollectorRegistry | None = None
    ) -> None:
        """``registry`` exports the counts; None keeps them here."""
        self._engine = engine
        self._answers = _InFull(engine, asyncio.get_running_loop())
        self._shadow = Shadow(self._answers, engine.store, engine.binding, config, registry=registry)
        self._task = asyncio.create_task(self._run(), name="kintsugi-shadow")
        engine.watch(self._shadow)

    @property
    def counts(self) -> ShadowCounts:
        return self._shadow.counts

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            while self._shadow.pending and not self._engine.stats().waiting:
                try:
                    await asyncio.to_thread(self._shadow.run_pending)
                except KintsugiError as error:
                    log.warning("an answer is not shadowed: %s", error)
                except Exception:
                    log.exception("an answer cannot be shadowed")

    async def close(self) -> None:
        """End the prefill that is under way, too. Idempotent."""
        self._engine.watch(None)
        self._answers.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class _InFull:
    """An engine as `Shadow` asks it, from a thread that is not the loop's."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._answer: Future[Generation] | None = None

    def cancel(self) -> None:
        """End what is under way: its thread would wait for it."""
        if self._answer is not None:
            self._answer.cancel()

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        """Raises `Unavailable` where the engine ends or does not get to it."""
        answers = []
        for prompt in prompts:
            work = self._engine.answer_in_full(prompt, SHADOW_PRIORITY)
            self._answer = asyncio.run_coroutine_threadsafe(work, self._loop)
            try:
                answers.append(self._answer.result(ANSWER_TIMEOUT_S))
            except TimeoutError:
                self._answer.cancel()
                raise Unavailable(f"the engine did not get to it in {ANSWER_TIMEOUT_S:.0f} s") from None
        return answers


def shadowing_of(
    spec: EngineSpec, engine: AsyncEngine, registry: CollectorRegistry | None = None
) -> Shadowing | None:
    """As a configuration says. None where nothing is to be shadowed, or there is nothing to hold a blend to:
    engines that blend regardless, or by a report file, which nobody can revise for all of them."""
    if not spec.shadow_share or spec.allow_uncalibrated or not engine.is_held_to_the_store:
        return None
    return Shadowing(engine, ShadowConfig(share=spec.shadow_share), registry)
