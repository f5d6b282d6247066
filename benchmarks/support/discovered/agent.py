"""Runs a scripted agent on vLLM's own server with the connector: tool results recur in a history that is
compacted.

At every step the agent reads a file by calling a tool, whose result becomes a message, and answers. When the
history grows too long, it is replaced by a summary and the last results, in another order. The model has
random weights: the script decides what is read, and writes the calls.

The agent is unmodified: its requests name no namespace, so chunks are looked for where segments begin and
nowhere else, and its answers say nothing of them. What was hit is read from the server's metrics; vLLM's own
`cached_tokens` would count what a blend computed as well.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.discovered.service import FULL, QUICK
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.load.profile import RagWorkload, corpus
from benchmarks.support.servers import NAME, Server, checkpoint, plain_server
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
SYSTEM = "You are an agent. Read files, think about them, and answer in one line."
READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "The text of a file.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
Message = dict[str, Any]


@dataclass(frozen=True)
class Counted:
    """A server's counters."""

    prompt_tokens: float
    prefix_tokens: float
    """Tokens of prompts that vLLM's prefix cache held."""
    chunk_tokens: float
    """Tokens of prompts that stored chunks held, where these were blended."""
    outcomes: Counter[str]
    """Requests by outcome."""

    @staticmethod
    def of(metrics: str) -> Counted:
        """From the text of vLLM's `/metrics`. A counter that is not there yet is 0."""
        amounts: defaultdict[str, float] = defaultdict(float)
        outcomes: Counter[str] = Counter()
        for family in text_string_to_metric_families(metrics):
            for name, labels, value, *_ in family.samples:
                if name == "kintsugi_requests_total":
                    outcomes[labels["outcome"]] += int(value)
                elif name != "vllm:prompt_tokens_by_source_total" or labels["source"] == "local_cache_hit":
                    amounts[name] += value
        return Counted(
            amounts["vllm:prompt_tokens_total"],
            amounts["vllm:prompt_tokens_by_source_total"],
            amounts["kintsugi_blend_tokens_hit_total"],
            outcomes,
        )

    def since(self, before: Counted) -> Counted:
        return Counted(
            self.prompt_tokens - before.prompt_tokens,
            self.prefix_tokens - before.prefix_tokens,
            self.chunk_tokens - before.chunk_tokens,
            self.outcomes - before.outcomes,
        )


def measure(quick: bool) -> list[Figure]:
    setting, files, steps = (QUICK, QUICK_FILES, QUICK_STEPS) if quick else (FULL, FILES, STEPS)
    with checkpoint(setting.shape) as model, ShardServer(Shard(RamTier(STORE_BYTES)), "127.0.0.1:0") as shard:
        chunker = Chunker.of_model(model)
        texts = corpus(files, lambda text: len(chunker.token_ids(text)))
        config = {
            "store": f"grpc://{shard.address}",
            "discovery_namespace": "agent",
            "quality": "off",
            "loading_controller": setting.loading_controller,
        }
        with plain_server(model, setting, transfer_config(config)) as server:
            before = _counted(server)
            _run_agent(server, texts, steps)
            counted = _counted(server).since(before)
    assert counted.outcomes.total() == steps, f"{counted.outcomes} are not {steps} steps"
    return [hit_figure(counted, None if quick else BAR)]


def hit_figure(counted: Counted, bar: float | None) -> Figure:
    """Tokens of prompts that were in the prefix cache or in stored chunks ÷ all."""
    hit, total = counted.prefix_tokens + counted.chunk_tokens, counted.prompt_tokens
    detail = (
        f"{counted.prefix_tokens:,.0f} from the prefix cache and {counted.chunk_tokens:,.0f} from the store, "
        f"of {total:,.0f} prompt tokens; {dict(sorted(counted.outcomes.items()))}"
    )
    return Figure.at_least("agent_hit_rate", hit / total, bar, "", detail)


def _counted(server: Server) -> Counted:
    url = f"{server.endpoint.url.removesuffix('/v1')}/metrics"
    return Counted.of(httpx.get(url, timeout=30).raise_for_status().text)


def _run_agent(server: Server, texts: list[str], steps: int) -> None:
    generator = random.Random("agent")
    weights = [(rank + 1) ** -0.9 for rank in range(len(texts))]
    system = {"role": "system", "content": SYSTEM}
    history: list[list[Message]] = []
    """Messages that stay together: a call and its result, an answer, a summary."""
    with httpx.Client(base_url=server.endpoint.url, timeout=300) as client:
        for step in range(steps):
            (file,) = generator.choices(range(len(texts)), weights)
            history.append(_read(step, file, texts[file]))
            if sum(len(message["content"]) for message in _joined(history)) > HISTORY_CHARS_MAX:
                results = [one for one in history if one[-1]["role"] == "tool"]
                kept = generator.sample(results[-KEPT_RESULTS:], KEPT_RESULTS)
                summary = f"Summary at step {step}: {' '.join(texts[file].split()[:30])}"
                history = [[{"role": "user", "content": summary}], *kept]
            answer, prompt_tokens = _ask(client, [system, *_joined(history)])
            history.append([{"role": "assistant", "content": answer}])
            say(f"step {step}: {prompt_tokens} tokens")
            # Wait for the next tool; meanwhile the answer's counters reach the metrics.
            time.sleep(TOOL_S)


def _read(step: int, file: int, text: str) -> list[Message]:
    """The agent's call for a file, and the tool's result."""
    name, call_id = f"file-{file}.txt", f"call-{step}"
    call = {"name": "read_file", "arguments": json.dumps({"name": name})}
    calls = [{"id": call_id, "type": "function", "function": call}]
    return [
        {"role": "assistant", "content": f"Reading {name}.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": text},
    ]


def _joined(history: Iterable[list[Message]]) -> list[Message]:
    return [message for together in history for message in together]


def _ask(client: httpx.Client, messages: list[Message]) -> tuple[str, int]:
    """The answer, and how many tokens the prompt has."""
    body = {
        "model": NAME,
        "messages": messages,
        "tools": [READ_FILE],
        "tool_choice": "none",
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = client.post("/chat/completions", json=body).raise_for_status().json()
    return response["choices"][0]["message"]["content"] or "", int(response["usage"]["prompt_tokens"])
