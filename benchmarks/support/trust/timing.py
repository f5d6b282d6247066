"""Tests whether a caller can tell from the TTFT that a chunk is stored, and what hiding it costs.

The attack is SpliceLeak's (arXiv 2606.21842): a prompt of chunks that are known to be stored and one guess,
which is stored or not; the guess is right where the first token comes earlier. Each prompt has its own order
and question, so that vLLM's prefix cache reveals nothing. The bundled model answers in a process of its own,
behind a gateway in this one. The time step is chosen as docs/TENANTS.md says, from prompts that are not
judged: a little above what first tokens take if the guess is missing.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.support.figures import Figure, spread
from kintsugi.core.namespaces import NamespacePrivacy, NamespaceRules, PrivacyExpert
from kintsugi.core.spaces import TokenIds
from kintsugi.engine.asynchronous import AsyncEngine, AsyncSpec, launch
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.prompts import GenerateCall, Resolved
from kintsugi.gateway.texts.segments import Segment
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.access import ANYONE
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier

NAMESPACE = "team"
CHUNKS = 12
CHUNK_TOKENS = 256
VOCABULARY = 425
"""Number of the bundled model's token ids."""
STORED = 48
PROBES = 500
PROBES_QUICK = 20
UNPADDED = 200
"""Probes of each kind by which the step is chosen, and the attack without padding measured."""
HIDDEN_SHARE = 0.99
"""Part of the first tokens with a missing guess that the step hides. What takes longer does so because the
machine was busy, whether the guess was right or not."""
MARGIN = 1.05
"""The step, relative to the slowest of them."""
AUC_BAR = 0.55
SPEEDUP_BAR = 1.3
CONFIG = {
    "quality": "off",
    "loading_controller": False,
    "lookup_deadline_ms": 30_000,
    "layer_deadline_ms": 30_000,
}


@dataclass
class Attacker:
    """Makes prompts and measures their first tokens."""

    gateway: Gateway
    generator: random.Random

    def __post_init__(self) -> None:
        self.stored = [self.fresh_chunk() for _ in range(STORED)]

    def fresh_chunk(self) -> Segment:
        return Segment(
            token_ids=TokenIds.of([self.generator.randrange(10, VOCABULARY) for _ in range(CHUNK_TOKENS)])
        )

    async def put(self) -> None:
        await self.gateway.put_chunks(ANYONE, NAMESPACE, self.stored)

    async def probe_s(self, is_stored: bool, no_blend: bool = False) -> float:
        """The time to first token of a prompt whose guess is stored, or not."""
        chunks = self.generator.sample(self.stored, CHUNKS)
        if not is_stored:
            chunks[self.generator.randrange(CHUNKS)] = self.fresh_chunk()
        question = Segment(
            token_ids=TokenIds.of([self.generator.randrange(10, VOCABULARY) for _ in range(16)])
        )
        call = GenerateCall(NAMESPACE, tuple(chunks), question, {"max_tokens": 1}, no_blend=no_blend)
        began_s, first_s = time.perf_counter(), 0.0
        async with aclosing(self.gateway.generate(ANYONE, call)) as events:
            async for event in events:
                if not first_s and not isinstance(event, Resolved):
                    first_s = time.perf_counter() - began_s
        return first_s

    async def probes_s(self, count: int) -> tuple[list[float], list[float]]:
        """Times with the guess stored and missing, one after the other in random order."""
        times: dict[bool, list[float]] = {True: [], False: []}
        kinds = [True, False] * count
        self.generator.shuffle(kinds)
        for kind in kinds:
            times[kind].append(await self.probe_s(kind))
        return times[True], times[False]


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """The probability of telling a hit from a miss by its time; 0.5 means that they cannot be told apart."""
    ordered = sorted(misses)
    wins = sum(len(ordered) - (bisect_left(ordered, hit) + bisect_right(ordered, hit)) / 2 for hit in hits)
    area = wins / (len(hits) * len(misses))
    return max(area, 1 - area)


async def _measure(url: str, probes: int, unpadded: int, seed: int) -> list[Figure]:
    spec = AsyncSpec(
        str(bundled_checkpoint()),
        BUNDLED_NAME,
        url,
        extra_config=CONFIG,
        vllm_args={"max_model_len": 4096, "dtype": "float32", "kv_cache_memory_bytes": 256 << 20},
    )
    engine = AsyncEngine(spec, await launch(spec, lambda binding: None))
    gateway = Gateway(engine, open_store(url), lambda text: [ord(one) for one in text])
    try:
        await engine.warm_up()
        attacker = Attacker(gateway, random.Random(seed))
        await attacker.put()
        await attacker.probes_s(2)
        hits, misses = await attacker.probes_s(unpadded)
        full = [await attacker.probe_s(True, no_blend=True) for _ in range(unpadded)]
        step_ms = MARGIN * sorted(misses)[int(HIDDEN_SHARE * (len(misses) - 1))] * 1e3
        rules = NamespacePrivacy(expert=PrivacyExpert(ttft_step_ms=step_ms, accounting=False))
        gateway.set_rules(NamespaceRules(privacy={NAMESPACE: rules}))
        padded_hits, padded_misses = await attacker.probes_s(probes)
    finally:
        await gateway.close()
        await engine.close()
    padded_s = statistics.median([*padded_hits, *padded_misses])
    over = sum(time_s > 1.5 * step_ms / 1e3 for time_s in (*padded_hits, *padded_misses))
    detail = f"{probes} each; step {step_ms:.0f} ms, {over} probes took more than one"
    return [
        Figure.at_most("timing_auc", auc(padded_hits, padded_misses), AUC_BAR, "", detail),
        Figure.at_least(
            "padded_speedup",
            statistics.median(full) / padded_s,
            SPEEDUP_BAR,
            detail=f"full {spread(full)}, padded {padded_s:.3g} s, hit {spread(hits)}, miss {spread(misses)}",
        ),
        Figure("timing_auc_unpadded", auc(hits, misses), "", detail=f"{unpadded} each"),
        Figure("unpadded_speedup", statistics.median(full) / statistics.median(hits), "×"),
    ]


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """The section's figures."""
    probes, unpadded = (PROBES_QUICK, PROBES_QUICK) if quick else (PROBES, UNPADDED)
    with ShardServer(Shard(RamTier(512 << 20)), "127.0.0.1:0") as shard:
        return asyncio.run(_measure(f"grpc://{shard.address}", probes, unpadded, seed))
