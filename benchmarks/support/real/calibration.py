"""Calibrates the real model as a user does, with one command, and records the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.support.engines import say
from benchmarks.support.real.corpus import PassageSet
from benchmarks.support.real.engine import CHUNK_END, MODEL_TOKENS_MAX
from benchmarks.support.real.records import Key, Records
from benchmarks.support.real.rows import Configuration
from kintsugi.cli.exits import ExitCode
from kintsugi.core.evidence import Quality
from kintsugi.core.plan import Selection
from kintsugi.core.report import FILE, Report
from kintsugi.quality import reports

CALIBRATED: Key = ("calibrated",)
MINUTES = 24.0
"""Time limit; the last batch of prompts may end later."""
TIMEOUT_S = 3600.0
CHOSEN_EXITS = (ExitCode.OK, ExitCode.NOT_BLENDABLE)


def measure_calibration(
    model: str,
    sets: Sequence[PassageSet],
    context: tuple[str, str],
    folder: Path,
    records: Records,
) -> None:
    """Calibrate on the open questions of ``sets`` and record minutes, what passes, and the losses.

    ``context``: its name, and the setting `model.expert.context`. The report is kept in ``folder``. Raises
    `RuntimeError` if the command fails.
    """
    if CALIBRATED in records:
        return
    name, setting = context
    out = folder / "calibration.json"
    questions = folder / "calibration-questions.jsonl"
    questions.write_text("".join(json.dumps(_question(one)) + "\n" for one in sets))
    command = [
        sys.executable,
        "-c",
        "from kintsugi.cli.console_script import main; main()",
        "calibrate",
        "--json",
    ]
    command += ["--model", model, "--questions", str(questions), "--minutes", str(MINUTES)]
    command += ["--engine", json.dumps({"max_model_len": MODEL_TOKENS_MAX, "dtype": "bfloat16"})]
    command += ["--form", "chat", "--out", str(out), "--context", setting]
    say(f"calibrating {model} on {len(sets)} questions, within about {MINUTES:g} minutes")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    started_s = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    minutes = (time.perf_counter() - started_s) / 60
    if done.returncode not in CHOSEN_EXITS:
        raise RuntimeError(f"kintsugi calibrate ended with {done.returncode}")
    passed = cheapest(reports.read(out))
    cells = json.loads(done.stdout)["cells"]
    selection = None if passed is None else asdict(passed)
    records.add(CALIBRATED, {"minutes": minutes, "selection": selection, "context": name, "cells": cells})
    say(f"calibrated in {minutes:.1f} minutes: {cells}")


def cheapest(report: Report) -> Selection | None:
    """The cheapest configuration that passes on the file's evidence for prompts of every measured length;
    None if none does."""
    standings = [report.standing(cell, FILE, Quality.BALANCED) for cell in report.cells]
    passed = min((one.passed for one in standings), key=len, default=())
    return passed[-1] if passed else None


def _question(one: PassageSet) -> dict[str, Any]:
    return {"chunks": [text + CHUNK_END for text in one.passages], "question": one.open_question}


def calibrated(records: Records) -> Configuration | None:
    """The cheapest configuration that passed; None if none did, or calibration did not run."""
    found = records.below(*CALIBRATED).get(())
    if found is None or found["selection"] is None:
        return None
    fields = {**found["selection"], "query_layers": tuple(found["selection"]["query_layers"])}
    return Configuration(found["context"], Selection(**fields))
