"""Calibration of the real model as a user runs it: one command, and what came of it as a record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.engines import say
from benchmarks.support.real.corpus import PassageSet
from benchmarks.support.real.engine import CHUNK_END, MODEL_TOKENS_MAX
from benchmarks.support.real.records import Key, Records
from benchmarks.support.real.rows import Configuration
from kintsugi.cli.exits import ExitCode
from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName

CALIBRATED: Key = ("calibrated",)
MINUTES = 24.0
"""Of the search; engines start within them, the last step may end later. Within 13 nothing was decided: a
configuration that changes 2.6 % of the tokens passes after about 160 prompts, one of 3.4 % after 230."""
TIMEOUT_S = 3600.0
CHOSEN_EXITS = (ExitCode.OK, ExitCode.NOT_BLENDABLE)


def measure_calibration(
    model: str, sets: Sequence[PassageSet], contexts: dict[str, str], folder: Path, records: Records
) -> None:
    """Calibrate on the open questions of ``sets`` and record minutes, choice and domain.

    ``contexts`` gives the setting `model.expert.context` of each name. The report is kept in ``folder``.
    Raises `RuntimeError` if the command fails.
    """
    if CALIBRATED in records:
        return
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
    command += ["--form", "chat", "--out", str(folder / "calibration.json")]
    for setting in contexts.values():
        command += ["--context", setting]
    say(f"calibrating {model} on {len(sets)} questions, within about {MINUTES:g} minutes")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    started_s = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    minutes = (time.perf_counter() - started_s) / 60
    if done.returncode not in CHOSEN_EXITS:
        raise RuntimeError(f"kintsugi calibrate ended with {done.returncode}")
    document = json.loads(done.stdout)
    tried = document.get("context", {})
    names = {setting: name for name, setting in contexts.items()}
    choice = document["choice"]
    records.add(
        CALIBRATED,
        {
            "minutes": minutes,
            "selection": choice.get("selection"),
            "why": choice["why"],
            "context": names.get(str(tried.get("context")), next(iter(contexts))),
            "contexts": tried,
            "domain": document["domain"],
            "search": document["search"],
        },
    )
    say(f"calibrated in {minutes:.1f} minutes: {choice['why']}")


def _question(one: PassageSet) -> dict[str, Any]:
    return {"chunks": [text + CHUNK_END for text in one.passages], "question": one.open_question}


def calibrated(records: Records) -> Configuration | None:
    """The configuration that calibration chose; None if it chose none, or did not run."""
    found = records.below(*CALIBRATED).get(())
    if found is None or found["selection"] is None:
        return None
    fields = {
        **found["selection"],
        "selector": SelectorName(found["selection"]["selector"]),
        "query_layers": tuple(found["selection"]["query_layers"]),
    }
    return Configuration(found["context"], Selection(**fields))
