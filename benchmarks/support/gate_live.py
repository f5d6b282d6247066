"""Measures how long a client waits for its first blend: it puts chunks, then sends prompts with pauses.

The service is `kintsugi serve` with its defaults, started for this. Prompts are MuSiQue questions, each with
its own passages; for the bundled model, questions of the testbed.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.outcomes import musique_questions
from benchmarks.support.servers import Server, serve
from kintsugi.cli.exits import ExitCode
from kintsugi.gateway.fronts.service_routes import SERVICE_PATH
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.quality.metrics import percentile
from kintsugi.quality.questions import Question
from kintsugi.sdk.client import Client
from kintsugi.sdk.types import Sampling

PAUSE_S = 5.0
"""Pause between two prompts of the client."""
TESTBED_FROM = 700_000
PROMPTS_MAX = 150
SERVE_S = 5.0
"""Minimum time of one prompt of a real model on two cores: it bounds the number of prompts."""
PUT_BATCH, PUT_S = 16, 300.0
"""Chunks of one put, and its deadline."""
CHARS_PER_TOKEN = 4.0
PASSAGES_MAX = 10
THREADS = {"OMP_NUM_THREADS": "2"}
"""Compute threads of the service, as the bars state."""
BARS = {("smollm2-135m", 1200): 6.0, ("smollm2-135m", 3600): 15.0, ("qwen2.5-coder-0.5b", 1200): 20.0}
"""Minutes by model and tokens of a prompt."""
COMPARED = 8
"""Number of prompts that are sent in both ways after the first blend."""
DELAY_BLOCKS, DELAY_EACH = 3, 8
DRAIN_S = 45.0
"""Longest wait for the last comparisons of a block."""
CHEAP = 0.25
TOO_MUCH = "too much to pass"
"""Text in the progress if the next configuration does not pass."""
ANSWER_TOKENS = 32
COMMAND = "from kintsugi.cli.console_script import main; main()"
QUESTIONS, QUESTIONS_QUICK = 400, 48
"""Questions of the file for `kintsugi calibrate`."""
CALIBRATE_MINUTES_MAX = 10.0
CALIBRATE_REST_MINUTES = 2.5
"""Longest time that the start of an engine and the last batch take beyond the limit of the command."""


@dataclass(frozen=True)
class LiveSetup:
    """The served model and its prompts."""

    model: str
    tokens: int
    """Approximate length of a prompt."""
    minutes: float
    """Longest wait."""
    dtype: str = ""
    """vLLM's `dtype`; the service chooses where none is given."""

    @property
    def path(self) -> str:
        """The model, as the service and the CLI take it."""
        return str(bundled_checkpoint()) if self.model == "bundled" else self.model

    @property
    def named(self) -> str:
        return f"{self.model} ({self.dtype})" if self.dtype else self.model


