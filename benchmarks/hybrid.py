"""Is blending as good on models that mix tokens by a recurrence in most layers?

    python benchmarks/hybrid.py [--quick] [--save] [--prompts N]

Trains a small hybrid first if the cache has none (`benchmarks/testbed/hybrid.py`), then measures the answers
and the KL divergence of blends, relative to those of full prefill and of full KV reuse.
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
from benchmarks.support.hybrid import hybrid_model_once, measure
from benchmarks.support.quality_curve import Setup


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, one configuration")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--prompts", type=int, default=50, help="judged prompts per task")
    parser.add_argument("--model", type=Path, help="a folder that benchmarks/testbed/hybrid.py wrote")
    arguments = parser.parse_args()
    model = arguments.model or hybrid_model_once()
    setup = Setup(model, arguments.quick, prompts_asked=2 if arguments.quick else arguments.prompts)
    figures = measure(setup)
    config = {"quick": arguments.quick, "prompts_per_task": setup.prompts, **setup.details}
    report("hybrid", config, figures, save_as="hybrid" if arguments.save else None)


if __name__ == "__main__":
    main()
