"""Is blending as good with multi-head latent attention as with heads of K and V?

    python benchmarks/latent.py [--quick] [--save] [--prompts N]

Trains a small model with latents first if the cache has none (`benchmarks/testbed/latent.py`), then measures
the KL divergence of blends from full prefill, relative to that of full KV reuse.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support.figures import report
from benchmarks.support.latent import latent_model_once, measure
from benchmarks.support.quality_curve import Setup


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, one configuration")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--prompts", type=int, default=50, help="judged prompts per task")
    parser.add_argument("--model", type=Path, help="a folder that benchmarks/testbed/latent.py wrote")
    arguments = parser.parse_args()
    model = arguments.model or latent_model_once()
    setup = Setup(model, arguments.quick, prompts_asked=12 if arguments.quick else arguments.prompts)
    figures = measure(setup)
    config = {"quick": arguments.quick, "prompts_per_task": setup.prompts, **setup.details}
    report("latent", config, figures, save_as="latent" if arguments.save else None)


if __name__ == "__main__":
    main()
