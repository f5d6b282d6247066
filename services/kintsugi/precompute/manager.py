"""Jobs of one process: a bounded queue, one that runs, and those that ended lately."""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kintsugi.core.errors import KintsugiError, NotFound, ResourceExhausted, Unavailable
from kintsugi.precompute.job import Job
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.spec import JobSpec
from kintsugi.precompute.worker import EnginePrefiller, PrefillerFactory

log = logging.getLogger(__name__)

QUEUED_MAX = 64
KEPT_MAX = 256
"""Ended jobs that are still told about."""


@dataclass
class Entry:
    """One submitted job."""

    job_id: str
    spec: JobSpec
    dry: bool
    progress: Progress
    job: Job | None = None
    cancelled: bool = False
    paused: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    version: int = 0
    """Grows with every change."""


class JobManager:
    """Thread-safe. Jobs run one after another: workers are what a cluster has few of, not jobs."""

    def __init__(self, state: Path, factory: PrefillerFactory = EnginePrefiller) -> None:
        """``state``: the folder of the ledger. Raises what `Ledger` raises."""
        self.ledger = Ledger(state)
        self._factory = factory
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._queue: queue.Queue[Entry | None] = queue.Queue(QUEUED_MAX)
        self._thread = threading.Thread(target=self._run, name="kintsugi-precompute", daemon=True)
        self._thread.start()

    def submit(self, spec: JobSpec, dry: bool = False) -> Entry:
        """Raises `ResourceExhausted` where too many wait."""
        entry = Entry(uuid.uuid4().hex, spec, dry, Progress(corpus=spec.corpus_name, dry=dry))
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            raise ResourceExhausted(f"{QUEUED_MAX} jobs wait already; submit later, or cancel some") from None
        with self._lock:
            self._entries[entry.job_id] = entry
            ended = [e.job_id for e in self._entries.values() if e.progress.state.is_final]
            for job_id in ended[: max(0, len(ended) - KEPT_MAX)]:
                del self._entries[job_id]
        return entry

    def get(self, job_id: str) -> Entry:
        with self._lock:
            if job_id not in self._entries:
                raise NotFound(f"job {job_id!r} is not known here; List says which are")
            return self._entries[job_id]

    def list(self) -> list[Entry]:
        """The newest first."""
        with self._lock:
            return list(reversed(self._entries.values()))

    def cancel(self, job_id: str) -> Entry:
        """Takes effect once the batches that run are done; of one that ended already, nothing."""
        entry = self.get(job_id)
        entry.cancelled = True
        if entry.job is not None:
            entry.job.cancel()
        return entry

    def pause(self, job_id: str, paused: bool) -> Entry:
        entry = self.get(job_id)
        entry.paused = paused
        if entry.job is not None:
            (entry.job.pause if paused else entry.job.resume)()
        return entry

    def wait(self, entry: Entry, version: int, timeout_s: float) -> int:
        """The entry's version once it is another than `version`, or after the timeout."""
        with entry.changed:
            entry.changed.wait_for(lambda: entry.version != version, timeout_s)
            return entry.version

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            if entry.cancelled:
                entry.progress.state = State.CANCELLED
                _tell(entry, entry.progress)
                continue
            try:
                self._run_one(entry)
            except KintsugiError as error:
                self._failed(entry, f"{type(error).__name__}: {error}")
            except Exception as defect:
                log.exception("job %s broke", entry.job_id)
                self._failed(entry, f"defect: {type(defect).__name__}: {defect}")

    def _failed(self, entry: Entry, error: str) -> None:
        entry.progress.state, entry.progress.error = State.FAILED, error
        _tell(entry, entry.progress)

    def _run_one(self, entry: Entry) -> None:
        if entry.dry:
            survey(entry.spec, lambda progress: _tell(entry, progress), lambda job: self._started(entry, job))
            return
        job = Job(
            entry.spec,
            self.ledger,
            factory=self._factory,
            on_progress=lambda progress: _tell(entry, progress),
        )
        self._started(entry, job)
        job.run()

    def _started(self, entry: Entry, job: Job) -> None:
        entry.job = job
        if entry.paused:
            job.pause()
        if entry.cancelled:
            job.cancel()

    def close(self, timeout_s: float = 60.0) -> None:
        """Cancel everything and wait for what runs. Raises `Unavailable` where it does not end."""
        for entry in self.list():
            self.cancel(entry.job_id)
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            raise Unavailable("the job that runs does not end") from None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise Unavailable("the job that runs does not end; its workers finish a batch first")
        self.ledger.close()


def _tell(entry: Entry, progress: Progress) -> None:
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
