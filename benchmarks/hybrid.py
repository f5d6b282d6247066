"""Tests whether blending is as good on models with recurrent layers, and how fast it is.

    python benchmarks/hybrid.py [--quick] [--save] [--only mamba2,delta_net,ttft] [--prompts N]

`mamba2` and `delta_net` train a small hybrid first if the cache has none (`benchmarks/testbed/hybrid.py`),
then measure the answers and the KL divergence of blends, relative to those of full prefill and of full KV
reuse. `ttft` measures the time to first token on a larger one with random weights.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support.torchvision import python_path

os.environ["PYTHONPATH"] = python_path()

from benchmarks.support import hybrid, hybrid_speed
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import Setup
from benchmarks.support.sections import Sections, measure, parser_of

PROMPTS_QUICK = 2


def measure_quality(
    kind: str, quick: bool, prompts: int, models: dict[str, Any], **given: Any
) -> list[Figure]:
    setup = Setup(hybrid.hybrid_model_once(kind), quick, prompts_asked=PROMPTS_QUICK if quick else prompts)
    models[kind] = {"prompts_per_task": setup.prompts}
    setup.details = models[kind]
    return hybrid.measure(kind, setup)


def main() -> None:
    sections: Sections = {
        **{kind: partial(measure_quality, kind) for kind in hybrid.DTYPES},
        "ttft": hybrid_speed.measure,
    }
    parser = parser_of((__doc__ or "").splitlines()[0], sections, "few prompts, one configuration, 2 minutes")
    parser.add_argument("--prompts", type=int, default=50, help="judged prompts per task")
    parser.add_argument("--records", type=Path, help="folder in which measured times are kept, to go on from")
    arguments = parser.parse_args()
    models: dict[str, Any] = {}
    measure(
        "hybrid",
        arguments,
        sections,
        {"models": models},
        quick=arguments.quick,
        prompts=arguments.prompts,
        models=models,
        records=arguments.records,
    )


if __name__ == "__main__":
    main()
