"""vLLM's own prefill, cut where a blend is cut.

A blend computes all tokens but the last, and vLLM's next step the last one alone. Where vLLM computes a
recurrence in bfloat16, its kernel for one token rounds otherwise than its kernel for many, and the latter
rounds by blocks of tokens from the beginning of a step. So the same prompt in one step is not the same
computation; with the steps of a blend it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kintsugi.engine.local import Generation, LocalEngine, Prompt


def prefill_like_a_blend(engine: LocalEngine, prompt: Prompt, step_tokens: int | None = None) -> Generation:
    """Answer one plain prompt, with a prefill of all tokens but the last in steps of at most ``step_tokens``,
    then of the last. The engine is in this process."""
    with _cut_steps(engine, len(prompt.token_ids) - 1, step_tokens):
        return engine.generate([prompt])[0]


@contextmanager
def _cut_steps(engine: LocalEngine, before_last: int, step_tokens: int | None) -> Iterator[None]:
    scheduler: Any = engine.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    own, budget, done = scheduler.schedule, scheduler.max_num_scheduled_tokens, 0

    def schedule(*arguments: Any, **named: Any) -> Any:
        nonlocal done
        left = before_last - done
        if left > 0:
            scheduler.max_num_scheduled_tokens = min(left, step_tokens or left, budget)
        try:
            output = own(*arguments, **named)
        finally:
            scheduler.max_num_scheduled_tokens = budget
        done += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = schedule
    try:
        yield
    finally:
        scheduler.schedule = own
    assert done > before_last
