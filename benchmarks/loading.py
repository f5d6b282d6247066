"""The loading controller: does it foresee a time to first token, refuse in time, and cost nothing in vain?

On unmodified vLLM in this process, random weights and made-up tokens, methods interleaved, medians with
their range. The store is throttled memory, a shard's process with a disk, or a shard that was killed.

    python benchmarks/loading.py [--quick] [--save] [--only prediction,refusal,tiers,misses]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

# One compute thread, the other core left to loading: as an engine's CPU threads beside its accelerator.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support import forecasts, misses, tiers
from benchmarks.support.figures import Figure, report

SECTIONS = {
    "prediction": forecasts.ttft_prediction_error,
    "refusal": forecasts.refuse_ttft,
    "tiers": tiers.ttft_ssd_vs_ram,
    "misses": misses.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller prompts, fewer repetitions, 2 minutes")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--only", help=f"comma-separated sections of {', '.join(SECTIONS)}")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(SECTIONS)
    figures: list[Figure] = []
    for name in chosen:
        figures += SECTIONS[name](quick=arguments.quick)
    config = {
        "quick": arguments.quick,
        "sections": chosen,
        "compute_threads": os.environ["OMP_NUM_THREADS"],
        "weights": "random",
    }
    part = "" if len(chosen) == len(SECTIONS) else "-" + "-".join(chosen)
    report("loading", config, figures, save_as=f"loading{part}" if arguments.save else None)


if __name__ == "__main__":
    main()
