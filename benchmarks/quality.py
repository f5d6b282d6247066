"""Quality of blended answers on the trained testbed model: selectors at equal cost, the gate, damage.

Questions come from the testbed's evaluation split. Configurations are chosen on some of them and judged on
others; intervals are 95 %, prompts resampled. Speed is quoted for the calibrated default alone, whose
quality stands beside it.

    python benchmarks/quality.py [--model FOLDER] [--quick] [--save] [--only curve,calibrate,default,damage]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

from benchmarks.support import calibrated, damage, quality_curve
from benchmarks.support.figures import Figure, report
from benchmarks.support.quality_curve import Setup
from benchmarks.support.testbed_questions import checkpoint

SECTIONS = {
    "curve": quality_curve.measure,
    "calibrate": calibrated.measure_calibrate,
    "default": calibrated.measure_default,
    "damage": damage.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the trained model; default: the bundled one")
    parser.add_argument("--quick", action="store_true", help="few prompts: 2 minutes, and wide intervals")
    parser.add_argument("--prompts", type=int, help="judged prompts per task, instead of 300")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--only", help=f"comma-separated sections of {', '.join(SECTIONS)}")
    arguments = parser.parse_args()
    setup = Setup(checkpoint(arguments.model), arguments.quick, prompts_asked=arguments.prompts)
    chosen = arguments.only.split(",") if arguments.only else list(SECTIONS)
    figures: list[Figure] = []
    for name in chosen:
        figures += SECTIONS[name](setup)
    config = {
        "quick": arguments.quick,
        "sections": chosen,
        "prompts_per_task": setup.prompts,
        "compute_threads": os.environ["OMP_NUM_THREADS"],
        "details": setup.details,
    }
    part = "" if len(chosen) == len(SECTIONS) else "-" + "-".join(chosen)
    report("quality", config, figures, save_as=f"quality{part}" if arguments.save else None)


if __name__ == "__main__":
    main()
