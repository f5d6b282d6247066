"""Measures the plugin's cost for a request that does not use it: CPU seconds against plain vLLM.

vLLM keeps its connector in a process-wide variable, so the engines run in child processes, which take turns
with the same prompts. A third one has a connector that does nothing, to measure vLLM's own cost of having
one. The figures are medians of the turns' ratios: a machine that is shared is slower in some minutes than in
others, and the engines of a turn share a minute. One process is some percent faster than another of the same
kind, for as long as it lives; so there are several sets of them.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.support.engines import engine, say
from benchmarks.support.figures import Figure
from benchmarks.support.prompts import tokens
from kintsugi.engine.local import Prompt

SHAPE = "llama-210m"
LAYERS = 4
REQUESTS = 8
SETS = 5
TURNS = 8
"""Number of turns of each set of engines."""
RESAMPLES = 2000
IDLE_CONNECTOR = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "benchmarks.support.idle_connector",
    "kv_role": "kv_both",
}


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
    sets, turns = (1, 6) if quick else (SETS, TURNS)
    cpu_s: list[dict[str, float]] = []
    for number in range(sets):
        cpu_s += _take_turns(turns)
        say(f"plain {number + 1}/{sets}")
    ratios = [turn["plugin"] / turn["plain"] for turn in cpu_s]
    idle = statistics.median(turn["idle"] / turn["plain"] for turn in cpu_s)
    ratio, upper = statistics.median(ratios), _upper_bound(ratios)
    detail = f"upper 95 % bound {upper:.3f} (≤ 1.05), {sets} × {turns} turns of {REQUESTS} requests each"
    bar, holds = (None, None) if quick else ("≤ 1.02", ratio <= 1.02 and upper <= 1.05)
    return [
        Figure("plain_cpu_ratio", ratio, "×", bar, holds, detail),
        Figure("idle_connector_cpu_ratio", idle, "×", detail="the same with a connector that does nothing"),
    ]


def _take_turns(turns: int) -> list[dict[str, float]]:
    """CPU seconds of each kind, for each turn of new engines."""
    children = {kind: _Child(kind) for kind in ("plain", "idle", "plugin")}
    measured = []
    try:
        for turn in range(turns + 1):
            order = list(children) if turn % 2 else list(reversed(children))
            cpu_s = {kind: children[kind].turn(turn) for kind in order}
            if turn:  # the first turn warms all
                measured.append(cpu_s)
    finally:
        for child in children.values():
            child.close()
    return measured


def _upper_bound(ratios: Sequence[float]) -> float:
    """97.5th percentile of the median over bootstrap resamples."""
    generator = random.Random(7)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.975 * RESAMPLES)]


def _serve(kind: str) -> None:
    arguments: dict[str, Any] = {"kv_transfer_config": IDLE_CONNECTOR} if kind == "idle" else {}
    with engine(SHAPE, plugin=kind == "plugin", layers=LAYERS, **arguments) as running:
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
