"""Compares a whole service with plain vLLM with prefix caching: goodput, TTFT, recovery, the gateway's cost.

Both servers are started as users start them and pinned, with all their processes, to one core; the load comes
from the other. Random weights: this says how fast and how robust a service is, nothing about its answers
(`benchmarks/quality.py` does). Prompts are six 512-token chunks of a corpus, asked for by a Zipf law.

    python benchmarks/serving.py [--quick] [--save] [--only idle,goodput,reuse,...]

`goodput` and `reuse` have plans of their own (`benchmarks/support`): 60 requests at each of three shares of a
server's own capacity, and 500 queries of a small model. The figures of `loading.py`, `gateway.py` and
`queueing.py` are measured by these scripts and stand in the same report.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support import goodput, reuse
from benchmarks.support import serving_phases as phases
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure, report
from benchmarks.support.load.profile import RagWorkload, corpus
from benchmarks.support.servers import (
    CLIENT_CORE,
    SERVER_CORE,
    Server,
    Setting,
    checkpoint,
    our_server,
    plain_server,
)
from kintsugi.precompute.chunking import Chunker

HERE = Path(__file__).parent
OF_SERVERS = ("idle", "goodput", "reuse", "stuffing", "recovery", "recovery_two")
OF_SCRIPTS = ("loading", "gateway", "queueing")
SCRIPT_S = 3600

FULL = Setting("llama-210m", max_model_len=8192, kv_cache_bytes=1 << 30)
QUICK = Setting(
    "tiny-llama",
    max_model_len=4096,
    kv_cache_bytes=64 << 20,
    loading_controller=False,
    ram_gib=0.5,
    ssd_gib=0.5,
)
FULL_WORKLOAD = RagWorkload(documents=200, zipf=0.9, chunks=6, chunk_tokens=512, answer_tokens=16)
QUICK_WORKLOAD = RagWorkload(documents=16, zipf=0.9, chunks=4, chunk_tokens=128, answer_tokens=8)

GOODPUT_BAR, CPU_BAR, TTFT_BAR, STUFFING_BAR, REUSE_BAR, RECOVERY_BAR_S = 3.0, 3.2, 2.8, 0.95, 0.95, 60.0
RECOVERY_TWO_BAR_S = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and no bars; without kills 2 minutes"
    )
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--only", help=f"comma-separated parts of {', '.join((*OF_SERVERS, *OF_SCRIPTS))}")
    arguments = parser.parse_args()
    # When this process is stopped, it stops the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = arguments.only.split(",") if arguments.only else _default_parts(arguments.quick)
    figures: list[Figure] = []
    if set(chosen) & set(OF_SERVERS):
        figures += _of_servers(arguments.quick, chosen)
    for name in OF_SCRIPTS:
        if name in chosen:
            figures += _of_script(name, arguments.quick)
    setting, workload = (QUICK, QUICK_WORKLOAD) if arguments.quick else (FULL, FULL_WORKLOAD)
    config = {
        "quick": arguments.quick,
        "parts": chosen,
        "setting": vars(setting),
        "workload": vars(workload),
        "goodput": asdict(goodput.QUICK if arguments.quick else goodput.FULL),
        "reuse": asdict(reuse.QUICK if arguments.quick else reuse.FULL),
        "server_core": SERVER_CORE,
        "client_core": CLIENT_CORE,
        "weights": "random",
    }
    part = "" if len(chosen) == len(OF_SERVERS) + len(OF_SCRIPTS) else "-" + "-".join(chosen)
    report("serving", config, figures, save_as=f"serving{part}" if arguments.save else None)


def _default_parts(quick: bool) -> list[str]:
    """The quick runs of the other scripts would take minutes, too."""
    return ["idle", "goodput", "reuse", "stuffing"] if quick else [*OF_SERVERS, *OF_SCRIPTS]


def _of_servers(quick: bool, chosen: list[str]) -> list[Figure]:
    # Before anything is pinned: the load's threads stay off the servers' core.
    os.sched_setaffinity(0, {CLIENT_CORE})
    figures: list[Figure] = []
    with checkpoint((QUICK if quick else FULL).shape) as model:
        if set(chosen) & {"idle", "stuffing", "recovery"}:
            figures += _of_one_pair(model, quick, chosen)
        if "recovery_two" in chosen:
            figures += _recovery_two(model, quick)
        if "goodput" in chosen:
            figures += _goodput(model, quick)
        if "reuse" in chosen:
            figures += _reuse(quick)
    return figures


def _of_one_pair(model: Path, quick: bool, chosen: list[str]) -> list[Figure]:
    """The sections that send the same prompts to both servers."""
    setting, workload = (QUICK, QUICK_WORKLOAD) if quick else (FULL, FULL_WORKLOAD)
    budget = phases.QUICK if quick else phases.FULL
    texts = _corpus(model, workload)
    with _pair(model, setting, texts) as servers:
        idle = phases.measure_idle(servers, texts, workload, budget.idle)
        figures = phases.idle_figures(idle, None if quick else TTFT_BAR)
        if "stuffing" in chosen:
            figures += phases.measure_stuffing(servers[1], model, None if quick else STUFFING_BAR)
        if "recovery" in chosen:
            bar = None if quick else RECOVERY_BAR_S
            figures += phases.measure_recovery(servers[1], texts, workload, idle, budget, bar)
    return figures


def _recovery_two(model: Path, quick: bool) -> list[Figure]:
    setting, workload = (QUICK, QUICK_WORKLOAD) if quick else (FULL, FULL_WORKLOAD)
    budget = phases.QUICK if quick else phases.FULL
    texts = _corpus(model, workload)
    with _pair(model, replace(setting, engines=2), texts) as servers:
        idle = phases.measure_idle(servers, texts, workload, budget.idle)
        bar = None if quick else RECOVERY_TWO_BAR_S
        return phases.measure_recovery_of_one_in_two(servers[1], texts, workload, idle, budget, bar)


def _goodput(model: Path, quick: bool) -> list[Figure]:
    plan, setting = (goodput.QUICK, QUICK) if quick else (goodput.FULL, FULL)
    texts = _corpus(model, plan.workload)
    expert = {"selector": plan.selector}
    tuned = {
        tokens: replace(setting, vllm={"max_num_batched_tokens": tokens}, expert=expert)
        for tokens in plan.settings
    }
    capacities: dict[str, dict[int, float]] = {"plain": {}, "kintsugi": {}}
    for tokens, one in tuned.items():
        with _pair(model, one, texts) as servers:
            for name, per_s in goodput.measure_capacities(servers, texts, plan).items():
                capacities[name][tokens] = per_s
                say(f"{name}: {per_s:.3f} answers/s at once, {tokens} batched tokens")
    best = {name: max(found, key=lambda tokens: found[tokens]) for name, found in capacities.items()}
    loads: list[goodput.Load] = []
    for tokens in sorted(set(best.values())):
        names = [name for name, chosen in best.items() if chosen == tokens]
        rates = {name: capacities[name][tokens] for name in names}
        with _pair(model, tuned[tokens], texts) as servers:
            loads += goodput.measure(servers, names, texts, plan, tokens, rates)
    bars = (None, None) if quick else (GOODPUT_BAR, CPU_BAR)
    return goodput.figures_of(loads, plan.slo_s, *bars)


def _reuse(quick: bool) -> list[Figure]:
    plan = reuse.QUICK if quick else reuse.FULL
    setting = replace(QUICK if quick else FULL, shape=plan.shape, kv_cache_bytes=plan.kv_cache_bytes)
    small = replace(setting, ram_gib=plan.small_ram_gib, ssd_gib=0.0)
    bar = None if quick else REUSE_BAR
    with checkpoint(plan.shape) as model:
        texts = _corpus(model, plan.workload)
        with _pair(model, setting, texts) as servers:
            figures = reuse.measure(servers, texts, plan, "reuse_after_500", bar)
        with _pair(model, small, texts) as servers:
            return figures + reuse.measure(servers, texts, plan, "reuse_after_500_small_store", None)


def _corpus(model: Path, workload: RagWorkload) -> list[str]:
    chunker = Chunker.of_model(model)
    return corpus(workload, lambda text: len(chunker.token_ids(text)))


@contextmanager
def _pair(model: Path, setting: Setting, texts: list[str]) -> Iterator[tuple[Server, Server]]:
    """Plain vLLM, and a service that holds the texts' chunks."""
    with our_server(model, setting) as ours:
        phases.store_chunks(ours, texts)
        with plain_server(model, setting) as plain:
            yield plain, ours


def _of_script(name: str, quick: bool) -> list[Figure]:
    """Run another benchmark in a separate process, with its own engines and settings, and return its
    figures."""
    script = HERE / f"{name}.py"
    if not script.is_file():
        say(f"{script.name} is not here: its figures are not measured")
        return []
    say(f"running {script.name}")
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    command = [sys.executable, str(script), *(["--quick"] if quick else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=SCRIPT_S)
    document: dict[str, Any] = json.loads(result.stdout.decode().strip().splitlines()[-1])
    return [Figure(**figure) for figure in document["figures"]]


if __name__ == "__main__":
    main()
