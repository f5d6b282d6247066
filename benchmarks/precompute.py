"""Measures precompute jobs: their rate against vLLM's own prefill, repeated runs, crashes, a million
documents.

    python benchmarks/precompute.py [--quick] [--only FIGURE …] [--passages N] [--plain-every N] [--save]

Each figure runs in a process of its own: Ray, vLLM and what they keep end with it. `driver_memory_growth` and
`double_prefills` stub the prefill out; the others run vLLM. `--quick` uses tiny sizes and models: it shows
that the script works, not how fast anything is.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# By default a raylet gives its workers a niceness of 15: on a busy machine they would then get less
# CPU than plain vLLM.
os.environ.setdefault("RAY_worker_niceness", "0")

import psutil
from transformers import PreTrainedTokenizerFast

from benchmarks.support import found_tokens, musique, precompute_rates
from benchmarks.support.figures import Figure, report
from benchmarks.support.plain_prefill import PlainPrefill
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import Span
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.precompute.job import Job
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.pool import ensure_ray
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.spec import JobSpec, ModelFacts
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.fakes.stub_prefiller import StubPrefiller

NAMESPACE = "bench"


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def model_for_passages(shape: str, folder: Path) -> Path:
    """The random model with a tokenizer trained on the passages: its own knows other words, and would need
    about twice the tokens that real models' need."""
    checkpoint = make_checkpoint_once(shape)
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).symlink_to(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    trained = tokenizer.train_new_from_iterator(musique.passages(), len(tokenizer))
    for name in trained.save_pretrained(folder / "tokenizer"):
        (folder / Path(name).name).unlink(missing_ok=True)
        Path(name).rename(folder / Path(name).name)
    (folder / "tokenizer").rmdir()
    return folder


class Setting:
    """Sizes, a folder, and the shard that a figure runs against."""

    passages_max: int | None = None
    """Fewer than the figure's full number, for shorter runs."""
    plain_every = 1
    """Plain vLLM prefills the chunks of one in this many turns of the job. Spread over the whole run, they
    show its rate as well as all turns would, in less time."""

    def __init__(self, quick: bool, folder: Path, address: str, shape: str | None) -> None:
        self.quick = quick
        self.folder = folder
        self.address = address
        self.shape = shape or ("tiny-llama" if quick else "llama-210m")
        self.model = str(model_for_passages(self.shape, folder / "model"))
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

    def passages(self, count: int) -> list[str]:
        """Distinct passages of MuSiQue, written as the source; a few where it has to be quick."""
        texts = musique.passages()[: 32 if self.quick else min(count, self.passages_max or count)]
        rows = (json.dumps({"id": f"p{n}", "text": text}) for n, text in enumerate(texts))
        (self.folder / "corpus.jsonl").write_text("".join(row + "\n" for row in rows))
        return texts


@contextmanager
def setting(quick: bool, ssd: str = "4GiB", shape: str | None = None) -> Iterator[Setting]:
    """A shard in a process of its own: its CPU is not the driver's."""
    with tempfile.TemporaryDirectory(prefix="kintsugi-bench-") as name:
        folder = Path(name)
        sizes = ("64MiB", "512MiB") if quick else ("1GiB", ssd)
        command = [
            *(sys.executable, "-c", "from kintsugi.cli.commands.store import app; app()", "serve"),
            *("--listen", "127.0.0.1:0", "--data-dir", str(folder / "data")),
            *("--ram", sizes[0], "--ssd", f"{folder / 'ssd'}:{sizes[1]}"),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        shard = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert shard.stdout is not None
            ready = shard.stdout.readline().split()
            assert ready, "the shard did not start; its reason is above"
            yield Setting(quick, folder, ready[-1], shape)
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


def plain_batches(at: Setting, texts: list[str]) -> list[list[list[int]]]:
    """The job's chunks, in batches of the job's size."""
    chunker = Chunker.of_model(at.model, ChunkingConfig())
    batches: list[list[list[int]]] = [[]]
    size = 0
    for ids in dict.fromkeys(chunk.token_ids for text in texts for chunk in chunker.chunks(text)):
        if size + len(ids) > JobSpec.batch_tokens and batches[-1]:
            batches.append([])
            size = 0
        batches[-1].append(list(ids))
        size += len(ids)
    return batches


class Turns:
    """A job that runs and rests: what it does between `begin` and a rest is one turn.

    As the job's ``on_progress`` it pauses the job once it has given out batches: as many as its workers may
    have, where they do not finish one at once. When all of them are done, `at_rest` is called, on the job's
    thread, and the job goes on.
    """

    def __init__(self, at_rest: Callable[[Progress], None]) -> None:
        self.job: Job | None = None
        self.seconds = 0.0
        """Total time of all turns."""
        self._at_rest = at_rest
        self._begun_s = time.perf_counter()
        self._paused = False

    def __call__(self, progress: Progress) -> None:
        assert self.job is not None
        pool = self.job._pool
        if pool is None or progress.state is not State.RUNNING:
            return
        if not self._paused and pool.in_flight:
            self.job._next_batch_s = math.inf
            self._paused = True
        elif self._paused and not pool.in_flight:
            self.seconds += time.perf_counter() - self._begun_s
            self._at_rest(progress)
            self._paused = False
            self._begun_s = time.perf_counter()
            self.job._next_batch_s = 0.0

    def run(self, spec: JobSpec, folder: Path) -> Progress:
        """The whole job, rests included."""
        ledger = Ledger(folder / "state")
        self.job = Job(spec, ledger, on_progress=self)
        self._begun_s = time.perf_counter()
        progress = self.job.run()
        self.seconds += time.perf_counter() - self._begun_s
        ledger.close()
        assert progress.coverage == 1.0, progress.failures
        return progress


def throughput(quick: bool) -> list[Figure]:
    """Also the second run, which needs the filled store: 41 KB a token."""
    with setting(quick, ssd="30GiB") as at:
        texts = at.passages(1_000)
        ensure_ray(1)
        prefix = ModelFacts.of(at.spec()).space.prefix_token_ids
        arguments = {"dtype": "bfloat16", **at.engine}
        with PlainPrefill(at.model, arguments, prefix, plain_batches(at, texts)) as plain:
            numbers = itertools.count()

            def at_rest(progress: Progress) -> None:
                plain.turn(progress.tokens_filled, measured=next(numbers) % at.plain_every == 0)
                ours_s = turns.seconds - progress.engine_start_s
                say(f"{progress.tokens_filled} tokens: {ours_s:.1f} s, plain {plain.seconds:.1f} s")

            say(f"the job and plain vLLM on {at.shape}, by turns")
            turns = Turns(at_rest)
            first = turns.run(at.spec(), at.folder)
            plain.turn(first.tokens_filled, measured=at.plain_every == 1)
            ours = first.tokens_filled / (turns.seconds - first.engine_start_s)
            theirs = plain.tokens / plain.seconds
        say("the job again")
        second, second_s = timed_job(at.spec(), at.folder)
        assert second.chunks_filled == 0
        os.utime(at.folder / "corpus.jsonl")
        _, reread_s = timed_job(at.spec(), at.folder)
        detail = (
            f"{ours:.0f} and {theirs:.0f} tokens/s by turns, {first.tokens} and {plain.tokens} tokens; "
            f"{first.chunks} chunks of {len(texts)} passages, {at.shape}; reading, chunking, puts included, "
            "engine starts left out"
        )
        again = (
            f"{turns.seconds:.1f} s, then {second_s:.2f} s; {reread_s:.2f} s where the files have to be read "
            "again"
        )
        return [
            Figure.at_least("throughput_vs_vllm", ours / theirs, 0.9, detail=detail),
            Figure.at_least("second_run_speedup", turns.seconds / second_s, 50, detail=again),
        ]


def hits(quick: bool) -> list[Figure]:
    """The share of chunk tokens that requests find after a corpus's job. Runs on the tiny model: what a key
    finds does not depend on the model."""
    with setting(quick, shape="tiny-llama") as at:
        texts = at.passages(1_000)
        ensure_ray(1)
        progress, _ = timed_job(at.spec(), at.folder)
        asked = requests_of(at, texts)
        share = hit_rate(at, asked)
        shipped = parts_as_shipped(at, asked)
        detail = f"{progress.tokens} tokens in {progress.chunks} chunks of {len(texts)} passages, {at.shape}"
        told = f"each prompt asked twice in a row: {found_tokens.describe(shipped)}; {detail}"
        found = found_tokens.share_found(shipped)
        return [
            Figure.at_least("hit_rate_after_job", share, 0.999, unit="", detail=detail),
            Figure.at_least("hit_rate_as_shipped", found, 0.999, unit="", detail=told),
        ]


def requests_of(at: Setting, texts: list[str]) -> list[tuple[list[int], tuple[Span, ...]]]:
    """Prompts without their question, of up to six chunks each, over all chunks of the corpus."""
    chunker = Chunker.of_model(at.model, ChunkingConfig())
    chunks = list(dict.fromkeys(chunk.token_ids for text in texts for chunk in chunker.chunks(text)))
    requests = []
    for first in range(0, len(chunks), 6):
        prompt, spans = [0], []
        for chunk in chunks[first : first + 6]:
            spans.append(Span(len(prompt), len(prompt) + len(chunk)))
            prompt += chunk
        requests.append((prompt, tuple(spans)))
    return requests


def engine_beside(at: Setting, config: dict[str, object], **arguments: Any) -> LocalEngine:
    """An engine with long deadlines, so that a busy machine loses no chunk."""
    patient = {
        "store": f"grpc://{at.address}",
        "lookup_deadline_ms": 30_000,
        "layer_deadline_ms": 30_000,
        "quality": "off",  # random weights: there is nothing to calibrate
    }
    extra_config = {**patient, **config}
    return LocalEngine.start(at.model, extra_config=extra_config, dtype="bfloat16", **arguments, **at.engine)


def hit_rate(at: Setting, requests: list[tuple[list[int], tuple[Span, ...]]]) -> float:
    """The share of the requests' chunk tokens that are hit. Found chunks must be loaded: neither vLLM's
    prefix cache nor the loading controller may prevent it."""
    asked = hit = 0
    with engine_beside(at, {"loading_controller": False}, enable_prefix_caching=False) as engine:
        for prompt, spans in requests:
            params = KintsugiParams(NAMESPACE, spans=spans, ratio=0.0)
            (answer,) = engine.generate([Prompt([*prompt, 5, 6, 7], params, max_tokens=1)])
            asked += sum(span.num_tokens for span in spans)
            hit += (answer.accounting or {}).get("tokens_hit", 0)
    return hit / asked


def parts_as_shipped(at: Setting, requests: list[tuple[list[int], tuple[Span, ...]]]) -> Counter[str]:
    """Whether the requests' chunk tokens are hit with the default loading controller and prefix cache. Each
    prompt is sent twice in a row, with different questions."""
    parts: Counter[str] = Counter()
    with engine_beside(at, {}) as engine:
        for prompt, spans in requests:
            for question in ([5, 6, 7], [8, 9, 10]):
                params = KintsugiParams(NAMESPACE, spans=spans)
                (answer,) = engine.generate([Prompt([*prompt, *question], params, max_tokens=1)])
                parts += found_tokens.divide(spans, answer.accounting or {"outcome": "without accounting"})
    return parts


def cpu_per_token(quick: bool) -> list[Figure]:
    """CPU of everything: this process, Ray, the workers and the shard. Counted from the first rest on, when
    every worker's engine is up, to the last token."""
    costs = {}
    for workers in (1, 2):
        with setting(quick) as at:
            at.passages(200)
            ensure_ray(2)
            seen: list[tuple[int, float]] = []

            def at_rest(progress: Progress, seen: list[tuple[int, float]] = seen) -> None:
                seen.append((progress.tokens_filled, cpu_s()))

            batch_tokens = 512 if quick else 4096
            spec = at.spec(workers=workers, corpus=f"w{workers}", batch_tokens=batch_tokens)
            Turns(at_rest).run(spec, at.folder)
            (tokens, used_s), (tokens_end, used_end_s) = seen[0], seen[-1]
            costs[workers] = (used_end_s - used_s) / (tokens_end - tokens)
            say(f"{workers} workers: {costs[workers] * 1e3:.3f} CPU ms per token")
    detail = f"{costs[2] * 1e3:.3f} and {costs[1] * 1e3:.3f} CPU ms per token, engine starts left out"
    return [Figure.at_most("cpu_per_token_2_workers", costs[2] / costs[1], 1.15, detail=detail)]


def cpu_s() -> float:
    """CPU time of this process and all its descendants, including ended ones that were waited for."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


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
        cpu_before_s = time.process_time()
        progress = Job(spec, ledger, factory=factory, on_progress=sample).run()
        driver_s = time.process_time() - cpu_before_s
        assert progress.documents == count, progress
        end = psutil.Process().memory_info().rss
        early = samples[min(tenth for tenth in samples if tenth >= 1)]
        size = (at.folder / "state/ledger.sqlite").stat().st_size
        detail = (
            f"{early >> 20} to {end >> 20} MiB over {count} documents, {progress.chunks} chunks; prefill "
            f"stubbed out, nothing put; ledger {size >> 20} MiB; {progress.elapsed_s:.0f} s, of which "
            f"{driver_s / progress.chunks * 1e6:.0f} µs of the driver's CPU per chunk"
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

    seeds = range(1) if quick else range(6)
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


def rates(quick: bool) -> list[Figure]:
    """Has no bar: the estimate for a thousand workers (docs/PRECOMPUTE.md) uses these rates."""
    with setting(quick) as at:
        texts = at.passages(1_255)
        address = f"grpc://{at.address}"
        return precompute_rates.figures(at.folder, address, at.model, texts, 1_000 if quick else 20_000)


MEASURES: dict[str, Callable[[bool], list[Figure]]] = {
    "throughput": throughput,
    "hits": hits,
    "crashes": crashes,
    "memory": memory,
    "cpu": cpu_per_token,
    "rates": rates,
}
WITHOUT_PASSAGES = ("crashes",)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes; says nothing about speed")
    parser.add_argument("--only", nargs="*", choices=list(MEASURES), help="these measurements alone")
    parser.add_argument("--passages", type=int, help="maximum number; the bars are for 1,000")
    parser.add_argument("--plain-every", type=int, default=1, help="plain vLLM once in this many turns")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--child", choices=list(MEASURES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        Setting.passages_max, Setting.plain_every = options.passages, options.plain_every
        figures = MEASURES[options.child](options.quick)
        print("FIGURES " + json.dumps([figure.__dict__ for figure in figures]))
        return
    found: list[Figure] = []
    for name in musique.measurable(options.only or list(MEASURES), WITHOUT_PASSAGES):
        say(f"== {name}")
        command = [sys.executable, __file__, "--child", name, *(["--quick"] if options.quick else [])]
        command += ["--passages", str(options.passages)] if options.passages else []
        command += ["--plain-every", str(options.plain_every)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("FIGURES "))
        found += [Figure(**values) for values in json.loads(line.removeprefix("FIGURES "))]
    config = {"quick": options.quick, "cores": os.cpu_count(), "passages_max": options.passages}
    config["plain_every"] = options.plain_every
    part = "-" + "-".join(options.only) if options.only else ""
    report("precompute", config, found, f"precompute{part}" if options.save else None)


if __name__ == "__main__":
    main()
