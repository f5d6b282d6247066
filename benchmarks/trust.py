"""Attacks the cache: crashes, damage, erasure, timing, neighbours, hostile and foreign input, chunks.

    python benchmarks/trust.py [--quick] [--only SECTION,…] [--seed N] [--state FOLDER] [--minutes N] [--save]

Each section is a module of `benchmarks/support/trust`. Faults, and the moments at which they come, follow
from `--seed`. With `--state`, the outcome of every round is kept: a run that was interrupted, or that
`--minutes` ended (exit code 75), goes on where it stopped if the same command is given again at the same
commit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A raylet gives its workers 15 otherwise: beside others' work they would hardly ever run.
os.environ.setdefault("RAY_worker_niceness", "0")

from benchmarks.support import sections
from benchmarks.support.trust import (
    door,
    encryption,
    erasure,
    flips,
    fuzz,
    held,
    index,
    inputs,
    kill9,
    memory,
    neighbours,
    pieces,
    rounds,
    timing,
)

SECTIONS: sections.Sections = {
    "door": door.measure,
    "kill9": kill9.measure,
    "flips": flips.measure,
    "erasure": erasure.measure,
    "memory": memory.measure,
    "timing": timing.measure,
    "neighbours": neighbours.measure,
    "encryption": encryption.measure,
    "fuzz": fuzz.measure,
    "inputs": inputs.measure,
    "held": held.measure,
    "index": index.measure,
    "pieces": pieces.measure,
}


def main() -> None:
    parser = sections.parser_of(__doc__ or "", SECTIONS, "a few rounds of each kind, to see that all works")
    parser.add_argument("--seed", type=int, default=1, help="what faults and their moments follow from")
    parser.add_argument("--state", type=Path, help="folder in which the outcomes of rounds are kept")
    parser.add_argument("--minutes", type=float, help="begin no round after this long")
    arguments = parser.parse_args()
    if arguments.state is not None:
        os.environ[rounds.FOLDER] = str(arguments.state)
    if arguments.minutes is not None:
        os.environ[rounds.MINUTES] = str(arguments.minutes)
    config = {"seed": arguments.seed}
    sections.measure("trust", arguments, SECTIONS, config, quick=arguments.quick, seed=arguments.seed)


if __name__ == "__main__":
    main()
