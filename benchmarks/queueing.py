"""Measures many requests at once: blocks held by parked blends, sharing between identical prompts, the
possible gain of shared layer calls.

On unmodified vLLM in this process, random weights and made-up tokens.

    python benchmarks/queueing.py [--quick] [--save] [--only parked,identical,layer_calls]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

# One compute thread, the other core left to loading: as an engine's CPU threads beside its accelerator.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support import crowds, layer_calls
from benchmarks.support.sections import run

SECTIONS = {
    "parked": crowds.parked_blocks_share,
    "identical": crowds.blends_for_n4,
    "layer_calls": layer_calls.measure,
}


if __name__ == "__main__":
    run("queueing", __doc__.splitlines()[0], SECTIONS)
