"""How long a client waits for its first blend: chunks put before, and prompts with pauses between them.

The service is `kintsugi serve` with its defaults, started for this. Prompts are MuSiQue questions, each with
its own passages; for the bundled model, questions of the testbed.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.outcomes import musique_questions
from benchmarks.support.servers import Server, serve
from kintsugi.gateway.fronts.service_routes import SERVICE_PATH
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.quality.questions import Question
from kintsugi.sdk.client import Client
from kintsugi.sdk.types import Sampling

PAUSE_S = 5.0
"""Between two prompts of the client."""
TESTBED_FROM = 700_000
PROMPTS_MAX = 150
SERVE_S = 5.0
"""Minimum time of one prompt of a real model on two cores: it bounds the number of prompts."""
PUT_BATCH, PUT_S = 16, 300.0
"""Chunks of one put, and its deadline."""
CHARS_PER_TOKEN = 4.0
PASSAGES_MAX = 10
THREADS = {"OMP_NUM_THREADS": "2"}
"""As many as the bars name."""
BARS = {1200: 6.0, 3600: 15.0}
"""Minutes by tokens of a prompt."""
CHEAP = 0.25
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class LiveSetup:
    """What is served, and to which prompts."""

    model: str
    tokens: int
    """Approximate length of a prompt."""
    minutes: float
    """Longest wait."""
    dtype: str = "auto"
    """vLLM's `dtype`."""


def _questions(setup: LiveSetup) -> list[Question]:
    if setup.model == "bundled":
        each = PROMPTS_MAX // len(testbed.TASKS) + 1
        return testbed.questions(testbed.TASKS, TESTBED_FROM, each)
    passages = min(PASSAGES_MAX, max(4, setup.tokens // 200))
    chars = round(setup.tokens / passages * CHARS_PER_TOKEN)
    count = min(PROMPTS_MAX, math.ceil(60 * setup.minutes / (PAUSE_S + SERVE_S)))
    return musique_questions("own", count, 0, passages, chars)


def _specification(setup: LiveSetup) -> dict[str, Any]:
    path = str(bundled_checkpoint()) if setup.model == "bundled" else setup.model
    ports = {"http_port": 0, "grpc_port": 0}
    return {"model": {"path": path}, "engines": {"vllm": {"dtype": setup.dtype}}, "gateway": ports}


def measure(setup: LiveSetup) -> list[Figure]:
    if setup.model != "bundled" and not MUSIQUE.exists():
        say(f"{MUSIQUE} is not here: the section live is left out")
        return []
    questions = _questions(setup)
    with (
        serve(lambda folder: _specification(setup), environment=THREADS) as server,
        Client(server.grpc, "own") as client,
    ):
        chunks = list(dict.fromkeys(chunk for one in questions for chunk in one.chunks))
        for start in range(0, len(chunks), PUT_BATCH):
            client.put_chunks(chunks[start : start + PUT_BATCH], timeout_s=PUT_S)
            say(f"{min(start + PUT_BATCH, len(chunks))} of {len(chunks)} chunks are put")
        return _ask(setup, client, questions, server)


def _ask(setup: LiveSetup, client: Client, questions: list[Question], server: Server) -> list[Figure]:
    started_s, until_s = time.monotonic(), time.monotonic() + 60 * setup.minutes
    first_s: float | None = None
    cheap_s: float | None = None
    full_s: list[float] = []
    blend_s: list[float] = []
    rss_first, rss_most, asked = server.rss_bytes(), 0, 0
    costs: list[float] = []
    while time.monotonic() < until_s and cheap_s is None:
        question = questions[asked % len(questions)]
        asked += 1
        began_s = time.monotonic()
        answer = client.generate(
            list(question.chunks), question.tail, sampling=Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0)
        )
        ttft_s = (answer.ttft_ms or 1e3 * (time.monotonic() - began_s)) / 1e3
        accounting: dict[str, Any] = dict(answer.accounting or {})
        if accounting.get("outcome") == "blended":
            first_s = first_s or time.monotonic() - started_s
            blend_s.append(ttft_s)
            costs.append(float(accounting["cost"]))
            if costs[-1] <= CHEAP:
                cheap_s = time.monotonic() - started_s
        else:
            full_s.append(ttft_s)
        rss_most = max(rss_most, server.rss_bytes())
        if asked % 10 == 0:
            outcome = accounting.get("reason") or accounting.get("outcome")
            say(f"{asked} prompts, {time.monotonic() - started_s:.0f} s: {outcome}")
        time.sleep(PAUSE_S)
    described = httpx.get(server.details["http"] + SERVICE_PATH).raise_for_status().json()
    detail = described["engines"]["progress"]["detail"]
    is_bundled = setup.model == "bundled"  # its report opens at once, and its prompts are short
    bar = None if is_bundled else BARS.get(setup.tokens)
    length = "testbed" if is_bundled else f"about {setup.tokens} tokens"
    told = f"{setup.model} ({setup.dtype}), {length}, {asked} prompts; {detail}"
    figures = [
        Figure(
            "minutes_to_first_blend",
            None if first_s is None else first_s / 60,
            "min",
            None if bar is None else f"≤ {bar:g}",
            None if bar is None else first_s is not None and first_s / 60 <= bar,
            told,
        ),
        Figure("minutes_to_cheaper", None if cheap_s is None else cheap_s / 60, "min", detail=told),
        Figure(
            "extra_memory_mib",
            (rss_most - rss_first) / 2**20,
            "MiB",
            detail="of the whole service, since put",
        ),
    ]
    if full_s and blend_s:
        speedup = statistics.median(full_s) / statistics.median(blend_s)
        figures.append(
            Figure("ttft_full_over_blend", speedup, "×", detail=f"cost of the last blend {costs[-1]:.3f}")
        )
    return figures
