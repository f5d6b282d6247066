"""Tests the loading controller: the accuracy of its forecasts, its refusals, and the cost of misses.

On unmodified vLLM in this process, random weights and made-up tokens, methods interleaved, medians with
their range. The store is throttled memory, a shard's process with a disk, or one that was killed or hangs.

    python benchmarks/loading.py [--quick] [--save] [--only prediction,refusal,tiers,misses]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

# One compute thread, the other core left to loading: as an engine's CPU threads beside its accelerator.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support import forecasts, misses, tiers
from benchmarks.support.sections import run

SECTIONS = {
    "prediction": forecasts.ttft_prediction_error,
    "refusal": forecasts.refuse_ttft,
    "tiers": tiers.ttft_ssd_vs_ram,
    "misses": misses.measure,
}


if __name__ == "__main__":
    run("loading", __doc__.splitlines()[0], SECTIONS)
