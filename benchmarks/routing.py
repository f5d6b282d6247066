"""Which engine answers: our router against power-of-two-choices and round robin.

    python benchmarks/routing.py [--quick] [--real] [--save]

A simulation of many engines, on a production chat service's trace and on retrieval with chunks on several
hosts, and with `--real` two vLLM engines on Ray Serve that share conversations. Ratios above 1 say that ours
is faster.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support.figures import Figure, report
from benchmarks.support.record_route import (
    Arrival,
    Fleet,
    Ours,
    Outcome,
    RoundRobin,
    TwoChoices,
    conversations,
    retrievals,
    simulate,
)
from kintsugi.serving.routing import EngineView, PrefixMemory, RouteCosts, Wanted, rank_engines

TRACE = Path(__file__).resolve().parent.parent.parent / "shared/data/mooncake_conversation_trace.jsonl"
SEED = 7
TOKENS_PER_S = 20_000.0
"""Speed of an engine's prefill: roughly an 8-billion-parameter model on one current GPU."""
UTILISATIONS = (0.5, 0.8)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def compared(name: str, arrivals: list[Arrival], fleet: Fleet, costs: RouteCosts) -> list[Figure]:
    """Ours against the two others, on the same requests and engines."""
    say(f"{name}: {len(arrivals)} requests on {fleet.engines} engines")
    ours = simulate(arrivals, fleet, Ours(costs), SEED)
    others: dict[str, Outcome] = {
        "two_choices": simulate(arrivals, fleet, TwoChoices(SEED), SEED),
        "round_robin": simulate(arrivals, fleet, RoundRobin(), SEED),
    }
    figures = []
    for other, outcome in others.items():
        for label, share in (("p50", 0.5), ("p95", 0.95)):
            mine, theirs = ours.percentile(share), outcome.percentile(share)
            detail = f"TTFT {theirs:.3f} s against {mine:.3f} s; prefix hits {outcome.hit_share:.2f}, "
            detail += f"{ours.hit_share:.2f}"
            figures.append(Figure.at_least(f"{name}_{other}_{label}", theirs / mine, 1.0, detail=detail))
    return figures


def on_conversations(quick: bool) -> list[Figure]:
    if not TRACE.exists():
        return [Figure("conversations", None, "×", detail=f"{TRACE.name} is not here")]
    arrivals = conversations(TRACE)[: 1500 if quick else None]
    tokens = sum(arrival.num_tokens for arrival in arrivals)
    duration_s = arrivals[-1].at_s - arrivals[0].at_s
    figures = []
    for utilisation in UTILISATIONS:
        engines = math.ceil(tokens / duration_s / TOKENS_PER_S / utilisation)
        # Ten times the trace's rate, on as many more engines: a service, not one node.
        faster = [Arrival(a.at_s / 10, a.num_tokens, a.blocks) for a in arrivals]
        fleet = Fleet(10 * engines, 10 * engines, TOKENS_PER_S)
        figures += compared(f"conversations_{utilisation:g}", faster, fleet, RouteCosts())
    return figures


def on_retrieval(quick: bool) -> list[Figure]:
    """Chunks in 8 bit, 0.065 MB a token: 25 Gb/s between hosts, memory within one."""
    fleet = Fleet(8, 4, TOKENS_PER_S, remote_s_per_token=21e-6, local_s_per_token=2e-6)
    costs = RouteCosts(hit_share=0.25, remote_ms_per_token=0.02)
    figures = []
    for utilisation in UTILISATIONS:
        seconds = (64 + fleet.hit_share * 3072) / TOKENS_PER_S + 0.005
        rate_per_s = utilisation * fleet.engines / seconds
        arrivals = retrievals(2_000 if quick else 20_000, rate_per_s, SEED)
        figures += compared(f"retrieval_{utilisation:g}", arrivals, fleet, costs)
    return figures


def decision_us() -> Figure:
    """What one choice costs, among 16 engines."""
    views = {f"e{n}": EngineView(n, 1000.0, f"host{n}") for n in range(16)}
    memory, wanted = PrefixMemory(), Wanted(8192, tuple(range(64)), {"host1": 3072})
    memory.record_route(wanted.prefix, "e3")
    repeats = 2_000
    began_s = time.process_time()
    for _ in range(repeats):
        rank_engines(views, wanted, memory, RouteCosts())
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
    config: dict[str, Any] = {"seed": SEED, "tokens_per_s": TOKENS_PER_S, "quick": options.quick}
    report("routing", config, figures, "routing" if options.save and not options.quick else None)


if __name__ == "__main__":
    main()
