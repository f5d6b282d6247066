"""Keeps submitted jobs on disk beside the ledger, so that a restarted server continues them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kintsugi.core.errors import KintsugiError
from kintsugi.core.schema import load
from kintsugi.precompute.database import Database, lock_state
from kintsugi.precompute.progress import Progress
from kintsugi.precompute.spec import JobSpec

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS job (
    number INTEGER PRIMARY KEY, job_id TEXT NOT NULL UNIQUE, spec TEXT NOT NULL, dry INTEGER NOT NULL,
    paused INTEGER NOT NULL, cancelled INTEGER NOT NULL, progress TEXT NOT NULL);
"""


@dataclass
class JournalRecord:
    """What the journal keeps of a job."""

    job_id: str
    spec: JobSpec
    dry: bool
    paused: bool = False
    cancelled: bool = False
    progress: Progress = field(default_factory=Progress)


class Journal:
    """The journal of a state folder. Thread-safe. Only one process may open it: two would run its jobs
    twice."""

    def __init__(self, folder: Path) -> None:
        """Open or create `folder`/jobs.sqlite. Raises what `Database` raises, and `Unavailable` if another
        process has opened it."""
        self._database = Database(folder / "jobs.sqlite", _SCHEMA, SCHEMA_VERSION)
        self._held = ExitStack()
        try:
            self._held.enter_context(
                lock_state(
                    folder / "jobs.lock",
                    f"another server runs the jobs of {folder}; stop it, or choose another --state",
                )
            )
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        self._database.close()
        self._held.close()

    def write(self, record: JournalRecord) -> None:
        """Add a job, or update its flags and progress."""
        with self._database.transaction() as db:
            db.execute(
                "INSERT INTO job (job_id, spec, dry, paused, cancelled, progress) VALUES (?,?,?,?,?,?)"
                " ON CONFLICT (job_id) DO UPDATE SET paused=excluded.paused, cancelled=excluded.cancelled,"
                " progress=excluded.progress",
                (
                    *(record.job_id, record.spec.to_json(), record.dry, record.paused, record.cancelled),
                    json.dumps(asdict(record.progress)),
                ),
            )

    def forget(self, job_ids: Sequence[str]) -> None:
        with self._database.transaction() as db:
            db.executemany("DELETE FROM job WHERE job_id=?", [(job_id,) for job_id in job_ids])

    def read(self) -> list[JournalRecord]:
        """All jobs, oldest first. A job of another version that cannot be read is logged and kept."""
        with self._database.open_read() as db:
            rows = db.execute(
                "SELECT job_id, spec, progress, dry, paused, cancelled FROM job ORDER BY number"
            ).fetchall()
        records = []
        for job_id, spec_json, progress_json, dry, paused, cancelled in rows:
            try:
                spec = load(JobSpec, json.loads(spec_json), "spec")
                progress = load(Progress, json.loads(progress_json), "progress")
            except KintsugiError as error:
                log.error("job %s was written by another version and is not run: %s", job_id, error)
                continue
            records.append(JournalRecord(job_id, spec, bool(dry), bool(paused), bool(cancelled), progress))
        return records
