"""Runs one job: reads documents, puts their chunks into the store, and deletes chunks that are no longer
used.

    scan ─▶ ledger (deduplicates) ─▶ store.tiers (skips stored chunks) ─▶ batches ─▶ pool of engines
                                                                                     └▶ outcomes

With `JobSpec.similar_contexts` chunks are looked up when the scan has ended, and missing ones are grouped by
similarity (`precompute.similar`).

Everything is streamed; the driver holds at most `QUEUED_BATCHES` per worker. To resume a job, run it again:
it looks up every chunk in the store and prefills only the missing ones, including the chunks of batches that
a crash interrupted.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    ResourceExhausted,
    Unavailable,
)
from kintsugi.core.spaces import ChunkKey
from kintsugi.precompute.batches import Batches, ChunkBatch, Settled
from kintsugi.precompute.chunking import Chunker
from kintsugi.precompute.ledger import Ledger, ScannedDocument
from kintsugi.precompute.ledger_chunks import PendingChunk
from kintsugi.precompute.pool import Outcome, Pool, ensure_ray
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.similar import SimilarChunks
from kintsugi.precompute.sources.files import list_source
from kintsugi.precompute.sources.readers import Failure
from kintsugi.precompute.sources.scan import ChunkTask, Scanned, scan
from kintsugi.precompute.spec import JobSpec, ModelFacts
from kintsugi.precompute.warm import delete_some_orphans, forget
from kintsugi.precompute.worker import EnginePrefiller, NotStarted, PrefillerFactory, WorkerSpec, durable_url
from kintsugi.store.client.registry import open_store

QUEUED_BATCHES = 4
"""Batches per worker that the driver may hold, in addition to the batches that the workers have."""
LOOKUP_CHUNKS = 256
"""Chunks of a block that are looked up in one call."""
FAILURES_SHOWN = 20
LEFT_OUT_LISTED = 1_000
"""Maximum number of left-out files that a report lists."""
STORE_PATIENCE_S = 600.0
"""Seconds that the store may be unavailable before the job fails. The next run continues."""
STORE_WAIT_S = (0.5, 1.0, 2.0, 5.0)
STRIKES_MAX = 8
"""Consecutive failed batches, per worker, after which the job fails: the cause is then in the workers, not in
the chunks."""
STARTS_FAILED_MAX = 3
"""Failed engine starts, over all workers, after which the job fails: each takes half a minute, and the next
would fail as well."""
WAIT_S = 0.2
DOCUMENTS_JUDGED = 200
"""The share of failures is checked after this many documents, and at the end."""


Answer = TypeVar("Answer")


class Cancelled(Exception):
    """The job was cancelled."""


class Job:
    """One run of a job. Call `run` in one thread; other threads may use `cancel` and `progress`."""

    def __init__(
        self,
        spec: JobSpec,
        ledger: Ledger,
        *,
        dry: bool = False,
        factory: PrefillerFactory = EnginePrefiller,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """``dry``: only look chunks up; this needs a separate ledger."""
        self.spec = spec
        self.facts = ModelFacts.of(spec)
        self.progress = Progress(
            corpus=spec.corpus_name, fingerprint=self.facts.space.fingerprint.hex, dry=dry
        )
        self._ledger = ledger
        self._dry = dry
        self._factory = factory
        self._on_progress = on_progress
        self._stop = threading.Event()
        self._batches = Batches(spec.batch_tokens)
        self._pool: Pool | None = None
        self._strikes = 0
        self._starts_failed = 0
        self._next_batch_s = 0.0
        self._text_chars = 0
        self._bytes_to_read = 0
        self._started_s = 0.0
        self._fill_started_s: float | None = None
        self._failed_urls: set[str] = set()
        self._left_out_urls: set[str] = set()

    def cancel(self) -> None:
        """End the job after its running batches. Running the same job again continues it."""
        self._stop.set()

    def run(self) -> Progress:
        """Run the job to its end. Raises the error that stopped it; a new run of the same job continues
        it."""
        self._started_s = time.monotonic()
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
            self._report_progress()
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
            spec = self.spec
            edition = self._ledger.open_edition(
                spec.corpus_name,
                self.facts.space,
                spec.source,
                spec.model,
                spec.chunking.identity,
                spec.plain_copies,
            )
            run = self._ledger.begin_run(edition, spec.workers)
            self._fill_store(edition, run)
            if not self._dry:
                self._delete_orphans()
                self._count_evicted(edition)
            self._check_failures(final=True)
            complete = self.progress.chunks_failed == 0
            if complete and self.spec.retire and not self._dry:
                old = self._ledger.find_replaced_editions(self.spec.corpus_name, edition)
                self.progress.chunks_invalidated += forget(self._ledger, self._store, old)
        finally:
            if self._pool is not None:
                self._pool.close()
            self._store.close()
            if run is not None:
                self._ledger.end_run(run, self.progress.tokens_filled, self.progress.fill_s, complete)

    def _check_model(self) -> None:
        """Raise `InvalidField` if the corpus has chunks of another model and `replace_model` is not set."""
        mine = self.facts.space.fingerprint.hex
        others = self._ledger.fingerprints(self.spec.corpus_name) - {mine}
        if others and not self.spec.replace_model and not self._dry:
            raise InvalidField(
                "model",
                f"has fingerprint {mine[:16]}, but corpus {self.spec.corpus_name!r} has chunks of "
                f"{min(others)[:16]}; use that model, or --replace-model to add the chunks of this one",
            )

    def _fill_store(self, edition: int, run: int) -> None:
        """Scan the source, and prefill and put every chunk that the store lacks."""
        clean: dict[str, str] = {}
        for block in self._scan_changed(edition, run, clean):
            self._record_block(edition, run, block)
        for url in self._failed_urls | self._left_out_urls:
            clean.pop(url, None)  # the next run reads the file again
        if self._left_out_urls and not self.progress.documents:
            self._check_failures(final=True)
            raise InvalidField("source", "has no document; " + _list_reasons(self.progress.left_out))
        self.progress.documents_vanished = self._ledger.end_scan(
            edition, run, clean, sorted(self._failed_urls)
        )
        if self.spec.similar_contexts:
            self._queue_after_similar(edition)
        else:
            for page in self._ledger.claim_unchecked(edition, run, self.facts.space.name_key):
                self._queue_missing(page)
        self.progress.share_read = 1.0
        while self._batches.num_tokens or (self._pool is not None and self._pool.in_flight):
            self._pump(flush=True)

    def _scan_changed(self, edition: int, run: int, clean: dict[str, str]) -> Iterator[list[Scanned]]:
        """Yield blocks of the files that have changed. Put the stamps of all files into `clean`."""
        spec = self.spec
        task = ChunkTask(spec.model_folder, spec.chunking, self.facts.space, spec.columns)
        listing = list_source(spec.source, spec.format)
        pieces = listing.pieces
        self._note_failures([Failure(url, 0, reason) for url, reason in listing.unlisted.items()])
        self._note_left_out([Failure(url, 0, reason) for url, reason in listing.left_out.items()])
        known = self._ledger.stamps(edition)
        clean.update({piece.url: piece.stamp for piece in pieces})
        unchanged = {url for url, stamp in clean.items() if stamp and known.get(url) == stamp}
        kept = self._ledger.keep_files(edition, run, sorted(unchanged))
        self.progress.documents += kept
        self.progress.documents_unchanged += kept
        changed = [piece for piece in pieces if piece.url not in unchanged]
        if not changed:
            return
        Chunker.of_model(spec.model, spec.chunking)  # raises its errors here, not inside a Ray task
        self._bytes_to_read = sum({piece.url: piece.size for piece in changed}.values())
        if self._dry:  # without Ray
            for piece in changed:
                yield from task.read_blocks(piece)
            return
        ensure_ray(spec.workers)
        yield from scan(changed, task)

    def _record_block(self, edition: int, run: int, block: Sequence[Scanned]) -> None:
        """Record one block of the scan in the ledger and queue its new chunks."""
        documents = [item for item in block if isinstance(item, ScannedDocument)]
        failures = [item for item in block if isinstance(item, Failure) and not item.left_out]
        self._note_left_out([item for item in block if isinstance(item, Failure) and item.left_out])
        space = self.facts.space
        recorded = self._ledger.record(edition, run, space.namespace, documents, space.name_key)
        progress = self.progress
        progress.documents += len(documents) - len(recorded.duplicates)
        progress.documents_unchanged += recorded.unchanged
        progress.chunks_listed += recorded.chunks
        self._note_failures([*failures, *recorded.duplicates])
        self._text_chars += sum(document.num_chars for document in documents)
        total = self._bytes_to_read
        progress.share_read = min(0.99, self._text_chars / total) if total else 0.0
        self._check_failures(final=False)
        fresh = [] if self.spec.similar_contexts else recorded.fresh
        for start in range(0, len(fresh), LOOKUP_CHUNKS):
            self._queue_missing(fresh[start : start + LOOKUP_CHUNKS])

    def _note_failures(self, failures: Sequence[Failure]) -> None:
        self.progress.documents_failed += len(failures)
        self._failed_urls.update(failure.url for failure in failures)
        self._show_failures(failures)

    def _note_left_out(self, files: Sequence[Failure]) -> None:
        self.progress.files_left_out += len(files)
        self._left_out_urls.update(file.url for file in files)
        self.progress.left_out += files[: max(0, LEFT_OUT_LISTED - len(self.progress.left_out))]

    def _show_failures(self, failures: Sequence[Failure]) -> None:
        room = FAILURES_SHOWN - len(self.progress.failures)
        self.progress.failures += failures[: max(0, room)]

    def _check_failures(self, final: bool) -> None:
        """Raise `InvalidField` if more than the allowed share of documents or chunks failed."""
        progress, share_max = self.progress, self.spec.errors_share_max
        for failed, total, what in (
            (progress.documents_failed, progress.documents + progress.documents_failed, "documents"),
            (progress.chunks_failed, progress.chunks, "chunks"),
        ):
            if total and failed > share_max * total and (final or total >= DOCUMENTS_JUDGED):
                raise InvalidField(
                    "source",
                    f"{failed} of {total} {what} failed, more than {share_max:.0%} "
                    f"({_list_reasons(progress.failures)}); fix or remove them, or allow more with "
                    "--errors-share. Stored chunks stay",
                )

    def _queue_after_similar(self, edition: int) -> None:
        """Queue the edition's missing chunks in groups, each after the passages that are most similar to
        it."""
        if not self._dry:
            self._delete_orphans()  # this also deletes the chunks that were prefilled after them
        with (
            tempfile.TemporaryDirectory(prefix="similar-", dir=self._ledger.folder) as folder,
            SimilarChunks(Path(folder) / "index.sqlite") as index,
        ):
            for page in self._ledger.chunks_of(edition, self.facts.space.name_key):
                index.add((number, copies[0].token_ids) for number, copies in page)
                numbers = {copies[0].key: number for number, copies in page}
                missing = self._find_missing([copy for _, copies in page for copy in copies])
                plain = [chunk for chunk in missing if chunk.key not in numbers]
                prepared = (chunk.key for chunk in missing if chunk.key in numbers)
                index.add_missing((numbers[key], key) for key in prepared)
                self._send(plain)
            if not self._dry:
                for group in index.take_groups():
                    self._send(group)

    def _queue_missing(self, chunks: Sequence[PendingChunk]) -> None:
        """Look the chunks up in the store and queue missing ones for the workers."""
        self._send(self._find_missing(chunks))

    def _find_missing(self, chunks: Sequence[PendingChunk]) -> list[PendingChunk]:
        """Look the chunks up in the store, count them, and return the missing ones. Raises
        `ResourceExhausted`."""
        tiers = self._look_up([chunk.key for chunk in chunks])
        if not self._dry:
            tiers = self._keep_present(chunks, tiers)
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
        self._report_progress()
        self._check_cancelled()
        if progress.bytes_total > self._bytes_max and missing and not self._dry:
            raise ResourceExhausted(
                f"the corpus needs more than the {self._bytes_max} bytes of the store; enlarge it, or "
                "precompute less. Stored chunks stay"
            )
        return missing

    def _send(self, missing: Sequence[PendingChunk]) -> None:
        """Queue chunks for the workers, and wait until few enough are queued."""
        if self._dry:
            return
        self._batches.add(missing)
        self._pump(flush=False)
        while self._batches.num_tokens > self.spec.batch_tokens * QUEUED_BATCHES * self.spec.workers:
            self._pump(flush=False)

    def _keep_present(self, chunks: Sequence[PendingChunk], tiers: Sequence[str | None]) -> list[str | None]:
        """Remove the lifetimes of stored chunks, because chunks that an engine discovered would expire.
        Return the tiers, with None for chunks that were evicted since they were looked up."""
        present = [chunk.key for chunk, tier in zip(chunks, tiers, strict=True) if tier is not None]
        if not present:
            return list(tiers)
        kept = self._wait_for_store(lambda: self._store.retain(self.spec.namespace, present))
        gone = {key for key, is_kept in zip(present, kept, strict=True) if not is_kept}
        return [None if chunk.key in gone else tier for chunk, tier in zip(chunks, tiers, strict=True)]

    def _look_up(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        """Return the fastest tier that holds each chunk; None for missing chunks."""
        return self._wait_for_store(lambda: self._store.tiers(self.spec.namespace, keys))

    def _wait_for_store(self, ask: Callable[[], Answer]) -> Answer:
        """Return the store's answer; retry for up to `STORE_PATIENCE_S` while the store is unavailable."""
        deadline_s = time.monotonic() + STORE_PATIENCE_S
        for wait_s in itertools.chain(STORE_WAIT_S, itertools.repeat(STORE_WAIT_S[-1])):
            try:
                return ask()
            except (Unavailable, DeadlineExceeded):
                self._check_cancelled()
                if time.monotonic() + wait_s > deadline_s:
                    raise
                self._stop.wait(wait_s)
        raise AssertionError  # the waits never end

    def _pump(self, flush: bool) -> None:
        """Send the batches that may be sent, wait up to `WAIT_S`, then process finished ones."""
        self._check_cancelled()
        pool = self._pool
        while self._may_send():
            batch = self._batches.take(flush)
            if batch is None:
                break
            pool = self._open_pool()
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
        self._report_progress()

    def _may_send(self) -> bool:
        room = self._pool is None or self._pool.has_room
        return room and time.monotonic() >= self._next_batch_s

    def _open_pool(self) -> Pool:
        if self._pool is None:
            spec = self.spec
            ensure_ray(spec.workers)
            url = durable_url(spec.store, self._store.stats().durable)
            space, layout, dtype = self.facts.space, self.facts.layout, self.facts.dtype
            worker = WorkerSpec(spec.model_folder, url, space, layout, dtype, spec.codec, spec.engine)
            self._pool = Pool(spec, worker, self._factory)
            self._fill_started_s = time.monotonic()
        return self._pool

    def _settle(self, batch: ChunkBatch, outcome: Outcome) -> None:
        progress = self.progress
        if outcome is None:
            progress.worker_deaths += 1
            self._count_strike(Unavailable("workers keep dying; check their logs and the machine's memory"))
            self._record_failed_chunks(self._batches.split_after_death(batch))
            return
        if isinstance(outcome, KintsugiError):
            self._batches.requeue(batch)
            if not isinstance(outcome, Unavailable | DeadlineExceeded):
                raise outcome
            if isinstance(outcome, NotStarted):
                self._starts_failed += 1
                if self._starts_failed >= STARTS_FAILED_MAX:
                    raise Unavailable(f"{outcome}; this was attempt {self._starts_failed}")
            self._count_strike(outcome)
            self._look_up([batch.chunks[0].key])  # waits until the store answers
            return
        settled = self._batches.settle_batch(batch, outcome)
        self._count_settled(settled)
        if settled.full:
            raise ResourceExhausted(f"the store is full: {settled.full}; stored chunks stay")
        if settled.foreign:
            raise InvalidField("model", f"the engine's chunk space differs from the job's: {settled.foreign}")
        if settled.retried:
            self._count_strike(Unavailable(f"the store did not accept {settled.retried} chunks"))
            self._look_up([batch.chunks[0].key])

    def _count_settled(self, settled: Settled) -> None:
        progress = self.progress
        tokens = sum(chunk.num_tokens for chunk in settled.filled)
        progress.chunks_filled += len(settled.filled)
        progress.tokens_filled += tokens
        progress.bytes_filled += self._bytes_of(settled.filled)
        progress.chunks_resident += len(settled.present)
        progress.chunks_missing -= len(settled.present)
        progress.tokens_missing -= sum(chunk.num_tokens for chunk in settled.present)
        self._record_failed_chunks(settled.failed)
        if settled.filled or settled.present:
            self._strikes = 0

    def _bytes_of(self, chunks: Sequence[PendingChunk]) -> int:
        """Return the stored size of the chunks. Most chunks of a corpus have the same length, so each length
        is computed once."""
        facts, sizes = self.facts, Counter(chunk.num_tokens for chunk in chunks)
        return sum(facts.layout.chunk_bytes(facts.codec, size) * count for size, count in sizes.items())

    def _record_failed_chunks(self, failed: Sequence[tuple[PendingChunk, str]]) -> None:
        self.progress.chunks_failed += len(failed)
        self._show_failures([Failure("", 0, reason, f"chunk {chunk.key}") for chunk, reason in failed])

    def _count_strike(self, error: KintsugiError) -> None:
        """Count a failed batch. Raises the error after too many consecutive ones."""
        self._strikes += 1
        if self._strikes > STRIKES_MAX * self.spec.workers:
            raise error

    def _check_cancelled(self) -> None:
        """If the job is cancelled, wait for its running batches and raise `Cancelled`."""
        if not self._stop.is_set():
            return
        while self._pool is not None and self._pool.in_flight:
            for batch, outcome in self._pool.wait(WAIT_S):
                if isinstance(outcome, list):
                    self._count_settled(self._batches.settle_batch(batch, outcome))
        raise Cancelled

    def _delete_orphans(self) -> None:
        """Delete chunks that no longer belong to a document of any corpus."""
        delete = functools.partial(delete_some_orphans, self._ledger, self._store, self.spec.namespace)
        while deleted := self._wait_for_store(delete):
            self.progress.chunks_invalidated += deleted

    def _count_evicted(self, edition: int) -> None:
        """Count the chunks that are missing at the end: a store that is too small evicts early chunks to
        store later ones."""
        if not self.progress.chunks_filled:
            return
        missing = 0
        for keys in self._ledger.keys(edition, self.facts.space.name_key):
            missing += self._look_up(keys).count(None)
            self._check_cancelled()
        self.progress.chunks_evicted = max(0, missing - self.progress.chunks_failed)

    def _report_progress(self) -> None:
        now_s = time.monotonic()
        self.progress.elapsed_s = now_s - self._started_s
        if self._fill_started_s is not None:
            start_s = self._pool.engine_start_s if self._pool is not None else 0.0
            self.progress.engine_start_s = start_s
            self.progress.fill_s = now_s - self._fill_started_s - start_s
        self._on_progress(
            replace(
                self.progress, failures=list(self.progress.failures), left_out=list(self.progress.left_out)
            )
        )


def _list_reasons(failures: Sequence[Failure]) -> str:
    return "; ".join(f"{one.document_id or one.url}: {one.reason}" for one in failures[:3])


def survey(spec: JobSpec, on_progress: Callable[[Progress], None] = lambda progress: None) -> Progress:
    """Return the progress that a job would report: chunks, bytes, and the resident chunks of each tier.
    Stores nothing and starts no engine."""
    with (
        tempfile.TemporaryDirectory(prefix="kintsugi-survey-") as folder,
        closing(Ledger(Path(folder))) as ledger,
    ):
        return Job(spec, ledger, dry=True, on_progress=on_progress).run()
