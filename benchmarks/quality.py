"""Quality of blended answers on the trained testbed model: selectors at equal cost, the gate, damage.

Questions come from the testbed's evaluation split. Configurations are chosen on some of them and judged on
others; intervals are 95 %, prompts resampled. Speed is quoted for the calibrated default alone, whose
quality stands beside it.

    python benchmarks/quality.py [--model FOLDER] [--quick] [--save] [--only SECTIONS]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

from benchmarks.support import calibrated, damage, drifts, quality_curve
from benchmarks.support.quality_curve import Setup
from benchmarks.support.sections import measure, parser_of
from benchmarks.support.testbed_questions import checkpoint

SECTIONS = {
    "curve": quality_curve.measure,
    "calibrate": calibrated.measure_calibrate,
    "default": calibrated.measure_default,
    "damage": damage.measure,
    "drift": drifts.measure,
}


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], SECTIONS, "few prompts: 2 minutes, and wide intervals")
    parser.add_argument("--model", help="folder of the trained model; default: the bundled one")
    parser.add_argument("--prompts", type=int, help="judged prompts per task, instead of 300")
    arguments = parser.parse_args()
    setup = Setup(checkpoint(arguments.model), arguments.quick, prompts_asked=arguments.prompts)
    config = {"prompts_per_task": setup.prompts, "details": setup.details}
    measure("quality", arguments, SECTIONS, config, setup=setup)


if __name__ == "__main__":
    main()
