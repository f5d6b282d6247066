"""The same load on the reference model in its chat form, with a calibration of its own and the gate on.

Passages are cut to the length of those of the load on random weights.

Calibration gets prompts like those that are served: passages that the load does not send, cut into segments
by `--segments`. They are saved behind a context of two more passages. Both servers compute in float32:
in bfloat16 full prefill of this model, in batches of another size, picks another token than itself at three
positions of a hundred, and calibration allows five.

A search over all configurations decides nothing within an hour of a core. `calibration.json` is the report
about one, `query` at 0.3, on 256 prompts that no search had seen. It was tried together with 0.25, which 288
prompts did not decide, so each had to hold with 97.5 % confidence. At 0.4, which had been confirmed before,
this load gave 1.39. `$KINTSUGI_DISCOVERY_REPORT` names another report; empty, the search runs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.support.discovered.service import (
    DISCOVER,
    FULL_WORKLOAD,
    REQUESTS,
    measure_load,
    ttft_figure,
)
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.real.corpus import read_corpus
from benchmarks.support.real.engine import MODEL_TOKENS_MAX
from benchmarks.support.servers import Setting, link_checkpoint, our_server, plain_server
from kintsugi.cli.exits import ExitCode
from kintsugi.core.prompt import FormName
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import REFERENCE, resolve_model
from kintsugi.serving.calibration import REPORT_FILE

REPORT = "KINTSUGI_DISCOVERY_REPORT"
COMMITTED = Path(__file__).with_name("calibration.json")
CALIBRATION_PROMPTS = 400
CALIBRATION_MINUTES, QUICK_MINUTES = 45.0, 0.5
DTYPE = "float32"
PASSAGES, QUICK_PASSAGES = 200, 8
QUICK_REQUESTS = 6
TTFT_BAR = 1.4
QUESTION = "What do these passages have in common?"


def measure(quick: bool) -> list[Figure]:
    """With `quick` the gate is left open: a calibration of that time passes nothing."""
    corpus = read_corpus(MUSIQUE)
    form = load_form(REFERENCE.name, FormName.CHAT)
    texts = _cut(form, corpus.judged[: QUICK_PASSAGES if quick else PASSAGES])
    workload = replace(FULL_WORKLOAD, documents=len(texts))
    model = Path(resolve_model(REFERENCE.name))
    with tempfile.TemporaryDirectory(prefix="kintsugi-discovery-") as folder:
        minutes = QUICK_MINUTES if quick else CALIBRATION_MINUTES
        context = Path(folder) / "context.txt"
        context.write_text(corpus.sample)
        report = os.environ.get(REPORT, COMMITTED) or _calibrate(
            form, corpus.choosing, context, Path(folder), minutes
        )
        served = link_checkpoint(model, Path(folder) / "model")
        # Engines publish the report that is beside the checkpoint.
        (served / REPORT_FILE).symlink_to(Path(report).absolute())
        setting = Setting(
            "real",
            max_model_len=MODEL_TOKENS_MAX,
            kv_cache_bytes=2 << 30,
            dtype=DTYPE,
            model={"expert": {"context": str(context)}},
            allow_uncalibrated=quick,
            privacy=DISCOVER,
        )
        with plain_server(served, setting) as plain, our_server(served, setting) as ours:
            for server in (plain, ours):
                server.endpoint = replace(server.endpoint, chat=True)
            samples = measure_load((plain, ours), texts, workload, QUICK_REQUESTS if quick else REQUESTS)
    figure = ttft_figure("discovered_real_ttft_ratio", samples, None if quick else TTFT_BAR)
    told = [one.accounting or {} for one in samples["kintsugi"]]
    ends = Counter(str(one.get("reason") or one.get("outcome")).split(":")[0] for one in told)
    return [replace(figure, detail=f"{figure.detail}; {corpus.name}; {dict(ends)}")]


def _cut(form: PromptForm, passages: Sequence[str]) -> list[str]:
    tokens = FULL_WORKLOAD.chunk_tokens
    return [form.tokenizer.decode(form.tokenize(text)[:tokens]) for text in passages]


def _calibrate(
    form: PromptForm, passages: Sequence[str], context: Path, folder: Path, minutes: float
) -> Path:
    """A report about prompts whose chunks are segments, whether it lets the model blend or not. Raises
    `CalledProcessError`."""
    passages = _cut(form, passages)
    questions, report = folder / "questions.jsonl", folder / "report.json"
    generator = random.Random("discovery calibration")
    with questions.open("w") as file:
        for _ in range(CALIBRATION_PROMPTS):
            chosen = generator.sample(passages, FULL_WORKLOAD.chunks)
            chunks = [f"{text}\n\n" for text in chosen]
            file.write(json.dumps({"chunks": chunks, "question": QUESTION}) + "\n")
    command = [sys.executable, "-c", "from kintsugi.cli.console_script import main; main()", "calibrate"]
    command += ["--model", REFERENCE.name, "--questions", str(questions), "--segments", "--form", "chat"]
    command += ["--minutes", str(minutes), "--context", str(context), "--out", str(report)]
    command += ["--engine", json.dumps({"max_model_len": MODEL_TOKENS_MAX, "dtype": DTYPE})]
    say(f"calibrating {REFERENCE.name} within about {minutes:g} minutes")
    done = subprocess.run(command)
    if done.returncode not in (ExitCode.OK, ExitCode.NOT_BLENDABLE):
        done.check_returncode()
    return report
