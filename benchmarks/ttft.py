"""Measures the time to first token of blends against full prefill, and checks that blends are exact.

Everything is measured on unmodified vLLM in this process, methods interleaved, medians with their range.
The prompts are random tokens and the models have random weights: this says how fast a blend is and that
it computes what it should, nothing about the quality of answers.

    python benchmarks/ttft.py [--quick] [--save] [--only speed,exactness,...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

# One compute thread, the other core left to loading: as an engine's CPU threads beside its accelerator.
# A second one that gets descheduled makes every parallel region of a small model wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.support import attention, device_waits, exactness, plain_cost, speed, stalls
from benchmarks.support.sections import run

SECTIONS = {
    "speed": speed.measure,
    "attention": attention.measure,
    "stalls": stalls.measure,
    "exactness": exactness.measure,
    "oracle": exactness.measure_oracle,
    "hits": exactness.measure_hits,
    "stress": exactness.measure_stress,
    "plain": plain_cost.measure,
    "device": device_waits.measure,
}


if __name__ == "__main__":
    run("ttft", __doc__.splitlines()[0], SECTIONS)
