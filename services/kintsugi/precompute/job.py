"""One job: the walk from documents to chunks in the store, and what is forgotten afterwards.

    scan ─▶ ledger (deduplicates) ─▶ store.tiers (drops what is there) ─▶ batches ─▶ pool of engines
                                                                                     └▶ outcomes

Everything is streamed; the driver holds `QUEUED_TOKENS` of work at most. Running a job again is how it is
resumed: the store is asked for every chunk, so only what is missing is prefilled, and a batch that a crash
interrupted is asked for again.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    ResourceExhausted,
    Unavailable,
)
from kintsugi.precompute.batches import Batches, ChunkBatch, Settled
from kintsugi.precompute.chunking import Chunker
from kintsugi.precompute.ledger import Ledger, PendingChunk, ScannedDocument
from kintsugi.precompute.pool import Outcome, Pool, ensure_ray
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.sources.files import FileRange, listed
from kintsugi.precompute.sources.readers import Failure, read
from kintsugi.precompute.sources.scan import ChunkTask, Scanned, scan
from kintsugi.precompute.spec import JobSpec, ModelFacts
from kintsugi.precompute.warm import delete_some_orphans, forget
from kintsugi.precompute.worker import EnginePrefiller, NotStarted, PrefillerFactory, WorkerSpec, durable
from kintsugi.store.client.registry import open_store

QUEUED_BATCHES = 4
"""Batches per worker that wait on the driver, beside those that the workers have."""
FAILURES_SHOWN = 20
STORE_PATIENCE_S = 600.0
"""How long a store may be away before the job ends; the next run goes on."""
STORE_WAIT_S = (0.5, 1.0, 2.0, 5.0)
STRIKES_MAX = 8
"""Batches in a row that no worker finished: then the workers are at fault, not the chunks."""
STARTS_FAILED_MAX = 3
"""Engines that did not start, of all workers: each costs half a minute, and the next one says the same."""
WAIT_S = 0.2
DOCUMENTS_JUDGED = 200
"""The share of failures is first judged after so many documents, and at the end."""


Answer = TypeVar("Answer")


class Cancelled(Exception):
    """The job was told to stop."""


class Job:
    """`run` it in one thread; `pause`, `resume`, `cancel` and `progress` work from any other."""

    def __init__(
        self,
        spec: JobSpec,
        ledger: Ledger,
        *,
        dataset: Any = None,
        dry: bool = False,
        factory: PrefillerFactory = EnginePrefiller,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """``dataset``: a `ray.data.Dataset` instead of the files of `spec.source`. ``dry``: only look; give
        it a ledger of its own."""
        self.spec = spec
        self.facts = ModelFacts.of(spec)
        self.progress = Progress(
            corpus=spec.corpus_name, fingerprint=self.facts.space.fingerprint.hex, dry=dry
        )
        self._ledger = ledger
        self._dataset = dataset
        self._dry = dry
        self._factory = factory
        self._on_progress = on_progress
        self._go_on = threading.Event()
        self._go_on.set()
        self._stop = threading.Event()
        self._batches = Batches(spec.batch_tokens)
        self._pool: Pool | None = None
        self._strikes = 0
        self._starts_failed = 0
        self._next_batch_s = 0.0
        self._text_bytes = 0
        self._bytes_to_read = 0
        self._started_s = 0.0
        self._fill_started_s: float | None = None
        self._failed_urls: set[str] = set()

    def pause(self) -> None:
        """Send no more batches. Those that run finish."""
        self._go_on.clear()

    def resume(self) -> None:
        self._go_on.set()

    def cancel(self) -> None:
        """End once the batches that run are done. The same job again goes on from there."""
        self._stop.set()

    def run(self) -> Progress:
        """Do all of it. Raises what went wrong, after which the same job can be run again."""
        self._started_s = time.monotonic()
        self.progress.state = State.RUNNING
        try:
            with self._ledger.exclusive(self.spec.corpus_name):
                self._run()
            self.progress.state = State.DONE
        except Cancelled:
            self.progress.state = State.CANCELLED
        except KintsugiError as error:
            self.progress.state, self.progress.error = State.FAILED, f"{type(error).__name__}: {error}"
            raise
        finally:
            self._tell()
        return self.progress

    def _run(self) -> None:
        self._store = open_store(self.spec.store)
        run: int | None = None
        complete = False
        try:
            stats = self._store.stats()
            self.progress.bytes_free = max(0, stats.bytes_capacity - stats.bytes_used)
            self._bytes_max = self.spec.bytes_max or stats.bytes_capacity
            self._check_model()
            edition = self._open_edition()
            run = self._ledger.begin_run(edition, self.spec.workers)
            self._walk(edition, run)
            if not self._dry:
                self._invalidate()
                self._look_again(edition)
            self._judge(final=True)
            complete = self.progress.chunks_failed == 0
            if complete and self.spec.retire and not self._dry:
                old = self._ledger.replaced(self.spec.corpus_name, edition)
                self.progress.chunks_invalidated += forget(self._ledger, self._store, old)
        finally:
            if self._pool is not None:
                self._pool.close()
            self._store.close()
            if run is not None:
                self._ledger.end_run(run, self.progress.tokens_filled, self.progress.fill_s, complete)

    def _check_model(self) -> None:
        """A corpus is filled for one model at a time, unless told otherwise."""
        mine = self.facts.space.fingerprint.hex
        others = self._ledger.fingerprints(self.spec.corpus_name) - {mine}
        if others and not self.spec.replace_model and not self._dry:
            raise InvalidField(
                "model",
                f"has fingerprint {mine[:16]}, but corpus {self.spec.corpus_name!r} is filled for "
                f"{min(others)[:16]}; name that model, or say --replace-model to fill this one beside it",
            )

    def _open_edition(self) -> int:
        spec = self.spec
        return self._ledger.open_edition(
            spec.corpus_name, self.facts.space, spec.source, spec.model, spec.chunking.identity
        )

    def _walk(self, edition: int, run: int) -> None:
        clean: dict[str, str] = {}
        for block in self._blocks(edition, run, clean):
            self._take(edition, run, block)
        for url in self._failed_urls:
            clean.pop(url, None)
        self.progress.documents_vanished = self._ledger.end_scan(
            edition, run, clean, sorted(self._failed_urls)
        )
        for page in self._ledger.unchecked(edition, run):
            self._offer(page)
        self.progress.share_read = 1.0
        while self._batches.num_tokens or (self._pool is not None and self._pool.in_flight):
            self._pump(flush=True)

    def _blocks(self, edition: int, run: int, clean: dict[str, str]) -> Iterator[list[Scanned]]:
        """What has to be read; files that are as they were are not. Fills `clean` with all files' stamps."""
        spec = self.spec
        task = ChunkTask(spec.model_folder, spec.chunking, self.facts.space, spec.columns)
        if self._dataset is not None:
            ensure_ray(spec.workers, spec.cpus_per_worker)
            yield from scan(self._dataset, task, spec.source)
            return
        listing = listed(spec.source, spec.format)
        pieces = listing.pieces
        self._note_failures(run, [Failure(url, 0, reason) for url, reason in listing.unlisted.items()])
        known = self._ledger.stamps(edition)
        clean.update({piece.url: piece.stamp for piece in pieces})
        unchanged = {url for url, stamp in clean.items() if stamp and known.get(url) == stamp}
        kept = self._ledger.keep_files(edition, run, sorted(unchanged))
        self.progress.documents += kept
        self.progress.documents_unchanged += kept
        changed = [piece for piece in pieces if piece.url not in unchanged]
        if not changed:
            return
        self._peek(changed[0])
        Chunker.of_model(spec.model, spec.chunking)  # here its error is a plain one
        self._bytes_to_read = sum({piece.url: piece.size for piece in changed}.values())
        ensure_ray(spec.workers, spec.cpus_per_worker)
        yield from scan(changed, task)

    def _peek(self, piece: FileRange) -> None:
        """A column that is not there is a mistake in the job, not in a document."""
        first = next(read(piece, self.spec.columns), None)
        if isinstance(first, Failure) and first.reason.startswith("no column"):
            raise InvalidField(
                "columns.text", f"{piece.url}: {first.reason}; say which one is the text (--text-column)"
            )

    def _take(self, edition: int, run: int, block: Sequence[Scanned]) -> None:
        """One block of the scan into the ledger; its new chunks on to the store."""
        documents = [item for item in block if isinstance(item, ScannedDocument)]
        failures = [item for item in block if isinstance(item, Failure)]
        recorded = self._ledger.record(edition, run, self.spec.namespace, documents)
        progress = self.progress
        progress.documents += len(documents) - len(recorded.duplicates)
        progress.documents_unchanged += recorded.unchanged
        progress.chunks_listed += recorded.chunks
        self._note_failures(run, [*failures, *recorded.duplicates])
        self._text_bytes += sum(document.chunks[-1].stop for document in documents if document.chunks)
        total = self._bytes_to_read
        progress.share_read = min(0.99, self._text_bytes / total) if total else 0.0
        self._judge(final=False)
        size = 256
        for start in range(0, len(recorded.fresh), size):
            self._offer(recorded.fresh[start : start + size])

    def _note_failures(self, run: int, failures: Sequence[Failure]) -> None:
        self.progress.documents_failed += len(failures)
        self._failed_urls.update(failure.url for failure in failures)
        room = FAILURES_SHOWN - len(self.progress.failures)
        self.progress.failures += failures[: max(0, room)]
        if failures:
            self._ledger.note_failures(run, failures)

    def _judge(self, final: bool) -> None:
        """Raise `InvalidField` past the share of failures that the job allows."""
        progress, share_max = self.progress, self.spec.errors_share_max
        for failed, total, what in (
            (progress.documents_failed, progress.documents + progress.documents_failed, "documents"),
            (progress.chunks_failed, progress.chunks, "chunks"),
        ):
            if total and failed > share_max * total and (final or total >= DOCUMENTS_JUDGED):
                reasons = "; ".join(
                    f"{failure.document_id or failure.url}: {failure.reason}"
                    for failure in progress.failures[:3]
                )
                raise InvalidField(
                    "source", f"{failed} of {total} {what} failed, more than {share_max:.0%} ({reasons})"
                )

    def _offer(self, chunks: Sequence[PendingChunk]) -> None:
        """Ask the store for them; what it lacks waits for a worker."""
        tiers = self._patiently(
            lambda: self._store.tiers(self.spec.namespace, [chunk.key for chunk in chunks])
        )
        progress = self.progress
        missing = [chunk for chunk, tier in zip(chunks, tiers, strict=True) if tier is None]
        for tier in filter(None, tiers):
            progress.tiers[tier] = progress.tiers.get(tier, 0) + 1
        tokens, lacking = (sum(chunk.num_tokens for chunk in part) for part in (chunks, missing))
        progress.chunks += len(chunks)
        progress.chunks_resident += len(chunks) - len(missing)
        progress.chunks_missing += len(missing)
        progress.tokens += tokens
        progress.tokens_missing += lacking
        progress.bytes_total += self._bytes_of(chunks)
        progress.bytes_missing += self._bytes_of(missing)
        self._tell()
        if self._dry:
            self._obey()
            return
        if progress.bytes_total > self._bytes_max and missing:
            raise ResourceExhausted(
                f"the corpus needs more than the {self._bytes_max} bytes that it may take; give the store "
                "more room, raise --bytes-max, or precompute less. What is stored stays"
            )
        self._batches.add(missing)
        self._pump(flush=False)
        while self._batches.num_tokens > self.spec.batch_tokens * QUEUED_BATCHES * self.spec.workers:
            self._pump(flush=False)

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        """The store's answer, waiting for one that is away."""
        deadline_s = time.monotonic() + STORE_PATIENCE_S
        for wait_s in itertools.chain(STORE_WAIT_S, itertools.repeat(STORE_WAIT_S[-1])):
            try:
                return ask()
            except (Unavailable, DeadlineExceeded):
                self._obey()
                if time.monotonic() + wait_s > deadline_s:
                    raise
                self._stop.wait(wait_s)
        raise AssertionError  # the waits never end

    def _pump(self, flush: bool) -> None:
        """Send what may be sent, then take what is finished, waiting a moment for it."""
        self._obey()
        pool = self._pool
        while self._may_send():
            batch = self._batches.take(flush)
            if batch is None:
                break
            pool = self._ready_pool()
            pool.submit(batch)
            rate = self.spec.tokens_per_s_max
            if rate:
                self._next_batch_s = max(self._next_batch_s, time.monotonic()) + batch.num_tokens / rate
        if pool is None or not pool.in_flight:
            if self._batches.num_tokens and not self._may_send():
                self._stop.wait(WAIT_S)
        else:
            room = pool.has_room and not flush and self._batches.num_tokens < self.spec.batch_tokens
            for batch, outcome in pool.wait(0.0 if room else WAIT_S):
                self._settle(batch, outcome)
        self._tell()

    def _may_send(self) -> bool:
        room = self._pool is None or self._pool.has_room
        return room and self._go_on.is_set() and time.monotonic() >= self._next_batch_s

    def _ready_pool(self) -> Pool:
        if self._pool is None:
            spec = self.spec
            ensure_ray(spec.workers, spec.cpus_per_worker)
            url = durable(spec.store, self._store.stats().durable)
            worker = WorkerSpec(
                spec.model_folder,
                url,
                self.facts.space,
                self.facts.layout,
                self.facts.dtype,
                spec.codec,
                spec.engine,
            )
            self._pool = Pool(spec, worker, self._factory)
            self._fill_started_s = time.monotonic()
        return self._pool

    def _settle(self, batch: ChunkBatch, outcome: Outcome) -> None:
        progress = self.progress
        if outcome is None:
            progress.worker_deaths += 1
            self._strike(Unavailable("workers die one after another; look into their log, or at memory"))
            self._fail(self._batches.split_after_death(batch))
            return
        if isinstance(outcome, KintsugiError):
            self._batches.returned(batch)
            if not isinstance(outcome, Unavailable | DeadlineExceeded):
                raise outcome
            if isinstance(outcome, NotStarted):
                self._starts_failed += 1
                if self._starts_failed >= STARTS_FAILED_MAX:
                    raise Unavailable(f"{outcome}; this was try {self._starts_failed}")
            self._strike(outcome)
            self._patiently(lambda: self._store.tiers(self.spec.namespace, [batch.chunks[0].key]))
            return
        settled = self._batches.finished(batch, outcome)
        self._count(settled)
        if settled.full:
            raise ResourceExhausted(f"the store takes no more: {settled.full}; what is stored stays")
        if settled.foreign:
            raise InvalidField(
                "model", f"the engine's chunk space is another than the job's: {settled.foreign}"
            )
        if settled.retried:
            self._strike(Unavailable(f"the store did not take {settled.retried} chunks"))
            self._patiently(lambda: self._store.tiers(self.spec.namespace, [batch.chunks[0].key]))

    def _count(self, settled: Settled) -> None:
        progress = self.progress
        tokens = sum(chunk.num_tokens for chunk in settled.filled)
        progress.chunks_filled += len(settled.filled)
        progress.tokens_filled += tokens
        progress.bytes_filled += self._bytes_of(settled.filled)
        progress.chunks_resident += len(settled.present)
        progress.chunks_missing -= len(settled.present)
        progress.tokens_missing -= sum(chunk.num_tokens for chunk in settled.present)
        self._fail(settled.failed)
        if settled.filled or settled.present:
            self._strikes = 0

    def _bytes_of(self, chunks: Sequence[PendingChunk]) -> int:
        """As they are stored. Most chunks of a corpus are equally long."""
        sizes = Counter(chunk.num_tokens for chunk in chunks)
        return sum(self.facts.chunk_bytes(size) * count for size, count in sizes.items())

    def _fail(self, failed: Sequence[tuple[PendingChunk, str]]) -> None:
        self.progress.chunks_failed += len(failed)
        room = max(0, FAILURES_SHOWN - len(self.progress.failures))
        self.progress.failures += [
            Failure("", 0, reason, f"chunk {chunk.key}") for chunk, reason in failed[:room]
        ]

    def _strike(self, error: KintsugiError) -> None:
        self._strikes += 1
        if self._strikes > STRIKES_MAX * self.spec.workers:
            raise error

    def _obey(self) -> None:
        """Raise `Cancelled` where told to stop and nothing runs any more."""
        paused = not self._go_on.is_set()
        if self.progress.state in (State.RUNNING, State.PAUSED):
            self.progress.state = State.PAUSED if paused else State.RUNNING
        if not self._stop.is_set():
            return
        while self._pool is not None and self._pool.in_flight:
            for batch, outcome in self._pool.wait(WAIT_S):
                if isinstance(outcome, list):
                    self._count(self._batches.finished(batch, outcome))
        raise Cancelled

    def _invalidate(self) -> None:
        """Delete chunks that no document of any corpus has any more, and only those."""
        some = functools.partial(delete_some_orphans, self._ledger, self._store, self.spec.namespace)
        while deleted := self._patiently(some):
            self.progress.chunks_invalidated += deleted

    def _look_again(self, edition: int) -> None:
        """A store that is too small evicts the first chunks for the last ones: count what is gone."""
        if not self.progress.chunks_filled:
            return
        missing = 0
        for keys in self._ledger.keys(edition):
            asked = functools.partial(self._store.tiers, self.spec.namespace, keys)
            missing += self._patiently(asked).count(None)
            self._obey()
        self.progress.chunks_evicted = max(0, missing - self.progress.chunks_failed)

    def _tell(self) -> None:
        now_s = time.monotonic()
        self.progress.elapsed_s = now_s - self._started_s
        if self._fill_started_s is not None:
            start_s = self._pool.engine_start_s if self._pool is not None else 0.0
            self.progress.engine_start_s = start_s
            self.progress.fill_s = now_s - self._fill_started_s - start_s
        self._on_progress(replace(self.progress, failures=list(self.progress.failures)))
