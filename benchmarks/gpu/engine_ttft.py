"""Time to first token through vLLM's engine on a GPU: blends beside full prefill.

    python benchmarks/gpu/engine_ttft.py [--shape mistral-7b-layers] [--layers 16] [--contexts 4096 16384]

The model has random weights and the layers of Mistral-7B, half as many: its checkpoint is written here, in
seconds. Eager execution, the chunks in the memory of this process. Prints one JSON object for each way to
select, after each length.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "services")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402

from benchmarks.gpu.blending import MAIN_SELECTIONS  # noqa: E402
from benchmarks.support.engines import cold, engine, store_chunks  # noqa: E402
from benchmarks.support.prompts import PREFIX, ChunkPrompt  # noqa: E402
from kintsugi.engine import plugin  # noqa: E402
from kintsugi.engine.local import LocalEngine, Prompt  # noqa: E402

CHUNKS, QUESTION = 8, 63
MEMORY_SHARE = 0.7
"""Of the GPU's, for vLLM: a blend needs some of the rest."""


def measure(running: LocalEngine, context: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Median times to the first token of a prompt of about `context` tokens, nothing in the prefix cache."""
    size = (context - QUESTION - len(PREFIX)) // CHUNKS
    prompt = ChunkPrompt.make([size] * CHUNKS, QUESTION, seed=context)
    store_chunks(running, prompt)
    full = Prompt(prompt.token_ids, None, max_tokens=1)
    blends = {
        name: dataclasses.replace(
            full,
            params=dataclasses.replace(prompt.params(selection.ratio), selector=selection.selector),
        )
        for name, selection in MAIN_SELECTIONS.items()
    }
    ways = {"full": full, **blends}
    for way in ways.values():
        cold(running, way)  # compiles the kernel for these sizes
    answers = [{name: cold(running, way) for name, way in ways.items()} for _ in range(repeats)]
    full_s = statistics.median(answer["full"].ttft_s for answer in answers)
    for name in blends:
        blend_s = statistics.median(answer[name].ttft_s for answer in answers)
        accounting = answers[-1][name].accounting or {}
        yield {
            "context": len(prompt.token_ids),
            "selection": name,
            "full_ms": full_s * 1e3,
            "blend_ms": blend_s * 1e3,
            "speedup": full_s / blend_s,
            "cost": accounting.get("cost"),
            "outcome": accounting.get("outcome"),
            "reason": accounting.get("reason"),
            "holds": all((answer[name].accounting or {}).get("outcome") == "blended" for answer in answers),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--shape", default="mistral-7b-layers", help="a name of tests.fakes.random_models.shapes"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    # vLLM calls it where Kintsugi is installed; here its sources are enough.
    plugin.register()
    options: dict[str, Any] = {"max_model_len": max(arguments.contexts) + 1}
    if torch.cuda.is_available():
        options["gpu_memory_utilization"] = MEMORY_SHARE
    model = {"shape": arguments.shape, "layers": arguments.layers}
    with engine(arguments.shape, layers=arguments.layers, **options) as running:
        for context in arguments.contexts:
            for row in measure(running, context, arguments.repeats):
                print(json.dumps({**model, **row}), flush=True)


if __name__ == "__main__":
    main()
