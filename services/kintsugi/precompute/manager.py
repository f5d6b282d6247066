"""Manages the jobs of a server: a bounded queue, one running job, and recently ended ones; survives
restarts."""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kintsugi.core.errors import KintsugiError, NotFound, ResourceExhausted, Unavailable
from kintsugi.precompute.job import Job
from kintsugi.precompute.journal import Journal, JournalRecord
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.policy import JobPolicy
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.sources.roots import EVERYWHERE, SourceRoots
from kintsugi.precompute.spec import JobSpec
from kintsugi.precompute.worker import EnginePrefiller, PrefillerFactory

log = logging.getLogger(__name__)

QUEUED_MAX = 64
KEPT_MAX = 256
"""Number of ended jobs that are still listed."""


@dataclass
class JobEntry(JournalRecord):
    """One submitted job. Every change of its progress replaces the object."""

    job: Job | None = None
    started: bool = False

    @property
    def is_waiting(self) -> bool:
        return not self.started and not self.progress.state.is_final


class JobManager:
    """Queues and runs jobs. Thread-safe. Jobs run one after another, because one job uses all workers.

    Every job is written to the journal before its submission is answered. A manager that opens the folder
    again, after `close` or a crash, lists the ended jobs and continues the others in their order; paused jobs
    stay paused.
    """

    def __init__(
        self, state: Path, factory: PrefillerFactory = EnginePrefiller, policy: JobPolicy | None = None
    ) -> None:
        """``state``: the folder of ledger and journal. ``policy``: what jobs may use; by default nothing.

        Raises what `Ledger` and `Journal` raise.
        """
        self._journal = Journal(state)
        try:
            self.ledger = Ledger(state)
        except KintsugiError:
            self._journal.close()
            raise
        self._factory = factory
        self._policy = policy or JobPolicy()
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, JobEntry] = OrderedDict()
        self._queue: queue.SimpleQueue[JobEntry | None] = queue.SimpleQueue()
        self._closing = False
        for record in self._journal.read():
            self._restore(record)
        self._thread = threading.Thread(target=self._run, name="kintsugi-precompute", daemon=True)
        self._thread.start()

    def _restore(self, record: JournalRecord) -> None:
        """List a job of the journal, and queue it unless it has ended."""
        entry = JobEntry(**vars(record))
        self._entries[entry.job_id] = entry
        if entry.cancelled and not entry.progress.state.is_final:
            entry.progress.state = State.CANCELLED
        if entry.is_waiting:
            entry.progress = Progress(corpus=entry.spec.corpus_name, dry=entry.dry)
            self._queue.put(entry)

    def submit(self, spec: JobSpec, dry: bool = False) -> JobEntry:
        """Queue a job. Raises `PermissionDenied` for what the policy does not offer, `ResourceExhausted` if
        too many are waiting."""
        self._policy.check(spec)
        progress = Progress(corpus=spec.corpus_name, dry=dry)
        entry = JobEntry(uuid.uuid4().hex, spec, dry, progress=progress)
        with self._lock:
            if sum(other.is_waiting for other in self._entries.values()) >= QUEUED_MAX:
                raise ResourceExhausted(f"{QUEUED_MAX} jobs are waiting; submit later, or cancel some")
            self._journal.write(entry)
            self._entries[entry.job_id] = entry
            ended = [e.job_id for e in self._entries.values() if e.progress.state.is_final]
            forgotten = ended[: max(0, len(ended) - KEPT_MAX)]
            self._journal.forget(forgotten)
            for job_id in forgotten:
                del self._entries[job_id]
        self._queue.put(entry)
        return entry

    def get(self, job_id: str) -> JobEntry:
        with self._lock:
            if job_id not in self._entries:
                raise NotFound(f"job {job_id!r} is not known; List returns the jobs that are")
            return self._entries[job_id]

    def namespaces_of(self, corpus: str) -> set[str]:
        """Namespaces that a corpus has chunks in, or will have."""
        with self._lock:
            coming = {
                entry.spec.namespace
                for entry in self._entries.values()
                if entry.spec.corpus_name == corpus and not entry.progress.state.is_final
            }
        return coming | {edition.namespace for edition in self.ledger.editions(corpus)}

    def list(self) -> list[JobEntry]:
        """All jobs, newest first."""
        with self._lock:
            return list(reversed(self._entries.values()))

    def cancel(self, job_id: str) -> JobEntry:
        """Cancel a job: a waiting one immediately, a running one once its running batches are done."""
        with self._lock:
            entry = self.get(job_id)
            if entry.progress.state.is_final:
                return entry
            entry.cancelled = True
            if entry.is_waiting:
                entry.progress = replace(entry.progress, state=State.CANCELLED)
            self._journal.write(entry)
        if entry.job is not None:
            entry.job.cancel()
        return entry

    def pause(self, job_id: str, paused: bool) -> JobEntry:
        with self._lock:
            entry = self.get(job_id)
            entry.paused = paused
            self._journal.write(entry)
        if entry.job is not None:
            (entry.job.pause if paused else entry.job.resume)()
        return entry

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            with self._lock:
                if not entry.is_waiting or self._closing:
                    continue
                entry.started = True
            try:
                self._run_one(entry)
            except KintsugiError as error:
                _mark_failed(entry, f"{type(error).__name__}: {error}")
            except Exception as defect:
                log.exception("job %s failed unexpectedly", entry.job_id)
                _mark_failed(entry, f"defect: {type(defect).__name__}: {defect}")
            self._write_end(entry)

    def _write_end(self, entry: JobEntry) -> None:
        """Write the final state, except of a job that only stopped because the manager closes: the next
        manager continues it."""
        if entry.progress.state is State.CANCELLED and not entry.cancelled:
            return
        try:
            self._journal.write(entry)
        except KintsugiError:
            # Clients still see the result; after a restart the job would run again and find everything done.
            log.exception("the end of job %s could not be written to the journal", entry.job_id)

    def _run_one(self, entry: JobEntry) -> None:
        on_progress = partial(setattr, entry, "progress")
        # Again: the journal may hold jobs of a server that offered more.
        spec, roots = self._policy.complete(entry.spec), self._policy.sources
        if entry.dry:
            survey(spec, on_progress, partial(self._attach_job, entry), roots=roots)
            return
        job = Job(spec, self.ledger, roots=roots, factory=self._factory, on_progress=on_progress)
        self._attach_job(entry, job)
        job.run()

    def _attach_job(self, entry: JobEntry, job: Job) -> None:
        with self._lock:
            entry.job = job
            if entry.paused:
                job.pause()
            if entry.cancelled or self._closing:
                job.cancel()

    def close(self, timeout_s: float = 60.0) -> None:
        """Stop the running job, wait for its batches, and leave the rest to the next manager. Raises
        `Unavailable` if the job does not end in time. Idempotent."""
        with self._lock:
            self._closing = True
            running = [entry.job for entry in self._entries.values() if entry.job is not None]
        for job in running:
            job.cancel()
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise Unavailable("the running job has not ended: its workers finish a batch first; close again")
        self.ledger.close()
        self._journal.close()


def _mark_failed(entry: JobEntry, error: str) -> None:
    entry.progress = replace(entry.progress, state=State.FAILED, error=error)


def survey(
    spec: JobSpec,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_start: Callable[[Job], None] = lambda job: None,
    dataset: Any = None,
    roots: SourceRoots = EVERYWHERE,
) -> Progress:
    """Find out what a job would do: chunks, bytes, and what is resident in which tier. Keeps nothing and
    starts no engine."""
    with (
        tempfile.TemporaryDirectory(prefix="kintsugi-survey-") as folder,
        closing(Ledger(Path(folder))) as ledger,
    ):
        job = Job(spec, ledger, dataset=dataset, dry=True, roots=roots, on_progress=on_progress)
        on_start(job)
        return job.run()
