"""Jobs of one server: a bounded queue, one that runs, and those that ended lately; kept across restarts."""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kintsugi.core.errors import KintsugiError, NotFound, ResourceExhausted, Unavailable
from kintsugi.precompute.job import Job
from kintsugi.precompute.journal import Journal, JournalRecord
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.spec import JobSpec
from kintsugi.precompute.worker import EnginePrefiller, PrefillerFactory

log = logging.getLogger(__name__)

QUEUED_MAX = 64
KEPT_MAX = 256
"""Ended jobs that are still told about."""


@dataclass
class JobEntry:
    """One submitted job."""

    job_id: str
    spec: JobSpec
    dry: bool
    progress: Progress
    job: Job | None = None
    started: bool = False
    cancelled: bool = False
    paused: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    version: int = 0
    """Grows with every change."""

    @property
    def waits(self) -> bool:
        return not self.started and not self.progress.state.is_final


class JobManager:
    """Thread-safe. Jobs run one after another: workers are what a cluster has few of, not jobs.

    Every job is written down before it is answered for. A manager that opens the folder again, after `close`
    or a crash, lists what ended and goes on with the rest, in their order; what was paused stays so.
    """

    def __init__(self, state: Path, factory: PrefillerFactory = EnginePrefiller) -> None:
        """``state``: the folder of the ledger. Raises what `Ledger` and `Journal` raise."""
        self._journal = Journal(state)
        try:
            self.ledger = Ledger(state)
        except KintsugiError:
            self._journal.close()
            raise
        self._factory = factory
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, JobEntry] = OrderedDict()
        self._queue: queue.SimpleQueue[JobEntry | None] = queue.SimpleQueue()
        self._closing = False
        for line in self._journal.lines():
            self._take_up(line)
        self._thread = threading.Thread(target=self._run, name="kintsugi-precompute", daemon=True)
        self._thread.start()

    def _take_up(self, line: JournalRecord) -> None:
        entry = JobEntry(line.job_id, line.spec, line.dry, line.progress)
        entry.cancelled, entry.paused = line.cancelled, line.paused
        self._entries[line.job_id] = entry
        if line.cancelled and not line.progress.state.is_final:
            entry.progress.state = State.CANCELLED
        if entry.waits:
            entry.progress = Progress(corpus=line.spec.corpus_name, dry=line.dry)
            self._queue.put(entry)

    def submit(self, spec: JobSpec, dry: bool = False) -> JobEntry:
        """Raises `ResourceExhausted` where too many wait."""
        entry = JobEntry(uuid.uuid4().hex, spec, dry, Progress(corpus=spec.corpus_name, dry=dry))
        with self._lock:
            if sum(other.waits for other in self._entries.values()) >= QUEUED_MAX:
                raise ResourceExhausted(f"{QUEUED_MAX} jobs wait already; submit later, or cancel some")
            self._write(entry)
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
                raise NotFound(f"job {job_id!r} is not known here; List says which are")
            return self._entries[job_id]

    def list(self) -> list[JobEntry]:
        """The newest first."""
        with self._lock:
            return list(reversed(self._entries.values()))

    def cancel(self, job_id: str) -> JobEntry:
        """At once for one that waits; of one that runs, once its batches are done."""
        with self._lock:
            entry = self.get(job_id)
            if entry.progress.state.is_final:
                return entry
            entry.cancelled = True
            if entry.waits:
                _tell(entry, replace(entry.progress, state=State.CANCELLED))
            self._write(entry)
        if entry.job is not None:
            entry.job.cancel()
        return entry

    def pause(self, job_id: str, paused: bool) -> JobEntry:
        with self._lock:
            entry = self.get(job_id)
            entry.paused = paused
            self._write(entry)
        if entry.job is not None:
            (entry.job.pause if paused else entry.job.resume)()
        return entry

    def wait(self, entry: JobEntry, version: int, timeout_s: float) -> int:
        """The entry's version once it is another than `version`, or after the timeout."""
        with entry.changed:
            entry.changed.wait_for(lambda: entry.version != version, timeout_s)
            return entry.version

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            with self._lock:
                if not entry.waits or self._closing:
                    continue
                entry.started = True
            try:
                self._run_one(entry)
            except KintsugiError as error:
                self._mark_failed(entry, f"{type(error).__name__}: {error}")
            except Exception as defect:
                log.exception("job %s broke", entry.job_id)
                self._mark_failed(entry, f"defect: {type(defect).__name__}: {defect}")
            self._write_end(entry)

    def _mark_failed(self, entry: JobEntry, error: str) -> None:
        _tell(entry, replace(entry.progress, state=State.FAILED, error=error))

    def _write(self, entry: JobEntry) -> None:
        flags = (entry.dry, entry.paused, entry.cancelled)
        self._journal.write(JournalRecord(entry.job_id, entry.spec, *flags, progress=entry.progress))

    def _write_end(self, entry: JobEntry) -> None:
        """Not of a job that only stopped because we do: it goes on when we are back."""
        if entry.progress.state is State.CANCELLED and not entry.cancelled:
            return
        try:
            self._write(entry)
        except KintsugiError:
            # The job ran, and is told about; after a restart it would run again and find everything done.
            log.exception("the end of job %s could not be written down", entry.job_id)

    def _run_one(self, entry: JobEntry) -> None:
        if entry.dry:
            survey(
                entry.spec, lambda progress: _tell(entry, progress), lambda job: self._attach_job(entry, job)
            )
            return
        job = Job(
            entry.spec,
            self.ledger,
            factory=self._factory,
            on_progress=lambda progress: _tell(entry, progress),
        )
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
        """Stop the job that runs, wait for its batches, and keep the rest for the next manager. Raises
        `Unavailable` where it does not end. Idempotent."""
        with self._lock:
            self._closing = True
            running = [entry.job for entry in self._entries.values() if entry.job is not None]
        for job in running:
            job.cancel()
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise Unavailable("the job that runs does not end; its workers finish a batch first")
        self.ledger.close()
        self._journal.close()


def _tell(entry: JobEntry, progress: Progress) -> None:
    with entry.changed:
        entry.progress = progress
        entry.version += 1
        entry.changed.notify_all()


def survey(
    spec: JobSpec,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_start: Callable[[Job], None] = lambda job: None,
    dataset: Any = None,
) -> Progress:
    """What a job would find: chunks, bytes, what is resident and where. Nothing is kept, no engine starts."""
    with tempfile.TemporaryDirectory(prefix="kintsugi-survey-") as folder:
        ledger = Ledger(Path(folder))
        try:
            job = Job(spec, ledger, dataset=dataset, dry=True, on_progress=on_progress)
            on_start(job)
            return job.run()
        finally:
            ledger.close()
