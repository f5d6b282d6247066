"""The paper's measurements with your own model on local files: quality, cost and TTFT.

    python examples/offline_longbench.py --model FOLDER --data FOLDER_WITH_LONGBENCH_JSONL --out results

Reads `DATASET.jsonl` for each of `--datasets`: files of LongBench (THUDM/LongBench on GitHub), or any other
format that `kintsugi eval` reads. Downloads nothing, and writes `<dataset>.json` per dataset. Compares the
paper's configurations (HKVD at layer 1, r = 5 to 50 %) with Kintsugi's other selectors, full prefill and full
KV reuse. A prompt has six chunks of 512 tokens, as in the paper, unless `--grid` changes this.

The chunk KV of a real model is large, and stays in this process's memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from kintsugi.cli.commands.evaluate import run
from kintsugi.cli.options import EvaluateTask
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import KintsugiError

DATASETS = ("2wikimqa", "musique", "samsum", "multi_news")
"""The paper's four datasets, by their names in LongBench."""
ANSWER_TOKENS = {"samsum": 128, "multi_news": 512}
"""Maximum answer length by dataset, as in LongBench; 32 for the others."""

GRID = {
    "selectors": ["hkvd", "query", "hybrid"],
    "ratios": [0.05, 0.15, 0.3, 0.5],
    "check_layers": [1],  # the paper selects at layer 1
    "chunk_tokens": [512],
    "chunks": [6],
    "batches": [1],
    "limit": 200,
}
"""The configurations that are compared on every dataset, in the format of `kintsugi eval --grid`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="checkpoint folder, or a name that vLLM resolves")
    parser.add_argument("--data", required=True, type=Path, help="folder with DATASET.jsonl files")
    parser.add_argument("--out", type=Path, default=Path("results"), help="where results go")
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--grid", type=Path, help="JSON file that overrides keys of GRID")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for dataset in arguments.datasets.split(","):
        try:
            evaluation = run(Screen(as_json=False), task_of(dataset, arguments))
        except KintsugiError as error:
            print(f"{dataset}: {error}")
            return 1
        path = arguments.out / f"{dataset}.json"
        path.write_text(json.dumps(dataclasses.asdict(evaluation), indent=1) + "\n")
        print(f"wrote {path}")
        if evaluation.error is not None:
            return 1
    return 0


def task_of(dataset: str, arguments: argparse.Namespace) -> EvaluateTask:
    """Return the evaluation task of one dataset. Writes its grid beside the results."""
    given = {} if arguments.grid is None else json.loads(arguments.grid.read_text())
    grid = arguments.out / f"{dataset}.grid.json"
    grid.write_text(json.dumps({**GRID, "max_tokens": ANSWER_TOKENS.get(dataset, 32), **given}))
    return EvaluateTask(model=arguments.model, questions=arguments.data / f"{dataset}.jsonl", grid=grid)


if __name__ == "__main__":
    raise SystemExit(main())
