"""The paper's measurements with your own model on local files: quality, cost, and TTFT by request rate.

    python examples/offline_longbench.py --model FOLDER --data FOLDER_WITH_LONGBENCH_JSONL --out results

Reads `DATASET.jsonl` of LongBench (THUDM/LongBench on GitHub) for each of `--datasets`, or any other
form that `kintsugi eval` reads, downloads nothing, and writes `<dataset>.json` per dataset. The
configurations are the paper's (HKVD at layer 1, r = 5 to 50 %) beside Kintsugi's other selectors; full
prefill and full KV reuse stand in every table. Chunks have 512 tokens, six of them a prompt, as in the paper,
unless told otherwise.

Chunk KV of a real model is large: give it room with --chunk-store grpc://HOST:PORT (kintsugi store serve).
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
from kintsugi.core.request import SelectorName

DATASETS = ("2wikimqa", "musique", "samsum", "multi_news")
"""The paper's four, as LongBench names them."""
ANSWER_TOKENS = {"samsum": 128, "multi_news": 512}
"""As LongBench itself allows; the others answer in 32."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="checkpoint folder, or a name that vLLM resolves")
    parser.add_argument("--data", required=True, type=Path, help="folder with DATASET.jsonl files")
    parser.add_argument("--out", type=Path, default=Path("results"), help="where results go")
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--limit", type=int, default=200, help="questions per dataset")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--ratios", default="0.05,0.15,0.3,0.5")
    parser.add_argument(
        "--selectors", default=",".join((SelectorName.HKVD, SelectorName.QUERY, SelectorName.HYBRID))
    )
    parser.add_argument("--check-layers", default="1", help="the paper selects at layer 1")
    parser.add_argument("--rates", default="0.5,1,2", help="requests per second")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunk-store", help="URL of a store with room for the chunks")
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
    """What to measure on one dataset."""
    return EvaluateTask(
        model=arguments.model,
        questions=arguments.data / f"{dataset}.jsonl",
        limit=arguments.limit,
        selectors=arguments.selectors,
        ratios=arguments.ratios,
        check_layers=arguments.check_layers,
        chunk_tokens=str(arguments.chunk_tokens),
        chunks=str(arguments.chunks),
        batches="1",
        rates=arguments.rates,
        max_tokens=ANSWER_TOKENS.get(dataset, 32),
        dtype=arguments.dtype,
        chunk_store=arguments.chunk_store,
    )


if __name__ == "__main__":
    raise SystemExit(main())
