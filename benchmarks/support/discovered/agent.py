"""A scripted agent through vLLM's own server with the connector: tool results that come again, in a history
that is compacted.

At every step the agent reads a file, whose text becomes a tool's result, and answers. Where the history
grows too long, it is replaced by a summary and the last results, in another order. The model has random
weights: the script decides what is read.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from benchmarks.support.discovered.service import FULL, QUICK
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.servers import NAME, Server, checkpoint, plain_server
from kintsugi.bench.profile import RagWorkload, corpus
from kintsugi.core.accounting import Outcome
from kintsugi.core.request import PARAMS_KEY, KintsugiParams
from kintsugi.engine.local import transfer_config
from kintsugi.precompute.chunking import Chunker
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier

STEPS, QUICK_STEPS = 80, 12
FILES = RagWorkload(documents=24, zipf=0.9, chunks=1, chunk_tokens=350, seed=3)
QUICK_FILES = RagWorkload(documents=5, zipf=0.9, chunks=1, chunk_tokens=200, seed=3)
HISTORY_CHARS_MAX = 9_000
KEPT_RESULTS = 3
ANSWER_TOKENS = 12
TOOL_S = 0.5
"""Time that a tool takes. The engine is idle meanwhile."""
STORE_BYTES = 2 << 30
BAR = 0.6
SYSTEM = "You are an agent. Read files, think about them, and answer in one line.\n\n"


def measure(quick: bool) -> list[Figure]:
    setting, files, steps = (QUICK, QUICK_FILES, QUICK_STEPS) if quick else (FULL, FILES, STEPS)
    with checkpoint(setting.shape) as model, ShardServer(Shard(RamTier(STORE_BYTES)), "127.0.0.1:0") as shard:
        chunker = Chunker.of_model(model)
        texts = corpus(files, lambda text: len(chunker.token_ids(text)))
        config = {
            "store": f"grpc://{shard.address}",
            "allow_uncalibrated": True,
            "loading_controller": setting.loading_controller,
            "ratio_max": setting.ratio,
        }
        with plain_server(model, setting, transfer_config(config)) as server:
            told = list(_run_agent(server, texts, steps))
    hit, total = (sum(part) for part in zip(*((hit, total) for hit, total, _ in told), strict=True))
    outcomes = dict(Counter(outcome for _, _, outcome in told))
    detail = f"{hit:,} of {total:,} prompt tokens from prefix cache or store, {steps} steps; {outcomes}"
    return [Figure.at_least("agent_hit_rate", hit / total, None if quick else BAR, "", detail)]


def _run_agent(server: Server, texts: list[str], steps: int) -> Iterator[tuple[int, int, str]]:
    """Tokens hit, tokens of the prompt, and the outcome of every step."""
    generator = random.Random("agent")
    weights = [(rank + 1) ** -0.9 for rank in range(len(texts))]
    history: list[str] = []
    with httpx.Client(base_url=server.endpoint.url, timeout=300) as client:
        for step in range(steps):
            time.sleep(TOOL_S)
            (text,) = generator.choices(texts, weights)
            history.append(f"Result of step {step}:\n\n{text}\n\n")
            if sum(map(len, history)) > HISTORY_CHARS_MAX:
                kept = generator.sample(history[-KEPT_RESULTS:], KEPT_RESULTS)
                history = [f"Summary at step {step}: {' '.join(text.split()[:30])}\n\n", *kept]
            answer, hit, total, outcome = _ask(client, SYSTEM + "".join(history))
            history.append(f"Answer {step}: {answer}\n\n")
            say(f"step {step}: {hit} of {total} tokens, {outcome}")
            yield hit, total, outcome


def _ask(client: httpx.Client, prompt: str) -> tuple[str, int, int, str]:
    body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        # An unnamed request is discovered alike, and told nothing of what was hit.
        "kv_transfer_params": KintsugiParams("agent", discover=True).to_mapping(),
    }
    response = client.post("/completions", json=body).raise_for_status().json()
    found: dict[str, Any] = response["kv_transfer_params"][PARAMS_KEY]
    hit = int(found["tokens_prefix_cached"])
    if found["outcome"] == Outcome.BLENDED.value:
        hit += int(found["tokens_hit"])
    return response["choices"][0]["text"], hit, int(response["usage"]["prompt_tokens"]), found["outcome"]
