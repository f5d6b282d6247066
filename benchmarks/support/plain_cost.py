"""What the plugin costs a request that does not use it: CPU seconds beside plain vLLM.

vLLM keeps its connector in a process-wide variable, so the two engines run in child processes, which
take turns with the same prompts. The figure is the median of the turns' ratios: a machine that is shared is
slower in some minutes than in others, and the two of a turn share a minute. One process is some percent
faster than another of the same kind, for as long as it lives; so there are several pairs.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.support.engines import engine, say
from benchmarks.support.figures import Figure
from benchmarks.support.prompts import tokens
from kintsugi.engine.local import Prompt

SHAPE = "llama-210m"
LAYERS = 4
REQUESTS = 8
PAIRS = 5
TURNS = 8
"""Of each pair."""
RESAMPLES = 2000


class _Child:
    """An engine in another process that answers `REQUESTS` plain requests at each turn."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-m", "benchmarks.support.plain_cost", kind]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def turn(self, seed: int) -> float:
        """CPU seconds of one turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return float(json.loads(line)["cpu_s"])
        raise RuntimeError("the child ended early")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(quick: bool) -> list[Figure]:
    pairs, turns = (1, 6) if quick else (PAIRS, TURNS)
    ratios: list[float] = []
    for pair in range(pairs):
        ratios += _pair_ratios(turns)
        say(f"plain {pair + 1}/{pairs}")
    ratio, upper = statistics.median(ratios), _upper_bound(ratios)
    detail = f"upper 95 % bound {upper:.3f} (≤ 1.05), {pairs} × {turns} turns of {REQUESTS} requests each"
    if quick:
        return [Figure("plain_cpu_ratio", ratio, "×", detail=detail)]
    return [Figure("plain_cpu_ratio", ratio, "×", "≤ 1.02", ratio <= 1.02 and upper <= 1.05, detail)]


def _pair_ratios(turns: int) -> list[float]:
    """CPU seconds with the plugin ÷ without, for each turn of two new engines."""
    children = {"plain": _Child("plain"), "plugin": _Child("plugin")}
    ratios = []
    try:
        for turn in range(turns + 1):
            order = list(children) if turn % 2 else list(reversed(children))
            cpu_s = {kind: children[kind].turn(turn) for kind in order}
            if turn:  # the first turn warms both
                ratios.append(cpu_s["plugin"] / cpu_s["plain"])
    finally:
        for child in children.values():
            child.close()
    return ratios


def _upper_bound(ratios: Sequence[float]) -> float:
    """97.5th percentile of the median over bootstrap resamples."""
    generator = random.Random(7)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.975 * RESAMPLES)]


def _serve(kind: str) -> None:
    with engine(SHAPE, plugin=kind == "plugin", layers=LAYERS) as running:
        for line in sys.stdin:
            generator = random.Random(int(line))
            prompts = [
                Prompt([0, *tokens(200, generator)], None, max_tokens=16, ignore_eos=True)
                for _ in range(REQUESTS)
            ]
            started = time.process_time()
            for prompt in prompts:
                running.generate([prompt])
            print(json.dumps({"cpu_s": time.process_time() - started}), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
