"""How long a client waits for its first blend: chunks put before, and prompts with pauses between them.

The service is `kintsugi serve` with its defaults, started for this. Prompts are MuSiQue questions, each with
its own passages; for the bundled model, questions of the testbed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.outcomes import musique_questions
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.quality.questions import Question
from kintsugi.sdk.client import Client
from kintsugi.sdk.types import Sampling

PAUSE_S = 5.0
"""Between two prompts of the client."""
TESTBED_FROM = 700_000
PROMPTS_MAX = 150
CHARS_PER_TOKEN = 4.0
PASSAGES_MAX = 10
READY_S = 300.0
BARS = {1200: 6.0, 3600: 15.0}
"""Minutes by tokens of a prompt."""
CHEAP = 0.25
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class LiveSetup:
    """What is served, and to which prompts."""

    model: str
    tokens: int
    """Of a prompt, about."""
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
    return musique_questions("own", PROMPTS_MAX, 0, passages, chars)


@contextmanager
def _served(setup: LiveSetup, folder: Path) -> Iterator[tuple[dict[str, Any], psutil.Process, Path]]:
    """Run the service. Yields its `ready` event, its process and the file of its events."""
    events = folder / "events.jsonl"
    path = str(bundled_checkpoint()) if setup.model == "bundled" else setup.model
    config = folder / "service.yaml"
    config.write_text(json.dumps({"model": {"path": path}, "engines": {"vllm": {"dtype": setup.dtype}}}))
    start = "from kintsugi.cli.console_script import main; main()"
    command = [sys.executable, "-c", start, "serve", "--config", str(config), "--json"]
    with events.open("wb") as out, (folder / "log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "2"}
        process = subprocess.Popen(
            [*command, "--http-port", "0", "--grpc-port", "0"], stdout=out, stderr=log, env=environment
        )
        try:
            until_s = time.monotonic() + READY_S
            ready = None
            while ready is None:
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"the service did not start: {(folder / 'log').read_text()[-2000:]}")
                time.sleep(0.5)
                rows = [json.loads(line) for line in events.read_text().splitlines() if line.strip()]
                ready = next((row for row in rows if row.get("event") == "ready"), None)
            yield ready, psutil.Process(process.pid), events
        finally:
            process.terminate()
            process.wait(timeout=120)


def measure(setup: LiveSetup) -> list[Figure]:
    if setup.model != "bundled" and not MUSIQUE.exists():
        say(f"{MUSIQUE} is not here: the section live is left out")
        return []
    questions = _questions(setup)
    with (
        tempfile.TemporaryDirectory(prefix="kintsugi-gate-") as name,
        _served(setup, Path(name)) as (ready, process, events),
        Client(ready["grpc"], "own") as client,
    ):
        chunks = list(dict.fromkeys(chunk for one in questions for chunk in one.chunks))
        for start in range(0, len(chunks), 64):
            client.put_chunks(chunks[start : start + 64])
        say(f"{len(chunks)} chunks are put")
        return _ask(setup, client, questions, process, events)


def _ask(
    setup: LiveSetup, client: Client, questions: list[Question], process: psutil.Process, events: Path
) -> list[Figure]:
    started_s, until_s = time.monotonic(), time.monotonic() + 60 * setup.minutes
    first_s: float | None = None
    cheap_s: float | None = None
    full_s: list[float] = []
    blend_s: list[float] = []
    rss_first, rss_most, asked = _rss(process), 0, 0
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
        rss_most = max(rss_most, _rss(process))
        if asked % 10 == 0:
            outcome = accounting.get("reason") or accounting.get("outcome")
            say(f"{asked} prompts, {time.monotonic() - started_s:.0f} s: {outcome}")
        time.sleep(PAUSE_S)
    rows = [json.loads(line) for line in events.read_text().splitlines() if line.strip()]
    last = [row for row in rows if row.get("event") == "blending"][-1:] or [{}]
    bar = BARS.get(setup.tokens)
    detail = last[0].get("detail", "")
    told = f"{setup.model} ({setup.dtype}), about {setup.tokens} tokens, {asked} prompts; {detail}"
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


def _rss(process: psutil.Process) -> int:
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
