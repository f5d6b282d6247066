"""A whole service beside plain vLLM with prefix caching: goodput, TTFT, recovery, and what the gateway costs.

Both servers are started as users start them and pinned, with all their processes, to one core; the load comes
from the other. Random weights: this says how fast and how robust a service is, nothing about its answers
(`benchmarks/quality.py` does). Prompts are six 512-token chunks of a corpus, asked for by a Zipf law.

    python benchmarks/serving.py [--quick] [--save] [--only idle,goodput,stuffing,recovery,loading,gateway]

The figures of `loading.py` and `gateway.py` are measured by these scripts and stand in the same report.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support import serving_phases as phases
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure, report
from benchmarks.support.servers import CLIENT_CORE, SERVER_CORE, Setting, checkpoint, our_server, plain_server
from kintsugi.bench.profile import RagWorkload, corpus
from kintsugi.precompute.chunking import Chunker

HERE = Path(__file__).parent
OF_SERVERS = ("idle", "goodput", "stuffing", "recovery")
OF_SCRIPTS = ("loading", "gateway")
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

GOODPUT_BAR, TTFT_BAR, STUFFING_BAR, RECOVERY_BAR_S = 2.5, 2.8, 0.95, 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and no bars; without kills 2 minutes"
    )
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--only", help=f"comma-separated parts of {', '.join((*OF_SERVERS, *OF_SCRIPTS))}")
    arguments = parser.parse_args()
    # Told to stop, the servers are stopped, too.
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
        "server_core": SERVER_CORE,
        "client_core": CLIENT_CORE,
        "weights": "random",
    }
    part = "" if len(chosen) == len(OF_SERVERS) + len(OF_SCRIPTS) else "-" + "-".join(chosen)
    report("serving", config, figures, save_as=f"serving{part}" if arguments.save else None)


def _default_parts(quick: bool) -> list[str]:
    """The other scripts' quick runs take minutes of their own."""
    return ["idle", "goodput", "stuffing"] if quick else [*OF_SERVERS, *OF_SCRIPTS]


def _of_servers(quick: bool, chosen: list[str]) -> list[Figure]:
    setting, workload = (QUICK, QUICK_WORKLOAD) if quick else (FULL, FULL_WORKLOAD)
    budget = phases.QUICK if quick else phases.FULL
    # Before anything is pinned: the load's threads stay off the servers' core.
    os.sched_setaffinity(0, {CLIENT_CORE})
    with checkpoint(setting.shape) as model, ExitStack() as running:
        chunker = Chunker.of_model(model)
        texts = corpus(workload, lambda text: len(chunker.token_ids(text)))
        ours = running.enter_context(our_server(model, setting))
        phases.store_chunks(ours, texts)
        plain = running.enter_context(plain_server(model, setting))
        servers = (plain, ours)
        idle = phases.measure_idle(servers, texts, workload, budget.idle)
        figures = phases.idle_figures(idle, None if quick else TTFT_BAR)
        if "goodput" in chosen:
            found = phases.measure_goodput(servers, texts, workload, idle, budget)
            figures += phases.goodput_figures(found, idle, None if quick else GOODPUT_BAR)
        if "stuffing" in chosen:
            figures += phases.measure_stuffing(ours, model, None if quick else STUFFING_BAR)
        if "recovery" in chosen:
            bar = None if quick else RECOVERY_BAR_S
            figures += phases.measure_recovery(ours, texts, workload, idle, budget, bar)
    return figures


def _of_script(name: str, quick: bool) -> list[Figure]:
    """The figures of another benchmark, in a process of its own: it has engines and settings of its own."""
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
