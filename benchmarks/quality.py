"""Quality of blended answers: selectors at equal cost, codecs, damage; and the same on a real model.

The sections `curve`, `codecs` and `damage` measure on the trained testbed model, with questions of the
testbed's evaluation split. The section `family` compares the selectors on a model of another family, which it
trains first if the cache has none. The section `real` measures on the reference model, in its chat form, with
six passages of about 600 tokens. Configurations are chosen on some prompts and judged on others; intervals
are 95 %, prompts resampled. Speed is quoted for one configuration, whose quality stands beside it. What opens
and closes blending is measured by `benchmarks/gate.py`.

    python benchmarks/quality.py [--quick] [--save] [--only curve,codecs,damage,family,real]
    python benchmarks/quality.py --only real --records FOLDER --minutes 8

The last may be called again and again with the same folder: it goes on until everything is measured.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

from benchmarks.support import codecs, damage, family, quality_curve
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.quality_curve import Setup
from benchmarks.support.real import section
from benchmarks.support.real.section import RealSetup
from benchmarks.support.sections import measure, parser_of
from benchmarks.support.testbed_questions import checkpoint

SECTIONS = {
    "curve": quality_curve.measure,
    "codecs": codecs.measure,
    "damage": damage.measure,
    "family": lambda setup: family.measure(setup, setup.family_model),
    "real": lambda setup: section.measure(setup.real),
}


@dataclass
class Setups(Setup):
    """What every section measures with, the other models' too."""

    family_model: Path | None = None
    real: RealSetup = field(default_factory=RealSetup)


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], SECTIONS, "few prompts: 2 minutes, and wide intervals")
    parser.add_argument("--model", help="folder of the trained model; default: the bundled one")
    parser.add_argument("--prompts", type=int, help="judged prompts per task, instead of 300")
    family_help = "folder of the section family's model; default: the one that it trains"
    parser.add_argument("--family-model", type=Path, metavar="FOLDER", help=family_help)
    real = parser.add_argument_group("the section real")
    real.add_argument("--real-model", default=section.MODEL, help="default: %(default)s")
    real.add_argument("--records", type=Path, help="folder of its records; the same folder continues a run")
    real.add_argument("--minutes", type=float, default=section.MINUTES, help="stop after so many")
    real.add_argument("--musique", type=Path, default=MUSIQUE, help="MuSiQue's file; default: %(default)s")
    real.add_argument("--contexts", default=",".join(section.CONTEXTS), help="default: %(default)s")
    arguments = parser.parse_args()
    # Told to stop, servers are stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    setup = Setups(
        checkpoint(arguments.model),
        arguments.quick,
        prompts_asked=arguments.prompts,
        family_model=arguments.family_model,
        real=RealSetup(
            quick=arguments.quick,
            model=arguments.real_model,
            records=arguments.records,
            minutes=arguments.minutes,
            musique=arguments.musique,
            contexts=tuple(arguments.contexts.split(",")),
        ),
    )
    config = {
        "prompts_per_task": setup.prompts,
        "details": setup.details,
        "real_model": setup.real.model,
        "real_details": setup.real.details,
    }
    measure("quality", arguments, SECTIONS, config, setup=setup)


if __name__ == "__main__":
    main()