def _questions(setup: LiveSetup, count: int | None = None) -> list[Question]:
    """Return the questions of a client, or ``count`` of them."""
    if setup.model == "bundled":
        each = (count or PROMPTS_MAX) // len(testbed.TASKS) + 1
        return testbed.questions(testbed.TASKS, TESTBED_FROM, each)
    passages = min(PASSAGES_MAX, max(4, setup.tokens // 200))
    chars = round(setup.tokens / passages * CHARS_PER_TOKEN)
    count = count or min(PROMPTS_MAX, math.ceil(60 * setup.minutes / (PAUSE_S + SERVE_S)))
    return musique_questions("own", count, 0, passages, chars)


def _specification(setup: LiveSetup, quality: str) -> dict[str, Any]:
    ports = {"http_port": 0, "grpc_port": 0}
    engines = {"quality": quality, "vllm": {"dtype": setup.dtype} if setup.dtype else {}}
    return {"model": {"path": setup.path}, "engines": engines, "gateway": ports}


@contextmanager
def _service(
    setup: LiveSetup, questions: Sequence[Question], quality: str
) -> Iterator[tuple[Client, Server]]:
    """Run `kintsugi serve`, with the chunks of the questions put."""
    chunks = list(dict.fromkeys(chunk for one in questions for chunk in one.chunks))
    with (
        serve(lambda folder: _specification(setup, quality), environment=THREADS) as server,
        Client(server.grpc, "own") as client,
    ):
        for start in range(0, len(chunks), PUT_BATCH):
            client.put_chunks(chunks[start : start + PUT_BATCH], timeout_s=PUT_S)
            say(f"{min(start + PUT_BATCH, len(chunks))} of {len(chunks)} chunks are put")
        yield client, server


def _has_prompts(setup: LiveSetup) -> bool:
    if setup.model == "bundled" or MUSIQUE.exists():
        return True
    say(f"{MUSIQUE} is not here: the section is left out")
    return False


def _generate(client: Client, question: Question, **more: Any) -> tuple[float, dict[str, Any]]:
    """Return the time to the first token in seconds, and the accounting."""
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0)
    began_s = time.monotonic()
    answer = client.generate(list(question.chunks), question.tail, sampling=sampling, **more)
    return (answer.ttft_ms or 1e3 * (time.monotonic() - began_s)) / 1e3, dict(answer.accounting or {})


def measure(setup: LiveSetup) -> list[Figure]:
    """Measure the time until the first blend, and TTFT of full prefill ÷ that of blends of the same
    prompts."""
    if not _has_prompts(setup):
        return []
    questions = _questions(setup)
    with _service(setup, questions, "balanced") as (client, server):
        return _ask(setup, client, questions, server)


def measure_delay(setup: LiveSetup) -> list[Figure]:
    """Measures how much longer requests wait while the engine learns, at half of its capacity.

    Blocks of requests that are measured alternate with blocks of requests that say `no_blend`, so that
    nothing is measured: both are prefilled in full. The service is `strict`, so that it learns throughout.
    """
    if not _has_prompts(setup):
        return []
    questions, some = _questions(setup)[: 2 * DELAY_BLOCKS * DELAY_EACH], random.Random(1)
    waits: dict[bool, list[float]] = {True: [], False: []}
    with _service(setup, questions[: len(questions) // 2], "strict") as (client, server):
        rest = {True: questions[: len(questions) // 2], False: questions[len(questions) // 2 :]}
        rss_first = rss_most = server.rss_bytes()
        learned_s = 0.0
        for block in range(2 * DELAY_BLOCKS):
            learns = block % 2 == 0
            began_s = time.monotonic()
            for question in rest[learns][:DELAY_EACH]:
                asked_s = time.monotonic()
                ttft_s, accounting = _generate(client, question, no_blend=not learns)
                if accounting.get("outcome") != "blended":
                    waits[learns].append(ttft_s)
                rss_most = max(rss_most, server.rss_bytes())
                time.sleep(some.expovariate(1 / (time.monotonic() - asked_s)))
            del rest[learns][:DELAY_EACH]
            say(f"block {block + 1} of {2 * DELAY_BLOCKS}: {'learning' if learns else 'not learning'}")
            _wait_for_comparisons(server)
            learned_s += (time.monotonic() - began_s) * learns
        progress = _progress(server)
    pairs = progress.get("pairs") or 0
    told = f"{setup.named}, about {setup.tokens} tokens, {len(waits[True])} prompts each"
    p50, p95 = (percentile(waits[True], one) / percentile(waits[False], one) for one in (0.5, 0.95))
    growth = (rss_most - rss_first) / 2**20
    return [
        Figure.at_most("ttft_while_learning_p50", p50, 1.02, "", told),
        Figure.at_most("ttft_while_learning_p95", p95, 1.10, "", told),
        Figure.at_least(
            "pairs_per_hour", 3600 * pairs / max(1.0, learned_s), 60, "", progress.get("detail", "")
        ),
        Figure.at_most("extra_memory_while_learning_mib", growth, 200, "MiB", "of the whole service"),
    ]


def measure_calibration(setup: LiveSetup) -> list[Figure]:
    """How long `kintsugi calibrate` takes for a file of questions, from its start to its end, and whether it
    decides anything. Its time limit leaves room for the start of the engine and the last batch."""
    if not _has_prompts(setup):
        return []
    limit = max(0.5, CALIBRATE_MINUTES_MAX - CALIBRATE_REST_MINUTES)
    questions = _questions(setup, QUESTIONS_QUICK if setup.minutes < CALIBRATE_MINUTES_MAX else QUESTIONS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "questions.jsonl"
        file.write_text(
            "".join(f"{json.dumps({'chunks': q.chunks, 'question': q.tail})}\n" for q in questions)
        )
        began_s = time.monotonic()
        finished = subprocess.run(
            [
                *(sys.executable, "-c", COMMAND, "calibrate", setup.path),
                *("--questions", str(file), "--out", str(Path(folder) / "report.json")),
                *("--minutes", f"{limit:g}", "--json"),
                *(("--engine", json.dumps({"dtype": setup.dtype})) if setup.dtype else ()),
            ],
            env={**os.environ, **THREADS},
            stdout=subprocess.PIPE,
            text=True,
        )
        minutes = (time.monotonic() - began_s) / 60
    if finished.returncode not in (ExitCode.OK, ExitCode.NOT_BLENDABLE):
        raise RuntimeError(f"kintsugi calibrate ended with {finished.returncode}: {finished.stdout[-500:]}")
    cells = json.loads(finished.stdout)["cells"]
    is_decided = any(cell["passed"] or cell["is_over"] for cell in cells)
    told = "; ".join(
        f"{cell['prompts']}: {', '.join(cell['passed']) or 'nothing'} passed, of "
        + ", ".join(f"{row['configuration']} {row['pairs']} pairs" for row in cell["configurations"])
        for cell in cells
    )
    name = f"{setup.named}, {len(questions)} questions of about {setup.tokens} tokens"
    holds = is_decided and minutes <= CALIBRATE_MINUTES_MAX
    bar = f"≤ {CALIBRATE_MINUTES_MAX:g}, decided"
    return [Figure("calibrate_minutes", minutes, "min", bar, holds, f"{name}; {told or 'nothing'}")]


def _engines(server: Server) -> dict[str, Any]:
    described = httpx.get(server.details["http"] + SERVICE_PATH, timeout=60.0).raise_for_status().json()
    engines: dict[str, Any] = described["engines"]
    return engines


def _progress(server: Server) -> dict[str, Any]:
    progress: dict[str, Any] = _engines(server)["progress"]
    return progress


def _wait_for_comparisons(server: Server) -> None:
    """Wait until no answer waits for its comparison, at most `DRAIN_S`."""
    until_s = time.monotonic() + DRAIN_S
    while _engines(server)["learning"]["pending"] and time.monotonic() < until_s:
        time.sleep(1.0)


def _ask(setup: LiveSetup, client: Client, questions: list[Question], server: Server) -> list[Figure]:
    started_s, until_s = time.monotonic(), time.monotonic() + 60 * setup.minutes
    first_s: float | None = None
    decided_s: float | None = None
    full_s: list[float] = []
    blend_s: list[float] = []
    costs: list[float] = []
    asked = 0
    while time.monotonic() < until_s and (decided_s is None or len(blend_s) < COMPARED):
        question = questions[asked % len(questions)]
        asked += 1
        # The same prompt, prefilled in full, leaves no blended block, and a blend reads no block of it.
        compared = first_s is not None and len(blend_s) < COMPARED
        plain_s = _generate(client, question, no_blend=True)[0] if compared else None
        ttft_s, accounting = _generate(client, question)
        if accounting.get("outcome") == "blended":
            first_s = first_s or time.monotonic() - started_s
            costs.append(float(accounting["cost"]))
            if costs[-1] <= CHEAP:
                decided_s = decided_s or time.monotonic() - started_s
            if plain_s is not None:
                full_s.append(plain_s)
                blend_s.append(ttft_s)
        if first_s and decided_s is None and TOO_MUCH in _progress(server)["detail"]:
            decided_s = time.monotonic() - started_s
        if asked % 5 == 0:
            outcome = accounting.get("reason") or accounting.get("outcome")
            say(f"{asked} prompts, {time.monotonic() - started_s:.0f} s, TTFT {ttft_s:.1f} s: {outcome}")
        time.sleep(PAUSE_S)
    is_bundled = setup.model == "bundled"  # its report opens at once, and its prompts are short
    bar = None if is_bundled else BARS.get((setup.model, setup.tokens))
    length = "testbed" if is_bundled else f"about {setup.tokens} tokens"
    told = f"{setup.named}, {length}, {asked} prompts; {_progress(server)['detail']}"
    figures = [
        Figure(
            "minutes_to_first_blend",
            None if first_s is None else first_s / 60,
            "min",
            None if bar is None else f"≤ {bar:g}",
            None if bar is None else first_s is not None and first_s / 60 <= bar,
            told,
        ),
        Figure(
            "minutes_to_cheaper",
            None if decided_s is None else decided_s / 60,
            "min",
            None if is_bundled else "≤ 40",
            None if is_bundled else decided_s is not None and decided_s / 60 <= 40,
            f"a cost of at most {CHEAP:g}, or shown not to pass; the last blend's is "
            + (f"{costs[-1]:.3f}" if costs else "unknown"),
        ),
    ]
    if blend_s:
        ratios = [full / blend for full, blend in zip(full_s, blend_s, strict=True)]
        detail = f"median of {len(ratios)} prompts, each sent both ways"
        figures.append(Figure("ttft_full_over_blend", statistics.median(ratios), "×", detail=detail))
    return figures
