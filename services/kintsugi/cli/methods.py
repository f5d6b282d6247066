"""Runs the four methods of prefilling a RAG prompt, which the paper compares, on one engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from kintsugi.core.accounting import Outcome
from kintsugi.core.plan import RagPrompt, Selection, make_trial
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import Generation, Prompt


class Method(StrEnum):
    """A method of obtaining a prompt's KV."""

    FULL = "full prefill"
    PREFIX = "prefix caching"
    REUSE = "full KV reuse"
    BLEND = "blend"


class DemoEngine(Protocol):
    """The part of `engine.local.LocalEngine` that is used here."""

    def generate(self, prompts: list[Prompt]) -> list[Generation]: ...

    def reset_prefix_cache(self) -> None: ...


@dataclass(frozen=True)
class Measurement:
    """The result of one method on one prompt."""

    method: Method
    ttft_s: float
    """Median over the repetitions."""
    cost: float
    """Share of a full prefill's token-layers that was computed."""
    generation: Generation
    """The answer of the last repetition."""

    @property
    def fell_back_because(self) -> str | None:
        """Why a blend fell back to a full prefill; None if it did not."""
        accounting = self.generation.accounting
        if self.method not in (Method.REUSE, Method.BLEND):
            return None
        if accounting is None:
            return "the connector reported nothing"
        if accounting.get("outcome") in (Outcome.BLENDED.value, Outcome.PREFIX_HIT.value):
            return None
        return str(accounting.get("reason") or accounting.get("outcome"))

    def to_mapping(self, full_ttft_s: float) -> dict[str, Any]:
        """JSON form; ``full_ttft_s`` is the TTFT of full prefill."""
        generation = self.generation
        return {
            "method": self.method.value,
            "ttft_ms": round(self.ttft_s * 1e3, 2),
            "speedup": round(full_ttft_s / self.ttft_s, 3),
            "cost": round(self.cost, 4),
            "token_ids": generation.token_ids,
            "text": generation.text,
            "accounting": generation.accounting,
        }


def compare(
    engine: DemoEngine,
    prompt: RagPrompt,
    choice: KintsugiParams,
    max_tokens: int,
    repeat: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> list[Measurement]:
    """Run every method `repeat` times, interleaved. ``choice`` holds the options of the blend. Calls `say`
    with the name of each run.

    Each method first runs once untimed: the first use of a kernel or a cache block costs extra.
    """
    for method in Method:
        say(f"warm-up, {method}")
        _run(engine, prompt, choice, method, max_tokens=1)
    runs: dict[Method, list[Generation]] = {method: [] for method in Method}
    for number in range(1, repeat + 1):
        for method in Method:
            say(f"run {number} of {repeat}, {method}")
            runs[method].append(_run(engine, prompt, choice, method, max_tokens))
    return [_summarize_method(method, runs[method], prompt) for method in Method]


def blend_once(engine: DemoEngine, prompt: RagPrompt, choice: KintsugiParams, max_tokens: int) -> Measurement:
    """Run only the blend, once and without a warm-up."""
    generation = _run(engine, prompt, choice, Method.BLEND, max_tokens)
    return _summarize_method(Method.BLEND, [generation], prompt)


def _run(
    engine: DemoEngine, prompt: RagPrompt, choice: KintsugiParams, method: Method, max_tokens: int
) -> Generation:
    """Answer the prompt once, with a prefix cache that holds only blocks of this method."""
    engine.reset_prefix_cache()
    if method is Method.PREFIX:
        engine.generate([Prompt(prompt.warm_up, max_tokens=1)])
    params = None
    if method is Method.REUSE:
        # Full KV reuse rarely passes; it runs here for comparison.
        reuse = make_trial(Selection(0.0))
        params = KintsugiParams(choice.namespace, spans=prompt.spans, trial=reuse)
    elif method is Method.BLEND:
        params = replace(choice, spans=prompt.spans)
    (generation,) = engine.generate([Prompt(prompt.token_ids, params, max_tokens)])
    return generation


def _summarize_method(method: Method, generations: list[Generation], prompt: RagPrompt) -> Measurement:
    last = generations[-1]
    return Measurement(
        method=method,
        ttft_s=statistics.median(generation.ttft_s for generation in generations),
        cost=_cost(last, len(prompt.token_ids)),
        generation=last,
    )


def _cost(generation: Generation, prompt_tokens: int) -> float:
    if generation.accounting is not None:
        return float(generation.accounting.get("cost", 1.0))
    return 1.0 - generation.num_cached_tokens / prompt_tokens
