"""Tests whether blending is as good on models with recurrent layers.

    python benchmarks/hybrid.py [--quick] [--save] [--prompts N]

Trains a small hybrid first if the cache has none (`benchmarks/testbed/hybrid.py`), then measures the answers
and the KL divergence of blends, relative to those of full prefill and of full KV reuse.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support.hybrid import hybrid_model_once, measure
from benchmarks.support.trained_models import run

if __name__ == "__main__":
    run("hybrid", __doc__, hybrid_model_once, measure, quick_prompts=2)
