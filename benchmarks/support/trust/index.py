"""Measures how long it takes to find one of many similar chunks by content, and how many are found.

All chunks begin with the same tokens, as passages with a common heading do; in the second shape they also end
with the same. Each prompt contains one of them between other tokens. A lookup is all that an engine does for
a prompt: it hashes every window, asks the store for the anchors, computes the keys, and looks them up. The
store is in the process, and the time is the thread's CPU time, so neither network nor disk nor others' work
is in it.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.support.figures import Figure
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.spaces import ANCHOR_TOKENS, ChunkKey, ChunkSpace, ModelFingerprint, TokenIds, anchors_of
from kintsugi.engine.scheduler.matching import match_content
from kintsugi.store.client.ram import RamStore

CHUNKS, CHUNKS_QUICK = 100_000, 3_000
OWN_TOKENS = 32
"""Tokens of a chunk that are its own."""
PROMPT_TOKENS = 1024
BAR_MS = 2.0


def _fill(space: ChunkSpace, chunks: list[TokenIds]) -> RamStore:
    layout = KVLayout.uniform(1, 1, 1, "float16")
    store = RamStore()
    for tokens in chunks:
        frames = [bytes(layout.frame_bytes(Codec.RAW, len(tokens)))]
        of = (space, ChunkKey.of(space, tokens), anchors_of(tokens), len(tokens), layout, Codec.RAW, frames)
        store.put(ChunkManifest.of(*of), frames)
    return store


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """The section's figures."""
    generator = random.Random(seed)
    common = TokenIds.of(generator.choices(range(1000), k=ANCHOR_TOKENS))
    space = ChunkSpace(ModelFingerprint(bytes(32)), "acme")
    around = TokenIds.of(generator.choices(range(2000, 3000), k=PROMPT_TOKENS))
    times_ms: list[float] = []
    missed, details = 0, []
    for name, tail in (("begin alike", TokenIds()), ("begin and end alike", common)):
        own = [
            TokenIds.of([number, *generator.choices(range(1000), k=OWN_TOKENS)])
            for number in range(CHUNKS_QUICK if quick else CHUNKS)
        ]
        chunks = [TokenIds.join((common, tokens, tail)) for tokens in own]
        store, some = _fill(space, chunks), []
        for chunk in chunks:
            prompt = TokenIds.join((around[:400], chunk, around[400 + len(chunk) :]))
            began_s = time.thread_time()
            match = match_content(store, space, prompt)
            some.append((time.thread_time() - began_s) * 1e3)
            missed += [(span.start, span.end) for span in match.spans] != [(400, 400 + len(chunk))]
        p95, most = statistics.quantiles(some, n=20)[-1], max(some)
        details.append(f"{name}: median {statistics.median(some):.2f}, p95 {p95:.2f}, max {most:.1f} ms")
        times_ms.append(p95)
    return [
        Figure.at_most("lookup_ms", max(times_ms), BAR_MS, "ms", detail="; ".join(details)),
        Figure.at_most("lookup_missed", float(missed), 0, f"of {2 * len(chunks)}"),
    ]
