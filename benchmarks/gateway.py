"""Measures the gateway's own cost per request, with a stub engine that answers after known delays.

Usage: python benchmarks/gateway.py [--quick] [--save]

The gateway runs in a process of its own, behind gRPC on loopback, as it is deployed; a client in this
process sends requests of six 512-token chunks as text and a question, open loop, at exponential intervals. A
request's own cost is its time to first token as the client sees it, less the delay that the stub stated.
`warm`: 200 chunks, Zipf 0.9, all stored before, as those of a RAG service are; `new`: every text is new and
has to be tokenised. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import uvloop

from benchmarks.support.figures import Figure, report
from kintsugi.core.deploy import GatewaySpec
from kintsugi.gateway.fronts.grpc_server import GatewayServer
from kintsugi.gateway.gateway import Gateway
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.precompute.chunking import Chunker
from kintsugi.sdk.client import AsyncClient
from kintsugi.sdk.types import Delta
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store
from tests.fakes.stub_backend import StubBackend, StubDelays

RATE_PER_S = 50.0
CHUNKS = 200
CHUNKS_PER_REQUEST = 6
CHUNK_TOKENS = 512
ZIPF = 0.9
NAMESPACE = "bench"
STORE = "ram://bench"
DELAYS = StubDelays(first_token_s=0.05, token_s=0.005)
MAX_TOKENS = 16
BAR_MS = 3.5
WARM_UP_S = 1.0


@dataclass(frozen=True)
class Load:
    """The measurements of one kind of requests."""

    own_ms: list[float]
    """Time to first token less the stub's."""
    late_ms: list[float]
    """How much later than planned requests were sent: above a few ms, the client was the bottleneck."""
    cpu_ms: float
    """CPU time of the gateway's process per request."""


async def _gateway() -> None:
    """In a process of its own: print the address, serve until stdin ends, print the CPU seconds used."""
    store = open_store(STORE)
    assert isinstance(store, RamStore)
    backend = StubBackend(DELAYS, store=store)
    gateway = await Gateway.open(GatewaySpec(grpc_port=0), backend, STORE, bundled_checkpoint())
    server = GatewayServer(gateway, GatewaySpec(grpc_port=0))
    await server.start()
    print(server.address, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        assert line == "cpu\n"
        print(usage.ru_utime + usage.ru_stime, flush=True)
    await server.stop()
    await gateway.close()


@contextlib.contextmanager
def gateway_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway with a stub for an engine, and its address."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.stdin.close()


def cpu_s(process: subprocess.Popen[str]) -> float:
    """What the process has used so far."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("cpu\n")
    process.stdin.flush()
    return float(process.stdout.readline())


class Texts:
    """Chunk texts of exactly `CHUNK_TOKENS` tokens of the bundled model's tokenizer."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        tokenize = Chunker.of_model(bundled_checkpoint()).token_ids
        words = Path(__file__).read_text().split()
        self._words = sorted({word for word in words if word.isalpha()})
        self._tokenize = tokenize

    def text(self) -> str:
        words: list[str] = []
        while (short := CHUNK_TOKENS - len(self._tokenize(" ".join(words)))) > 0:
            words += self._random.choices(self._words, k=max(1, short // 4))
        return " ".join(words)


async def load(
    client: AsyncClient, process: subprocess.Popen[str], prompts: list[list[str]], seconds: float
) -> Load:
    """Open loop: each request is sent at its time, even if earlier ones are unanswered."""
    generator = random.Random(0)
    own_ms: list[float] = []
    late_ms: list[float] = []

    async def ask(index: int, due_s: float) -> None:
        await asyncio.sleep(due_s - time.perf_counter())
        began_s = time.perf_counter()
        late_ms.append((began_s - due_s) * 1e3)
        question = f"\nQuestion {index}: what follows?\nAnswer:"
        first_s = None
        async for event in client.stream(prompts[index % len(prompts)], question, max_tokens=MAX_TOKENS):
            if first_s is None and isinstance(event, Delta):
                first_s = time.perf_counter()
        assert first_s is not None
        own_ms.append((first_s - began_s - DELAYS.first_token_s) * 1e3)

    before_s = cpu_s(process)
    due_s, tasks = time.perf_counter(), []
    for index in range(int(seconds * RATE_PER_S)):
        due_s += generator.expovariate(RATE_PER_S)
        tasks.append(asyncio.create_task(ask(index, due_s)))
    await asyncio.gather(*tasks)
    return Load(own_ms, late_ms, (cpu_s(process) - before_s) * 1e3 / len(tasks))


async def _measured(seconds: float) -> dict[str, Load]:
    texts = Texts(seed=1)
    chunks = [texts.text() for _ in range(CHUNKS)]
    weights = [1 / (rank + 1) ** ZIPF for rank in range(CHUNKS)]
    generator = random.Random(2)
    requests = int(seconds * RATE_PER_S)
    warm = [generator.choices(chunks, weights, k=CHUNKS_PER_REQUEST) for _ in range(requests)]
    # Told apart by their first word: new texts, and as long.
    new = [[f"{index}-{n} {texts.text()}" for n in range(CHUNKS_PER_REQUEST)] for index in range(requests)]
    with gateway_process() as (process, address):
        async with AsyncClient(address, NAMESPACE) as client:
            await client.put_chunks(chunks)
            await load(client, process, warm, WARM_UP_S)
            return {
                "warm": await load(client, process, warm, seconds),
                "new": await load(client, process, new, seconds),
            }


def measure(quick: bool = False) -> list[Figure]:
    """For `benchmarks/serving.py` as well."""
    seconds = 5.0 if quick else 20.0
    loads = asyncio.run(_measured(seconds))
    figures = []
    for name, one in loads.items():
        ordered = sorted(one.own_ms)
        p50, p95 = statistics.median(ordered), ordered[int(0.95 * len(ordered))]
        late = statistics.median(one.late_ms)
        detail = f"p95 {p95:.2f} ms; n={len(ordered)} at {RATE_PER_S:.0f}/s; sent {late:.2f} ms late (median)"
        if name == "warm":
            figures.append(Figure.at_most("gateway_ms_p50", p50, BAR_MS, "ms", detail))
        else:
            figures.append(Figure("gateway_new_text_ms_p50", p50, "ms", detail=detail))
        figures.append(Figure(f"gateway_{name}_cpu_ms", one.cpu_ms, "ms", detail="CPU time per request"))
    return figures


def config(quick: bool) -> dict[str, Any]:
    return {
        "quick": quick,
        "rate_per_s": RATE_PER_S,
        "chunks_per_request": CHUNKS_PER_REQUEST,
        "chunk_tokens": CHUNK_TOKENS,
        "answer_tokens": MAX_TOKENS,
        "stub": {"first_token_s": DELAYS.first_token_s, "token_s": DELAYS.token_s},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 seconds of load each instead of 20")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    arguments = parser.parse_args()
    figures = measure(arguments.quick)
    report("gateway", config(arguments.quick), figures, save_as="gateway" if arguments.save else None)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        uvloop.run(_gateway())  # the loop that Ray gives its replicas
    else:
        main()
