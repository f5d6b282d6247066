"""What precomputing a corpus costs: against vLLM's own prefill, run again, killed, a million documents long.

    python benchmarks/precompute.py [--quick] [--only FIGURE …] [--save]

Each figure runs in a process of its own: Ray, vLLM and what they keep end with it. `driver_memory_growth` and
`double_prefills` stub the prefill out; the others run vLLM. `--quick` uses tiny sizes and models: it shows
that the script works, not how fast anything is.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import psutil

from benchmarks.support.figures import Figure, report
from kintsugi.checkpoints.factory import cached_checkpoint
from kintsugi.client.chunking import Chunker, ChunkingConfig
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import Span
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.precompute.job import Job
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.pool import ensure_ray
from kintsugi.precompute.progress import Progress
from kintsugi.precompute.spec import JobSpec
from kintsugi.precompute.worker import StubPrefiller

ROOT = Path(__file__).resolve().parent.parent
MUSIQUE = ROOT.parent / "shared/data/musique_s.json"
NAMESPACE = "bench"


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Setting:
    """Sizes, a folder, and the shard that a figure runs against."""

    def __init__(self, quick: bool, folder: Path, address: str) -> None:
        self.quick = quick
        self.folder = folder
        self.address = address
        self.shape = "tiny-llama" if quick else "llama-210m"
        self.model = str(cached_checkpoint(self.shape))
        self.engine: dict[str, Any] = {"max_model_len": 4096}

    def spec(self, **values: Any) -> JobSpec:
        base: dict[str, Any] = {
            "source": str(self.folder / "corpus.jsonl"),
            "model": self.model,
            "store": f"grpc://{self.address}",
            "namespace": NAMESPACE,
            "corpus": "musique",
            "engine": self.engine,
        }
        return JobSpec(**{**base, **values})

    def passages(self) -> list[str]:
        """Distinct passages of MuSiQue, written as the source."""
        questions = json.loads(MUSIQUE.read_text())
        texts = list(dict.fromkeys(ctx["text"] for question in questions for ctx in question["ctxs"]))
        texts = texts[: 8 if self.quick else 1_255]
        rows = (json.dumps({"id": f"p{n}", "text": text}) for n, text in enumerate(texts))
        (self.folder / "corpus.jsonl").write_text("".join(row + "\n" for row in rows))
        return texts


@contextmanager
def setting(quick: bool) -> Iterator[Setting]:
    """A shard in a process of its own: its CPU is not the driver's."""
    with tempfile.TemporaryDirectory(prefix="kintsugi-bench-") as name:
        folder = Path(name)
        sizes = ("64MiB", "512MiB") if quick else ("2GiB", "60GiB")
        command = [
            *(sys.executable, "-c", "from kintsugi.cli.store import app; app()", "serve"),
            *("--listen", "127.0.0.1:0", "--data-dir", str(folder / "data")),
            *("--ram", sizes[0], "--ssd", f"{folder / 'ssd'}:{sizes[1]}"),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        shard = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert shard.stdout is not None
            yield Setting(quick, folder, shard.stdout.readline().split()[-1])
        finally:
            shard.kill()
            shard.communicate()


def timed_job(spec: JobSpec, folder: Path) -> tuple[Progress, float]:
    ledger = Ledger(folder / "state")
    started_s = time.perf_counter()
    progress = Job(spec, ledger).run()
    elapsed_s = time.perf_counter() - started_s
    ledger.close()
    assert progress.coverage == 1.0, progress.failures
    return progress, elapsed_s


def plain_tokens_per_s(at: Setting, texts: list[str]) -> float:
    """vLLM without the plugin over the same chunks behind the same prefix, in batches as the job's."""
    chunker = Chunker.of_model(at.model, ChunkingConfig())
    chunks = list(dict.fromkeys(chunk.token_ids for text in texts for chunk in chunker.chunks(text)))
    batches: list[list[Prompt]] = [[]]
    size = 0
    for chunk in chunks:
        if size + len(chunk) > JobSpec.batch_tokens and batches[-1]:
            batches.append([])
            size = 0
        batches[-1].append(Prompt([0, *chunk], max_tokens=1))
        size += len(chunk)
    with LocalEngine.start(at.model, dtype="bfloat16", **at.engine) as engine:
        engine.generate([Prompt([0, *chunks[0]], max_tokens=1)])
        started_s = time.perf_counter()
        for batch in batches:
            engine.generate(batch)
            engine.reset_prefix_cache()
        return sum(map(len, chunks)) / (time.perf_counter() - started_s)


def throughput(quick: bool) -> list[Figure]:
    """Also the second run and the hits, which need the filled store."""
    with setting(quick) as at:
        texts = at.passages()
        say(f"plain vLLM on {at.shape}")
        plain = plain_tokens_per_s(at, texts)
        ensure_ray(1, 1.0)
        say("the job")
        first, first_s = timed_job(at.spec(), at.folder)
        say("the job again")
        second, second_s = timed_job(at.spec(), at.folder)
        os.utime(at.folder / "corpus.jsonl")
        _, reread_s = timed_job(at.spec(), at.folder)
        assert second.chunks_filled == 0
        hit = hit_rate(at, texts)
        ours = first.tokens_per_s
        detail = (
            f"{ours:.0f} and {plain:.0f} tokens/s; {first.chunks} chunks of {len(texts)} passages, {at.shape}"
        )
        again = (
            f"{first_s:.1f} s, then {second_s:.2f} s; {reread_s:.2f} s where the files have to be read again"
        )
        return [
            Figure.at_least(
                "throughput_vs_vllm", ours / plain, 0.9, detail=f"{detail}; engine start left out"
            ),
            Figure.at_least("second_run_speedup", first_s / second_s, 50, detail=again),
            Figure.at_least("hit_rate_after_job", hit, 1.0, unit="", detail="chunk tokens, spans given"),
        ]


def hit_rate(at: Setting, texts: list[str]) -> float:
    """Of chunk tokens in requests of up to six chunks each, over all chunks of the corpus."""
    chunker = Chunker.of_model(at.model, ChunkingConfig())
    chunks = [chunk.token_ids for text in texts for chunk in chunker.chunks(text)]
    chunks = list(dict.fromkeys(chunks))[: 12 if at.quick else 600]
    config = {
        "store": f"grpc://{at.address}",
        "lookup_deadline_ms": 30_000,
        "layer_deadline_ms": 30_000,
        "allow_uncalibrated": True,  # random weights: there is nothing to calibrate
    }
    asked = hit = 0
    with LocalEngine.start(at.model, extra_config=config, dtype="bfloat16", **at.engine) as engine:
        for first in range(0, len(chunks), 6):
            prompt, spans = [0], []
            for chunk in chunks[first : first + 6]:
                spans.append(Span(len(prompt), len(prompt) + len(chunk)))
                prompt += chunk
            params = KintsugiParams(NAMESPACE, spans=tuple(spans), ratio=0.0)
            (answer,) = engine.generate([Prompt([*prompt, 5, 6, 7], params, max_tokens=1)])
            asked += sum(span.num_tokens for span in spans)
            hit += (answer.accounting or {}).get("tokens_hit", 0)
    return hit / asked


def cpu_per_token(quick: bool) -> list[Figure]:
    """CPU of this process, Ray and the workers; the shard's is beside it, alike in both."""
    costs = {}
    for workers in (1, 2):
        with setting(quick) as at:
            at.passages()
            ensure_ray(2, 1.0)
            before = cpu_s()
            progress, _ = timed_job(at.spec(workers=workers, corpus=f"w{workers}"), at.folder)
            costs[workers] = (cpu_s() - before) / progress.tokens_filled
            say(f"{workers} workers: {costs[workers] * 1e3:.3f} CPU ms per token")
    detail = f"{costs[2] * 1e3:.3f} and {costs[1] * 1e3:.3f} CPU ms per token, engine starts included"
    return [Figure.at_most("cpu_per_token_2_workers", costs[2] / costs[1], 1.15, detail=detail)]


def cpu_s() -> float:
    """Of this process and all below it, ended ones that were waited for included."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return total + ended.ru_utime + ended.ru_stime


def memory(quick: bool) -> list[Figure]:
    """The driver's resident memory over a million short documents, nothing prefilled and nothing put."""
    count = 20_000 if quick else 1_000_000
    with setting(quick) as at:
        say(f"writing {count} documents")
        write_synthetic(at.folder / "synthetic", count)
        samples: dict[int, int] = {}

        def sample(progress: Progress) -> None:
            tenth = progress.documents * 10 // count
            if tenth not in samples:
                samples[tenth] = psutil.Process().memory_info().rss
                say(f"{progress.documents} documents: {samples[tenth] >> 20} MiB")

        ledger = Ledger(at.folder / "state")
        spec = at.spec(
            source=str(at.folder / "synthetic"),
            corpus="synthetic",
            chunking=ChunkingConfig(64),
            bytes_max=1 << 60,
        )
        factory = functools.partial(StubPrefiller, put=False)
        progress = Job(spec, ledger, factory=factory, on_progress=sample).run()
        assert progress.documents == count, progress
        end = psutil.Process().memory_info().rss
        early = samples[min(tenth for tenth in samples if tenth >= 1)]
        size = (at.folder / "state/ledger.sqlite").stat().st_size
        detail = (
            f"{early >> 20} to {end >> 20} MiB over {count} documents, {progress.chunks} chunks; prefill "
            f"stubbed out, nothing put; ledger {size >> 20} MiB; {progress.elapsed_s:.0f} s"
        )
        return [Figure.at_most("driver_memory_growth", end / early, 1.1, detail=detail)]


def write_synthetic(folder: Path, count: int) -> None:
    folder.mkdir()
    chance = random.Random(5)
    words = ["tide", "salt", "tea", "glass", "bridge", "honey", "press", "light", "stone", "wave"]
    per_file = 10_000
    for first in range(0, count, per_file):
        with (folder / f"{first:08}.jsonl").open("w") as file:
            for number in range(first, min(first + per_file, count)):
                text = f"Document {number}: " + " ".join(chance.choices(words, k=20))
                file.write(json.dumps({"id": str(number), "text": text}) + "\n")


def crashes(quick: bool) -> list[Figure]:
    from tests.simulation.test_precompute_crashes import run_crashes

    seeds = range(1) if quick else range(10)
    twice = absent = damaged = 0
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="kintsugi-bench-") as name:
            found = run_crashes(Path(name), seed)
            say(f"seed {seed}: {found}")
            twice, absent, damaged = twice + found[0], absent + found[1], damaged + found[2]
    detail = f"{len(seeds)} seeds, driver, worker and shard killed once each; prefill stubbed out, real puts"
    return [
        Figure.at_most("double_prefills", twice, 0, unit="", detail=detail),
        Figure.at_most("missing_or_invalid_chunks", absent + damaged, 0, unit="", detail=detail),
    ]


MEASURES: dict[str, Callable[[bool], list[Figure]]] = {
    "throughput": throughput,
    "crashes": crashes,
    "memory": memory,
    "cpu": cpu_per_token,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes; says nothing about speed")
    parser.add_argument("--only", nargs="*", choices=list(MEASURES), help="these measurements alone")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--child", choices=list(MEASURES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        figures = MEASURES[options.child](options.quick)
        print("FIGURES " + json.dumps([figure.__dict__ for figure in figures]))
        return
    found: list[Figure] = []
    for name in options.only or MEASURES:
        say(f"== {name}")
        command = [sys.executable, __file__, "--child", name, *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("FIGURES "))
        found += [Figure(**values) for values in json.loads(line.removeprefix("FIGURES "))]
    config = {"quick": options.quick, "cores": os.cpu_count()}
    report("precompute", config, found, "precompute" if options.save else None)


if __name__ == "__main__":
    main()
