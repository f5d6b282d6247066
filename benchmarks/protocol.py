"""Blends by the field's protocol: each question after its own passages, against the published selections.

Prompts are in chat form; questions are paired between configurations; intervals are 95 %, prompts resampled.
Blends run through the fusor's own passes, loader and codec over a plain torch decoder (fp32), so one process
compares every preparation. Questions with even numbers choose, those with odd numbers judge.

    python benchmarks/protocol.py --records FOLDER --model NAME [--only choosing,judged] [--minutes N]

The same folder continues a run. Only ids and figures of the data sets are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.support.protocol import run
from benchmarks.support.protocol.workloads import WORKLOADS
from kintsugi.models.reference import REFERENCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=REFERENCE.name, help="a packaged model or a checkpoint folder")
    parser.add_argument("--records", type=Path, required=True, help="folder; the same folder continues a run")
    parser.add_argument("--only", default=",".join(run.SECTIONS), help="default: %(default)s")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=60, help="of each workload; default: %(default)s")
    parser.add_argument("--answer-tokens", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--preparation", default="similar", help="judged; default: %(default)s")
    parser.add_argument("--selector", default="query", help="judged; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="time limit in minutes")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/protocol-MODEL.json")
    run.main(parser.parse_args())


if __name__ == "__main__":
    main()
