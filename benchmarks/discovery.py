"""Measures passages that recur in prompts without being declared: hits, speed-up, and the cost of the search.

    python benchmarks/discovery.py [--quick] [--save] [--only insertion,sketches,cost,service,real,agent]

`insertion` and `sketches` need no engine, `cost` one in this process; the others start servers as users do.
The models have random weights but for `insertion` (its tokenizer) and `real` (SmolLM2-135M-Instruct).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support.discovered import agent, cost, insertion, real, service, sketches
from benchmarks.support.sections import run

SECTIONS = {
    "insertion": insertion.measure,
    "sketches": sketches.measure,
    "cost": cost.measure,
    "service": service.measure,
    "real": real.measure,
    "agent": agent.measure,
}


if __name__ == "__main__":
    weights = "random; of `real` pretrained (SmolLM2-135M-Instruct)"
    run("discovery", __doc__.splitlines()[0], SECTIONS, weights)
