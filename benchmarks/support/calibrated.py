"""Calibration as a user runs it, and what its default is worth: quality, time, 8 bits."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from benchmarks.support import codecs
from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure, spread
from benchmarks.support.quality_curve import Setup, bench_of, judged, share, trained
from benchmarks.testbed.generator import eval_example
from kintsugi.core.layout import Codec
from kintsugi.core.plan import Selection
from kintsugi.core.report import describe_selection
from kintsugi.engine.local import LocalEngine
from kintsugi.quality import reports

LONG_TOKENS = 3900
"""With the question and the answer, what the bundled model reads."""


def measure_calibrate(setup: Setup) -> list[Figure]:
    """Twice, in processes of their own: minutes, and whether they decide alike."""
    folder = Path(tempfile.mkdtemp(prefix="kintsugi-quality-"))
    path = folder / "questions.jsonl"
    count = 60 if setup.quick else 400
    with path.open("w") as file:
        for index in range(testbed.CALIBRATED_FROM, testbed.CALIBRATED_FROM + count):
            for task in (*testbed.TASKS, testbed.CONTROL):
                file.write(json.dumps(asdict(eval_example(task, index))) + "\n")
    minutes, decisions = [], []
    for number in range(1 if setup.quick else 2):
        out = folder / f"report-{number}.json"
        started = time.perf_counter()
        _run(["calibrate", "--model", str(setup.model), "--questions", str(path), "--out", str(out)])
        minutes.append((time.perf_counter() - started) / 60)
        report = reports.read(out)
        decisions.append((report.choice, report.entries, report.noise, report.domain))
        setup.report = out
        say(f"calibrated in {minutes[-1]:.2f} minutes: {report.choice.why}")
    alike = all(decision == decisions[0] for decision in decisions)
    chosen = decisions[0][0].selection
    default = describe_selection(chosen) if chosen else "none"
    detail = f"{'same' if alike else 'OTHER'} decisions, default {default}"
    holds = max(minutes) <= 3 and alike
    return [Figure("calibrate_minutes", max(minutes), "min", "≤ 3, same decisions", holds, detail)]


def _run(arguments: list[str]) -> None:
    """The command line, in a process of its own, on all cores."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [
        sys.executable,
        "-c",
        "from kintsugi.cli.console_script import main; main()",
        *arguments,
        "--json",
    ]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=1800)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"kintsugi calibrate ended with {done.returncode}")


def default_of(setup: Setup) -> Selection:
    """What calibration chose; it runs now if it has not."""
    if setup.report is None:
        measure_calibrate(setup)
    assert setup.report is not None
    chosen = reports.read(setup.report).choice
    if chosen.selection is None:
        raise RuntimeError(f"calibration trusts no configuration of this model: {chosen.why}")
    return chosen.selection


def measure_default(setup: Setup) -> list[Figure]:
    """Exact match and speed-up of the calibrated default, and the same in 8 bits."""
    default = default_of(setup)
    url = f"ram://quality-{uuid.uuid4().hex[:8]}"
    with trained(setup, url=url) as running:
        by_codec = codecs.judged_by_codec(setup, running, codecs.store_at(url), default)
        ttft = _ttft(setup, running, default)
        raw_bytes = _stored_bytes(running)
    scores = by_codec.pop(Codec.RAW)
    with trained(setup, codec="int8") as running:
        quantised = judged(setup, running, [default], testbed.TASKS)[default]
        ratio = _stored_bytes(running) / raw_bytes
    interval = share(scores)
    detail = f"{describe_selection(default)}, cost {scores.cost:.3f}, {interval}, n={len(scores.cases)}"
    loss = codecs.lost_points(scores, quantised)
    return [
        Figure.at_least("calibrated_em_share", interval.mean, 0.97, unit="", detail=detail),
        ttft,
        Figure.at_most(
            "int8_loss_points", loss.mean, 0.5, unit="points", detail=f"{loss}, n={len(quantised.cases)}"
        ),
        Figure.at_most("int8_bytes_ratio", ratio, 0.53, unit="", detail="stored bytes of the same chunks"),
        *codecs.figures(scores, by_codec),
    ]


def _ttft(setup: Setup, running: LocalEngine, default: Selection) -> Figure:
    tokens = 1200 if setup.quick else LONG_TOKENS
    repetitions = 3 if setup.quick else 9
    asked = testbed.questions(["control"], testbed.WATCHED_FROM, 1, testbed.long_shape(tokens))
    bench = bench_of(running, testbed.cases(running, asked))
    bench.batch = 1
    running.plan_with(default)
    samples: dict[str, list[float]] = {"full": [], "blend": []}
    for repetition in range(repetitions + 1):
        for name, selection in (("full", None), ("blend", default)):
            running.reset_prefix_cache()
            (answer,) = running.generate([bench.prompt(0, selection)])
            if repetition:  # the first of each shape prepares kernels
                samples[name].append(answer.ttft_s)
    speedup = statistics.median(samples["full"]) / statistics.median(samples["blend"])
    length = len(bench.cases[0].prompt.token_ids)
    times = f"{spread(samples['full'])} ÷ {spread(samples['blend'])}"
    detail = f"{times}, {length} tokens, {describe_selection(default)}"
    bar = None if setup.quick else 2.5
    return Figure.at_least("calibrated_ttft_speedup", speedup, bar, detail=detail)


def _stored_bytes(running: LocalEngine) -> int:
    """Bytes of one prompt's chunks in the engine's store."""
    asked = testbed.questions(testbed.TASKS, testbed.JUDGED_FROM, 1)
    bench = bench_of(running, testbed.cases(running, asked))
    running.plan_with(Selection(0.0))
    prompts = [bench.prompt(index, Selection(0.0)) for index in range(len(bench.cases))]
    return sum((answer.accounting or {})["bytes_loaded"] for answer in running.generate(prompts))
