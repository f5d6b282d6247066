"""Compares our router with power of two choices and round robin.

    python benchmarks/routing.py [--quick] [--real] [--save]

A simulation of many engines, on a production chat service's trace and on retrieval with chunks on several
hosts, and with `--real` two vLLM engines on Ray Serve that share conversations. Ratios above 1 say that ours
is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support.figures import Figure, report
from kintsugi.serving.routing import BLOCK_TOKENS, EngineView, PrefixMemory, Wanted, rank_engines
from tests.fakes.engine_fleet import (
    CHUNK_TOKENS,
    CHUNKS,
    QUESTION_TOKENS,
    Arrival,
    Fleet,
    ForecastRouter,
    Hardware,
    RoundRobin,
    TwoChoices,
    Waits,
    draw_retrievals,
    simulate,
)

TRACE = Path(__file__).resolve().parent.parent.parent / "shared/data/mooncake_conversation_trace.jsonl"
TRACE_BLOCK_TOKENS = 512
SEED = 7
UTILISATIONS = (0.5, 0.8)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def read_conversations(path: Path) -> list[Arrival]:
    """A trace of Mooncake's: times, lengths and shared beginnings of a production chat service."""
    arrivals = []
    per_block = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
    for line in path.read_text().splitlines():
        record = json.loads(line)
        blocks = [block * per_block + part for block in record["hash_ids"] for part in range(per_block)]
        whole = record["input_length"] // BLOCK_TOKENS
        arrivals.append(Arrival(record["timestamp"] / 1e3, record["input_length"], tuple(blocks[:whole])))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def compare(name: str, arrivals: list[Arrival], fleet: Fleet) -> list[Figure]:
    """Compare our router with the two others on the same requests and engines."""
    say(f"{name}: {len(arrivals)} requests on {fleet.engines} engines")
    ours = simulate(arrivals, fleet, ForecastRouter(fleet.shards()), SEED)
    others: dict[str, Waits] = {
        "two_choices": simulate(arrivals, fleet, TwoChoices(SEED), SEED),
        "round_robin": simulate(arrivals, fleet, RoundRobin(), SEED),
    }
    figures = []
    for other, outcome in others.items():
        for label, share in (("p50", 0.5), ("p95", 0.95)):
            mine, theirs = ours.percentile(share), outcome.percentile(share)
            detail = f"TTFT {theirs:.3f} s against {mine:.3f} s; prefix hits {outcome.resident_share:.2f}, "
            detail += f"{ours.resident_share:.2f}"
            figures.append(Figure.at_least(f"{name}_{other}_{label}", theirs / mine, 1.0, detail=detail))
    return figures


def on_conversations(quick: bool) -> list[Figure]:
    if not TRACE.exists():
        return [Figure("conversations", None, "×", detail=f"{TRACE.name} is not here")]
    arrivals = read_conversations(TRACE)[: 1500 if quick else None]
    hardware = Fleet(1, 1).hardware
    work_s = sum(hardware.first_token_s(arrival.num_tokens) for arrival in arrivals)
    duration_s = arrivals[-1].at_s - arrivals[0].at_s
    figures = []
    for utilisation in UTILISATIONS:
        engines = math.ceil(work_s / duration_s / utilisation)
        # Ten times the trace's rate, on as many more engines: a service, not one node.
        faster = [Arrival(a.at_s / 10, a.num_tokens, a.blocks) for a in arrivals]
        figures += compare(f"conversations_{utilisation:g}", faster, Fleet(10 * engines, 10 * engines))
    return figures


def on_retrieval(quick: bool) -> list[Figure]:
    """Eight engines on four hosts; utilisation as if a host had its share of every prompt's chunks."""
    fleet, chunk_tokens = Fleet(8, 4), CHUNKS * CHUNK_TOKENS
    local = chunk_tokens // fleet.hosts
    one_s = fleet.hardware.first_token_s(QUESTION_TOKENS, same_host=local, remote=chunk_tokens - local)
    figures = []
    for utilisation in UTILISATIONS:
        rate_per_s = utilisation * fleet.engines / one_s
        arrivals = draw_retrievals(2_000 if quick else 20_000, rate_per_s, SEED)
        figures += compare(f"retrieval_{utilisation:g}", arrivals, fleet)
    return figures


def decision_us() -> Figure:
    """What one choice costs, among 16 engines."""
    views = {f"e{n}": EngineView(n, 1000.0, f"host{n}") for n in range(16)}
    memory, wanted = PrefixMemory(), Wanted(8192, tuple(range(64)), {"host1": 3072})
    memory.record_route(wanted.prefix, "e3")
    repeats = 2_000
    began_s = time.process_time()
    for _ in range(repeats):
        rank_engines(views, wanted, memory)
    return Figure("decision_us", (time.process_time() - began_s) / repeats * 1e6, "µs of CPU")


def on_two_engines(quick: bool) -> list[Figure]:
    """Conversations on a real service of two engines: the share of prompts that a prefix cache held."""
    from benchmarks.support.two_engines import ROUTERS, cached_share

    shares = {}
    for name in ROUTERS:
        say(f"two engines, {name}")
        shares[name] = cached_share(name, conversations=4 if quick else 16, turns=4)
    ours, theirs = shares["ours"], shares["two_choices"]
    detail = f"of prompt tokens cached: {ours:.3f} with ours, {theirs:.3f} with two choices"
    return [Figure("real_cached_ratio", ours / theirs if theirs else math.inf, "×", detail=detail)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--real", action="store_true", help="Also on two vLLM engines.")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    figures = [*on_conversations(options.quick), *on_retrieval(options.quick), decision_us()]
    if options.real:
        figures += on_two_engines(options.quick)
    config: dict[str, Any] = {"seed": SEED, "hardware": asdict(Hardware()), "quick": options.quick}
    report("routing", config, figures, "routing" if options.save and not options.quick else None)


if __name__ == "__main__":
    main()
