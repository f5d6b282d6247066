"""The gRPC service over a real server, and the command line as it is run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from typer.testing import CliRunner

from kintsugi.cli.exits import ExitCode
from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.models.factory import make_checkpoint_once
from kintsugi.precompute.manager import JobManager
from kintsugi.precompute.policy import JobPolicy
from kintsugi.precompute.service import serve
from kintsugi.precompute.sources.roots import SourceRoots
from kintsugi.rpc.v1 import precompute_pb2 as pb
from kintsugi.rpc.v1 import precompute_pb2_grpc
from kintsugi.store.protocol.access import Access, TokenFile, token_digest
from tests.fakes.stub_prefiller import StubPrefiller
from tests.integration.precompute.conftest import Bench, write_corpus

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = {f"d{n}": f"Document {n} is about tea. " * 20 for n in range(6)}


class Running:
    """A server on a thread of its own."""

    def __init__(self, manager: JobManager, access: Access | None = None) -> None:
        self.manager = manager
        self.access = access
        self.address = ""
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        await serve(self.manager, "127.0.0.1:0", self._on_ready, self._end.wait, self.access)

    def _on_ready(self, address: str) -> None:
        self.address = address
        self._ready.set()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)
        self.manager.close()


def make_manager(bench: Bench, folder: Path) -> JobManager:
    """A manager that offers what `bench.spec()` asks for."""
    spec = bench.spec()
    policy = JobPolicy(SourceRoots((str(folder),)), models=(spec.model,), stores=(spec.store,))
    return JobManager(folder / "jobs", partial(StubPrefiller, log=str(bench.log)), policy)


@pytest.fixture
def stub(bench: Bench, tmp_path: Path) -> Iterator[Any]:
    running = Running(make_manager(bench, tmp_path))
    with grpc.insecure_channel(running.address) as channel:
        yield precompute_pb2_grpc.PrecomputeStub(channel)
    running.stop()


def test_a_job_is_submitted_watched_and_listed(bench: Bench, stub: Any) -> None:
    write_corpus(bench.source, TEXTS)
    planned = stub.Submit(pb.SubmitJobRequest(spec_json=bench.spec().to_json(), dry_run=True))
    job = stub.Submit(pb.SubmitJobRequest(spec_json=bench.spec().to_json()))
    assert job.state == pb.JOB_STATE_QUEUED
    seen = list(stub.Watch(pb.WatchJobRequest(job_id=job.job_id)))
    assert seen[-1].state == pb.JOB_STATE_DONE, seen[-1].error
    assert (seen[-1].documents, seen[-1].chunks_filled) == (6, seen[-1].chunks)
    assert len(bench.prefilled) == seen[-1].chunks
    looked = stub.Get(pb.GetJobRequest(job_id=planned.job_id))
    assert (looked.state, looked.chunks_missing, looked.fits) == (pb.JOB_STATE_DONE, seen[-1].chunks, True)
    listed = stub.List(pb.ListJobsRequest()).jobs
    assert [entry.job_id for entry in listed] == [job.job_id, planned.job_id]


def test_jobs_are_paused_resumed_and_cancelled(bench: Bench, stub: Any) -> None:
    write_corpus(bench.source, TEXTS)
    job = stub.Submit(pb.SubmitJobRequest(spec_json=bench.spec().to_json()))
    waiting = stub.Submit(pb.SubmitJobRequest(spec_json=bench.spec(corpus="other").to_json()))
    stub.Pause(pb.PauseJobRequest(job_id=job.job_id))
    stub.Cancel(pb.CancelJobRequest(job_id=waiting.job_id))
    stub.Resume(pb.ResumeJobRequest(job_id=job.job_id))
    *_, last = stub.Watch(pb.WatchJobRequest(job_id=job.job_id))
    assert last.state == pb.JOB_STATE_DONE
    *_, other = stub.Watch(pb.WatchJobRequest(job_id=waiting.job_id))
    assert other.state == pb.JOB_STATE_CANCELLED


def test_bad_requests_get_their_status(bench: Bench, stub: Any) -> None:
    for call, code, words in (
        (lambda: stub.Get(pb.GetJobRequest(job_id="x")), grpc.StatusCode.NOT_FOUND, "not known"),
        (lambda: list(stub.Watch(pb.WatchJobRequest(job_id="x"))), grpc.StatusCode.NOT_FOUND, "not known"),
        (
            lambda: stub.Submit(pb.SubmitJobRequest(spec_json="{")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "not JSON",
        ),
        (
            lambda: stub.Submit(pb.SubmitJobRequest(spec_json='{"sauce": 1}')),
            grpc.StatusCode.INVALID_ARGUMENT,
            "source",
        ),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == code
        assert words in caught.value.details()
    nowhere = str(bench.folder / "nowhere")
    job = stub.Submit(pb.SubmitJobRequest(spec_json=bench.spec(source=nowhere).to_json()))
    *_, failed = stub.Watch(pb.WatchJobRequest(job_id=job.job_id))
    assert failed.state == pb.JOB_STATE_FAILED
    assert failed.error.startswith("NotFound")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"source": "/etc/passwd"}, "--allow-source"),
        ({"model": "org/other"}, "--model"),
        ({"store": "grpc://127.0.0.1:1"}, "--store"),
        ({"workers": 99}, "--workers"),
        ({"engine": {"trust_remote_code": True}}, "--engine"),
    ],
)
def test_what_the_server_does_not_offer_is_refused(
    bench: Bench, stub: Any, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Submit(pb.SubmitJobRequest(spec_json=bench.spec(**asked).to_json()))
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert words in caught.value.details()
    assert not stub.List(pb.ListJobsRequest()).jobs


def test_tokens_say_who_sees_and_changes_which_job(bench: Bench, tmp_path: Path) -> None:
    grants = {"owner": ["acme"], "other": ["globex"], "reader": ["acme"]}
    entries: list[dict[str, Any]] = [
        {"name": name, "sha256": token_digest(name), "namespaces": spaces} for name, spaces in grants.items()
    ]
    entries[2]["verbs"] = ["list"]
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": entries}))
    (tmp_path / "tokens.json").chmod(0o600)
    running = Running(make_manager(bench, tmp_path), TokenFile(tmp_path / "tokens.json"))
    write_corpus(bench.source, TEXTS)
    try:
        with grpc.insecure_channel(running.address) as channel:
            stub = precompute_pb2_grpc.PrecomputeStub(channel)

            def call(who: str, method: str, **fields: Any) -> Any:
                request_name = {"List": "ListJobsRequest", "Submit": "SubmitJobRequest"}
                request = getattr(pb, request_name.get(method, f"{method}JobRequest"))(**fields)
                return getattr(stub, method)(request, metadata=(("authorization", f"Bearer {who}"),))

            def refused(who: str, method: str, **fields: Any) -> Any:
                with pytest.raises(grpc.RpcError) as caught:
                    call(who, method, **fields)
                return caught.value.code()

            spec_json, denied = bench.spec().to_json(), grpc.StatusCode.PERMISSION_DENIED
            job_id = call("owner", "Submit", spec_json=spec_json, dry_run=True).job_id
            assert refused("nobody", "List") == grpc.StatusCode.UNAUTHENTICATED
            assert refused("other", "Submit", spec_json=spec_json) == denied
            assert refused("reader", "Submit", spec_json=spec_json) == denied
            # The corpus is another tenant's, whatever the namespace.
            taken = bench.spec(namespace="globex").to_json()
            call("owner", "Submit", spec_json=spec_json)
            assert refused("other", "Submit", spec_json=taken) == denied
            for method in ("Get", "Cancel", "Pause", "Resume"):
                assert refused("other", method, job_id=job_id) == grpc.StatusCode.NOT_FOUND
            assert refused("reader", "Cancel", job_id=job_id) == denied
            assert call("reader", "Get", job_id=job_id).job_id == job_id
            assert [len(call(who, "List").jobs) for who in grants] == [2, 0, 2]
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(HealthCheckRequest()).status == HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as caught:
                next(iter(health.Watch(HealthCheckRequest(), timeout=10)))
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    finally:
        running.stop()


def test_beyond_loopback_is_refused(tmp_path: Path) -> None:
    manager = JobManager(tmp_path)
    try:
        with pytest.raises(InvalidField, match="loopback"):
            asyncio.run(serve(manager, "0.0.0.0:0", print, asyncio.Event().wait))
    finally:
        manager.close()


def test_a_port_that_is_taken_is_named_with_what_to_do(tmp_path: Path) -> None:
    manager = JobManager(tmp_path)
    running = Running(manager)
    try:
        taken = re.escape(running.address)
        with pytest.raises(
            Unavailable, match=f"cannot listen on {taken}: .*; name another port with --listen"
        ):
            asyncio.run(serve(manager, running.address, print, partial(asyncio.sleep, 0)))
    finally:
        running.stop()


def test_the_command_line(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kintsugi.cli.commands import precompute as command
    from kintsugi.cli.main import app

    monkeypatch.setattr(command, "Job", partial(command.Job, factory=partial(StubPrefiller)))
    write_corpus(bench.source, TEXTS)
    model = str(make_checkpoint_once("tiny-llama"))
    at = ["--store", f"grpc://{bench.server.address}"]
    state = ["--state", str(tmp_path / "cli")]
    what = [str(bench.source), "-m", model, "-n", "acme", *at, "--tokens-max", "64"]
    runner = CliRunner()

    def run(*arguments: str, status: int = 0) -> str:
        result = runner.invoke(app, list(arguments), env={"COLUMNS": "150"})
        assert result.exit_code == status, result.output
        return str(result.stdout)

    planned = json.loads(run("precompute", *what, *state, "--dry-run", "--json"))
    assert planned["chunks_missing"] == planned["chunks"] > 0
    assert planned["predicted_s"] is None
    assert "unknown: this model has not run yet" in run("precompute", *what, *state, "--dry-run")
    assert "prefilled" in run("precompute", *what, *state, "--corpus", "tea")
    assert json.loads(run("coverage", *what, "--json"))["coverage"] == 1.0
    assert "100.0% resident" in run("coverage", *what)
    assert f"{planned['chunks']} of {planned['chunks']} chunks pinned" in run(
        "precompute", "pin", "tea", *at, *state
    )
    assert "0 chunks deleted" in run("precompute", "retire", "tea", *at, *state)
    assert json.loads(run("precompute", "list", *state, "--json"))[0]["corpus"] == "tea"
    assert "tea" in run("precompute", "list", *state)
    bad = int(ExitCode.BAD_INPUT)
    assert "--state" in run("precompute", "--help") or "run" in run("precompute", "--help")
    run("precompute", "/nowhere", *what[1:], *state, status=bad)
    run("precompute", *what, *state, "--engine", "[]", status=bad)
    run("precompute", "pin", "coffee", *at, *state, status=bad)


def test_the_served_service_stops_on_sigterm(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-c", "from kintsugi.cli.commands.precompute import app; app()", "serve"),
        *("--listen", "127.0.0.1:0", "--state", str(tmp_path)),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with grpc.insecure_channel(address) as channel:
            assert not precompute_pb2_grpc.PrecomputeStub(channel).List(pb.ListJobsRequest()).jobs
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
