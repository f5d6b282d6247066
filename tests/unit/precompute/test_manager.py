"""Jobs across restarts of their server. The jobs themselves are stand-ins: see `StubJob`."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.core.errors import NotFound, ResourceExhausted, Unavailable
from kintsugi.precompute import manager as manager_module
from kintsugi.precompute.journal import Journal
from kintsugi.precompute.manager import JobEntry, JobManager
from kintsugi.precompute.policy import JobPolicy
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.sources.readers import Failure
from kintsugi.precompute.sources.roots import EVERYWHERE
from kintsugi.precompute.spec import JobSpec

POLICY = JobPolicy(EVERYWHERE, models=("model",), stores=("grpc://127.0.0.1:1",))


class StubJob:
    """Runs until it is cancelled, or, for corpora that are to end, not at all."""

    ran: list[str]

    def __init__(self, spec: JobSpec, ledger: object, *, on_progress: Callable[[Progress], None], **_: Any):
        self.spec, self.on_progress = spec, on_progress
        self.stopped = threading.Event()
        self.paused = False

    def cancel(self) -> None:
        self.stopped.set()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def run(self) -> None:
        self.ran.append(self.spec.corpus)
        if self.spec.corpus.startswith("broken"):
            raise NotFound("it is not there")
        failures = [Failure("u", 3, "bad", "d")]
        progress = Progress(corpus=self.spec.corpus, state=State.RUNNING, documents=7, failures=failures)
        self.on_progress(progress)
        if not self.spec.corpus.startswith("short"):
            assert self.stopped.wait(30)
            progress.state = State.CANCELLED
        else:
            progress.state = State.DONE
        self.on_progress(progress)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(manager_module, "Job", StubJob)
    StubJob.ran = []
    return StubJob.ran


@pytest.fixture
def opened(tmp_path: Path, ran: list[str]) -> Iterator[Callable[[], JobManager]]:
    """Managers of one folder, closed in the end."""
    managers: list[JobManager] = []

    def open_one() -> JobManager:
        managers.append(JobManager(tmp_path, policy=POLICY))
        return managers[-1]

    yield open_one
    for manager in managers:
        manager.close()


def spec(corpus: str) -> JobSpec:
    return JobSpec("src", "model", "grpc://127.0.0.1:1", "acme", corpus=corpus)


def reached(manager: JobManager, entry: JobEntry, state: State) -> None:
    """Wait until the job is in that state."""
    deadline_s = time.monotonic() + 30
    while manager.get(entry.job_id).progress.state is not state:
        assert time.monotonic() < deadline_s, entry.progress
        time.sleep(0.005)


def states(manager: JobManager) -> dict[str, str]:
    return {entry.spec.corpus: entry.progress.state.value for entry in reversed(manager.list())}


def test_jobs_outlive_their_server(opened: Callable[[], JobManager], ran: list[str]) -> None:
    first = opened()
    reached(first, first.submit(spec("short-a")), State.DONE)
    reached(first, first.submit(spec("broken-b")), State.FAILED)
    running = first.submit(spec("c"))
    first.submit(spec("short-d"))
    first.cancel(first.submit(spec("e")).job_id)
    reached(first, running, State.RUNNING)
    first.close()

    second = opened()
    again = second.get(running.job_id)
    reached(second, again, State.RUNNING)
    assert list(states(second).items()) == [
        ("short-a", "done"),
        ("broken-b", "failed"),
        ("c", "running"),
        ("short-d", "queued"),
        ("e", "cancelled"),
    ]
    assert ran == ["short-a", "broken-b", "c", "c"]
    (_, _, _, broken, done) = second.list()
    assert broken.progress.error == "NotFound: it is not there"
    assert done.progress.documents == 7
    assert done.progress.failures == [Failure("u", 3, "bad", "d")]
    second.cancel(running.job_id)
    reached(second, second.list()[1], State.DONE)
    second.close()
    third = opened()
    assert states(third)["c"] == "cancelled", "what a person cancelled does not come back"


def test_a_paused_job_comes_back_paused(opened: Callable[[], JobManager]) -> None:
    first = opened()
    entry = first.submit(spec("a"))
    reached(first, entry, State.RUNNING)
    first.pause(entry.job_id, True)
    first.close()
    second = opened()
    again = second.get(entry.job_id)
    reached(second, again, State.RUNNING)
    assert again.job is not None
    assert again.job.paused  # type: ignore[attr-defined]


def test_a_crash_forgets_no_job(opened: Callable[[], JobManager], tmp_path: Path) -> None:
    """What lies on disk while a job runs is what a server that was killed leaves behind."""
    first = opened()
    running = first.submit(spec("a"))
    reached(first, running, State.RUNNING)
    waiting = first.submit(spec("b"))
    with sqlite3.connect(f"file:{tmp_path / 'jobs.sqlite'}?mode=ro", uri=True) as db:
        kept = [
            job_id for (job_id,) in db.execute("SELECT job_id FROM job WHERE cancelled=0 ORDER BY number")
        ]
    db.close()
    assert kept == [running.job_id, waiting.job_id]


def test_one_server_per_folder(opened: Callable[[], JobManager], tmp_path: Path) -> None:
    opened()
    with pytest.raises(Unavailable, match="another server"):
        JobManager(tmp_path)


def test_a_job_that_waits_is_cancelled_at_once_and_frees_its_place(
    opened: Callable[[], JobManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "QUEUED_MAX", 1)
    manager = opened()
    reached(manager, manager.submit(spec("a")), State.RUNNING)
    waiting = manager.submit(spec("b"))
    with pytest.raises(ResourceExhausted, match="cancel some"):
        manager.submit(spec("c"))
    assert manager.cancel(waiting.job_id).progress.state is State.CANCELLED
    assert manager.submit(spec("c")).progress.state is State.QUEUED


def test_old_ended_jobs_are_forgotten_on_disk_too(
    opened: Callable[[], JobManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "KEPT_MAX", 2)
    manager = opened()
    for number in range(4):
        reached(manager, manager.submit(spec(f"short-{number}")), State.DONE)
    manager.close()
    assert list(states(opened())) == ["short-1", "short-2", "short-3"]


def test_a_line_of_another_version_is_left_alone(
    opened: Callable[[], JobManager], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = opened()
    reached(manager, manager.submit(spec("short-a")), State.DONE)
    manager.close()
    with sqlite3.connect(tmp_path / "jobs.sqlite") as db:
        db.execute("UPDATE job SET spec='{\"sauce\": 1}'")
    db.close()
    assert opened().list() == []
    assert "written by another version" in caplog.text


def test_a_job_that_cannot_be_written_down_is_not_accepted(
    opened: Callable[[], JobManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise ResourceExhausted("the disk is full")

    manager = opened()
    monkeypatch.setattr(Journal, "write", full)
    with pytest.raises(ResourceExhausted, match="full"):
        manager.submit(spec("a"))
    assert manager.list() == []
