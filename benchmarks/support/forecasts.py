"""Measures how well the loading controller predicts a time to first token, and what its refusals gain."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from benchmarks.support.engines import cold, engine, say, store_chunks
from benchmarks.support.figures import Figure, spread
from benchmarks.support.prompts import NAMESPACE, ChunkPrompt
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store

SHAPE = "llama-210m"
STORE = "ram://loading?bytes_per_s=1e12"
CONTROLLED = {"store": STORE, "loading_controller": True, "ratio": 0.15}
RAM_BYTES_PER_S = 1e12
QUESTION = 40
TAUGHT = 3
"""Requests with which the controller learns a store's changed speed. They are not counted."""
RATIOS = (None, 0.05, 0.15, 0.3, 0.5)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    chunk_tokens: int
    requests: int
    """Number of requests per speed of the store."""
    repetitions: int

    @staticmethod
    def of(quick: bool) -> Scale:
        return Scale(96, 10, 3) if quick else Scale(320, 40, 9)


def throttle(bytes_per_s: float) -> None:
    store = open_store(STORE)
    assert isinstance(store, RamStore)
    store.bytes_per_s = bytes_per_s


def ask(running: LocalEngine, prompt: ChunkPrompt, params: KintsugiParams | None) -> Generation:
    return cold(running, Prompt(prompt.token_ids, params, max_tokens=1, ignore_eos=True))


def plain_ttft_s(running: LocalEngine, prompt: ChunkPrompt, repetitions: int) -> float:
    return statistics.median(ask(running, prompt, None).ttft_s for _ in range(repetitions))


def stored_bytes() -> int:
    return sum(manifest.chunk_bytes for manifest in open_store(STORE).list(NAMESPACE, limit=10_000))


def forget_chunks() -> None:
    store = open_store(STORE)
    store.delete(NAMESPACE, [manifest.key for manifest in store.list(NAMESPACE, limit=10_000)])


def ttft_prediction_error(quick: bool) -> list[Figure]:
    """Requests of 2 to 12 chunks at several ratios, from RAM and from stores around the break-even speed;
    errors of blends and refusals alike, each beside what was predicted before it ran."""
    scale, generator = Scale.of(quick), random.Random(11)
    pool = ChunkPrompt.make([scale.chunk_tokens] * 12, QUESTION, seed=21)
    with engine(SHAPE, extra=CONTROLLED) as running:
        store_chunks(running, pool)
        speeds = _speeds(running, pool, scale)
        errors: dict[str, list[float]] = {}
        outcomes: dict[str, int] = {}
        for name, bytes_per_s in speeds.items():
            throttle(bytes_per_s)
            errors[name] = []
            for index in range(TAUGHT + scale.requests):
                prompt = some_of(pool, generator)
                if index % 3 == 0:
                    ask(running, prompt, None)
                accounting = ask(running, prompt, prompt.params(generator.choice(RATIOS))).accounting or {}
                if index < TAUGHT or accounting.get("predicted_ttft_ms") is None:
                    continue
                outcomes[accounting["outcome"]] = outcomes.get(accounting["outcome"], 0) + 1
                errors[name].append(abs(accounting["predicted_ttft_ms"] / accounting["ttft_ms"] - 1))
            say(f"prediction, {name}: {statistics.median(errors[name]):.3f}")
    every = [error for part in errors.values() for error in part]
    by_speed = ", ".join(f"{name} {statistics.median(part):.3f}" for name, part in errors.items())
    detail = f"{len(every)} requests ({by_speed}); {outcomes}"
    return [Figure.at_most("ttft_prediction_error", statistics.median(every), 0.1, "", detail)]


def _speeds(running: LocalEngine, pool: ChunkPrompt, scale: Scale) -> dict[str, float]:
    break_even = stored_bytes() / plain_ttft_s(running, pool, scale.repetitions)
    return {
        "ram": RAM_BYTES_PER_S,
        "4x break-even": 4 * break_even,
        "break-even": break_even,
        "1/4 break-even": break_even / 4,
    }


def some_of(pool: ChunkPrompt, generator: random.Random) -> ChunkPrompt:
    count = generator.choice((2, 3, 4, 6, 8, 12))
    return ChunkPrompt(tuple(generator.sample(pool.chunks, count)), pool.question)


def refuse_ttft(quick: bool) -> list[Figure]:
    """A store at half the speed at which loading every chunk takes as long as computing all, and at twice."""
    scale = Scale.of(quick)
    prompt = ChunkPrompt.make([scale.chunk_tokens * 2] * 6, QUESTION, seed=31)
    figures = []
    with engine(SHAPE, extra=CONTROLLED) as running:
        forget_chunks()
        store_chunks(running, prompt)
        for name, factor, bar in (("refuse_ttft", 0.5, 1.05), ("twice_break_even_ttft", 2.0, 0.95)):
            throttle(RAM_BYTES_PER_S)
            break_even = stored_bytes() / plain_ttft_s(running, prompt, scale.repetitions)
            throttle(factor * break_even)
            for _ in range(TAUGHT):
                ask(running, prompt, prompt.params())
            plain, ours, became = [], [], []
            for _ in range(scale.repetitions):
                plain.append(ask(running, prompt, None).ttft_s)
                answer = ask(running, prompt, prompt.params())
                ours.append(answer.ttft_s)
                became.append(_in_words(answer.accounting or {}))
            ratio = statistics.median(ours) / statistics.median(plain)
            detail = f"{spread(ours)} ÷ {spread(plain)}; {', '.join(sorted(set(became)))}"
            figures.append(Figure.at_most(name, ratio, bar, detail=detail))
            say(f"{name}: {ratio:.3f} ({detail})")
    return figures


def _in_words(accounting: dict[str, object]) -> str:
    reason = str(accounting.get("reason") or "").split(":")[0]
    if accounting["outcome"] != "blended":
        return f"{accounting['outcome']} {reason}".strip()
    return f"blended, {accounting['chunks_recomputed']} of {accounting['chunks_hit']} chunks recomputed"
