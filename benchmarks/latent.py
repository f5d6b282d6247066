"""Tests whether blending is as good with multi-head latent attention as with K and V heads.

    python benchmarks/latent.py [--quick] [--save] [--prompts N]

Trains a small model with latents first if the cache has none (`benchmarks/testbed/latent.py`), then measures
the KL divergence of blends from full prefill, relative to that of full KV reuse.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support.latent import latent_model_once, measure
from benchmarks.support.trained_models import run

if __name__ == "__main__":
    run("latent", __doc__, latent_model_once, measure, quick_prompts=12)
