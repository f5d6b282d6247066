"""Makes the folder of the model that ships with Kintsugi, from a training state.

    python -m benchmarks.testbed.bundle --state runs/a/state.pt
    kintsugi calibrate --model $FOLDER --questions $FOLDER/questions.jsonl.xz --out $FOLDER/calibration.json

Writes the checkpoint, the questions to calibrate it on, and the demo's question: the first of its kind that
full prefill answers and full KV reuse does not. All come from evaluation seeds, the questions from a slice
that no benchmark uses.
"""

from __future__ import annotations

import argparse
import json
import lzma
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.testbed.evaluate import Bundle, full_prefill, full_reuse
from benchmarks.testbed.export import export
from benchmarks.testbed.generator import TASKS, Example, Shape, eval_example
from kintsugi.models.bundled import bundled_checkpoint

QUESTIONS_FROM = 200_000
QUESTIONS_PER_TASK = 200
SHOWCASE_FROM = 500_000
SHOWCASE_TASK = "relay"
SHOWCASE_SHAPE = Shape(chunks=(6, 6), facts_per_chunk=(2, 3), fillers_per_chunk=(36, 38))
"""Some 1,400 tokens: long enough for blending to save time, and about as far as the model reads."""
SHOWCASE_TRIES = 200


def find_showcase(bundle: Bundle) -> Example:
    """Raises LookupError where the model shows no difference."""
    for index in range(SHOWCASE_FROM, SHOWCASE_FROM + SHOWCASE_TRIES):
        example = eval_example(SHOWCASE_TASK, index, SHOWCASE_SHAPE)
        prompt = bundle.prompt(example)
        full, reused = full_prefill(bundle, prompt), full_reuse(bundle, prompt)
        if int(full.argmax()) == prompt.answer != int(reused.argmax()):
            return example
    raise LookupError(f"none of {SHOWCASE_TRIES} questions is answered by full prefill alone")


def make(state: Path, out: Path) -> None:
    """Fills the folder; what else is in it stays."""
    export(state, out)
    rows = [
        eval_example(task, index)
        for index in range(QUESTIONS_FROM, QUESTIONS_FROM + QUESTIONS_PER_TASK)
        for task in TASKS
    ]
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    (out / "questions.jsonl.xz").write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    shown = find_showcase(Bundle(out))
    (out / "showcase.json").write_text(json.dumps(asdict(shown), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=bundled_checkpoint())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make(arguments.state, arguments.out)


if __name__ == "__main__":
    main()
