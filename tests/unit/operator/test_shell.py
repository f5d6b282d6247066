"""The process around it: the queue, the lease, the watches, the probes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kintsugi.core.errors import Unavailable
from kintsugi_operator import operator
from kintsugi_operator.controller.cluster import Refused
from kintsugi_operator.controller.election import Candidate, LeaseLost, Sight, Terms, lead, may_hold
from kintsugi_operator.controller.metrics import OperatorMetrics
from kintsugi_operator.controller.queue import KEYS_MAX, ObjectKey, WorkQueue
from kintsugi_operator.operator import OperatorOptions
from tests.fakes.cluster import FakeCluster
from tests.unit.operator.conversation import Asked, Conversation, held

ACME = ObjectKey("BlendService", "team", "acme")
QUICK = Terms(lease_s=0.6, renew_deadline_s=0.4, retry_s=0.05)


async def until(said: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait for something, and fail if it does not come."""
    async with asyncio.timeout(within_s):
        while not said():
            await asyncio.sleep(0.01)


async def stopped(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_queue_looks_once_for_many_events_and_again_when_told() -> None:
    async def main() -> None:
        looks: list[ObjectKey] = []

        async def look(key: ObjectKey) -> float | None:
            looks.append(key)
            return 0.05 if len(looks) < 3 else None

        queue = WorkQueue(look, asyncio.get_running_loop().time)
        task = asyncio.create_task(queue.run())
        for _ in range(10):
            queue.add(ACME, 0.0)
        await until(lambda: len(looks) == 3 and not len(queue))
        await stopped(task)

    asyncio.run(main())


def test_no_object_is_looked_at_by_two_workers() -> None:
    async def main() -> None:
        busy, looks = 0, 0

        async def look(key: ObjectKey) -> float | None:
            nonlocal busy, looks
            busy, looks = busy + 1, looks + 1
            assert busy == 1
            if looks == 1:
                queue.add(key, 0.0)  # an event in the middle
            await asyncio.sleep(0.02)
            busy -= 1
            return None

        queue = WorkQueue(look, asyncio.get_running_loop().time)
        tasks = [asyncio.create_task(queue.run()) for _ in range(3)]
        queue.add(ACME, 0.0)
        await until(lambda: looks == 2 and not busy)
        assert len(queue) == 0
        for task in tasks:
            await stopped(task)

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(5))
def test_a_worker_ends_even_if_something_comes_at_that_moment(steps: int) -> None:
    async def main() -> None:
        async def look(key: ObjectKey) -> float | None:
            return None

        queue = WorkQueue(look, asyncio.get_running_loop().time)
        queue.add(ACME, 3600.0)
        task = asyncio.create_task(queue.run())
        await asyncio.sleep(0.01)
        queue.add(ObjectKey("BlendService", "team", "other"), 3600.0)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        ended, _ = await asyncio.wait({task}, timeout=3)
        assert ended

    asyncio.run(main())


@pytest.mark.parametrize("error", [Unavailable("no answer"), ValueError("ours")])
def test_what_fails_is_tried_again_later_and_later(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[float]:
        now, waits = 0.0, []

        async def look(key: ObjectKey) -> float | None:
            raise error

        queue = WorkQueue(look, lambda: now)
        for _ in range(8):
            await queue._take(ACME)
            waits.append(queue._due.pop(ACME) - now)
        return waits

    with caplog.at_level(logging.WARNING):
        waits = asyncio.run(main())
    assert waits == [2, 4, 8, 16, 32, 64, 120, 120]
    assert str(error) in caplog.text


def test_a_queue_is_bounded() -> None:
    async def main() -> None:
        async def look(key: ObjectKey) -> float | None:
            return None

        queue = WorkQueue(look, lambda: 0.0)
        for index in range(KEYS_MAX + 10):
            queue.add(ObjectKey("BlendService", "team", str(index)))
        assert len(queue) == KEYS_MAX

    asyncio.run(main())


def candidate(cluster: FakeCluster, identity: str) -> Candidate:
    return Candidate(cluster, "l", "team", identity, terms=QUICK)


def resting(leading: set[str], name: str) -> Callable[[], Any]:
    """Work that says who does it."""

    async def work() -> None:
        leading.add(name)
        try:
            await asyncio.sleep(3600)
        finally:
            leading.discard(name)

    return work


def test_of_two_one_leads_and_the_other_takes_over() -> None:
    async def main() -> None:
        cluster, leading = FakeCluster(), set[str]()
        first = asyncio.create_task(lead(candidate(cluster, "a"), resting(leading, "a")))
        await until(lambda: leading == {"a"})
        second = asyncio.create_task(lead(candidate(cluster, "b"), resting(leading, "b")))
        await asyncio.sleep(QUICK.lease_s * 2)
        assert leading == {"a"}
        await stopped(first)
        # It was given back: nobody waits for its end.
        await until(lambda: leading == {"b"}, QUICK.lease_s)
        assert cluster.find("Lease", "l", "team")["spec"]["leaseTransitions"] == 1
        await stopped(second)

    asyncio.run(main())


def test_a_leader_that_has_died_is_waited_out() -> None:
    async def main() -> None:
        cluster, leading = FakeCluster(), set[str]()
        dead = candidate(cluster, "dead")
        assert await dead.attempt(0.0)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        task = asyncio.create_task(lead(candidate(cluster, "b"), resting(leading, "b")))
        await until(lambda: leading == {"b"})
        assert loop.time() - begun_s >= QUICK.lease_s
        await stopped(task)

    asyncio.run(main())


def test_who_loses_the_lease_ends() -> None:
    async def main() -> None:
        cluster, leading = FakeCluster(), set[str]()
        task = asyncio.create_task(lead(candidate(cluster, "a"), resting(leading, "a")))
        await until(lambda: leading == {"a"})
        cluster.is_down = True
        with pytest.raises(LeaseLost, match="team/l"):
            await task
        assert leading == set()

    asyncio.run(main())


def test_a_short_silence_is_no_loss() -> None:
    async def main() -> None:
        cluster, leading = FakeCluster(), set[str]()
        task = asyncio.create_task(lead(candidate(cluster, "a"), resting(leading, "a")))
        await until(lambda: leading == {"a"})
        cluster.is_down = True
        await asyncio.sleep(QUICK.renew_deadline_s / 2)
        cluster.is_down = False
        await asyncio.sleep(QUICK.renew_deadline_s)
        assert leading == {"a"}
        await stopped(task)

    asyncio.run(main())


def test_work_that_breaks_is_not_hidden() -> None:
    async def main() -> None:
        async def work() -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await lead(candidate(FakeCluster(), "a"), work)

    asyncio.run(main())


def test_of_two_who_write_at_once_one_is_refused() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        candidates = [candidate(cluster, name) for name in "abc"]
        assert sum([await one.attempt(0.0) for one in candidates]) == 1
        live = cluster.find("Lease", "l", "team")
        live["metadata"]["resourceVersion"] = "changed"
        stale = {**live, "metadata": {**live["metadata"], "resourceVersion": "1"}}
        with pytest.raises(Refused, match="modified"):
            await cluster.replace(stale)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("holder", "age_s", "may"),
    [("", 0.0, True), ("me", 99.0, True), ("you", 14.9, False), ("you", 15.0, True)],
)
def test_who_may_take_the_lease(holder: str, age_s: float, may: bool) -> None:
    assert may_hold(Sight(holder, "then", 100.0), "me", 15.0, 100.0 + age_s) is may


def test_a_renewal_starts_the_wait_anew() -> None:
    sight = Sight("you", "1", 10.0)
    assert sight.update({"holderIdentity": "you", "renewTime": "1"}, 20.0) == sight
    assert sight.update({"holderIdentity": "you", "renewTime": "2"}, 20.0).since_s == 20.0


def test_probes_and_metrics(unused_port: int) -> None:
    async def main() -> None:
        metrics = OperatorMetrics()
        runner = await metrics.serve(unused_port)
        url = f"http://127.0.0.1:{unused_port}"
        try:
            async with aiohttp.ClientSession() as session:
                assert (await session.get(f"{url}/healthz")).status == 200
                assert (await session.get(f"{url}/leader")).status == 503
                metrics.is_leader = True
                for verb in ("list", "watch", "get", "patch", "delete"):
                    metrics.count_request(verb)
                assert (await session.get(f"{url}/leader")).status == 200
                text = await (await session.get(f"{url}/metrics")).text()
                assert "kintsugi_operator_leader 1" in text
                assert 'kintsugi_operator_requests_total{verb="patch"} 1.0' in text
                assert 'kintsugi_operator_requests_total{verb="watch"} 1.0' in text
        finally:
            await runner.cleanup()

    asyncio.run(main())


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_the_process_leads_and_gives_the_lease_back(tmp_path: Path, unused_port: int) -> None:
    """As a pod runs it, up to its clean end."""
    lease = "/apis/coordination.k8s.io/v1/namespaces/team/leases"
    kept: dict[str, Any] = {}

    def get(asked: Asked) -> tuple[int, Any]:
        return (200, kept) if kept else (404, {"message": "none"})

    def put(asked: Asked) -> tuple[int, Any]:
        kept.update(asked.body)
        return 200, kept

    found: dict[tuple[str, str], Any] = {
        ("GET", f"{lease}/l"): get,
        ("PUT", f"{lease}/l"): put,
        ("POST", lease): put,
    }

    async def main() -> int:
        conversation = Conversation(found)
        async with (
            held(conversation),
            aiohttp.ClientSession() as session,
            started(conversation.url, tmp_path, unused_port) as process,
            asyncio.timeout(60),
        ):
            while not await _is_leader(session, unused_port):
                assert process.returncode is None
                await asyncio.sleep(0.05)
            assert kept["spec"]["holderIdentity"] == "operator-0"
            await until(lambda: any(one.path.endswith("/blendservices") for one in conversation.asked))
            process.terminate()
            return await process.wait()

    assert asyncio.run(main()) == 0
    assert kept["spec"]["holderIdentity"] == ""


def test_a_standby_ends_when_it_is_told_to(tmp_path: Path, unused_port: int) -> None:
    """A container's first process would not hear a SIGTERM that it has not asked for."""
    lease = "/apis/coordination.k8s.io/v1/namespaces/team/leases/l"
    held_by_another = {"metadata": {}, "spec": {"holderIdentity": "operator-1", "renewTime": "t"}}

    async def main() -> int:
        conversation = Conversation({("GET", lease): (200, held_by_another)})
        async with held(conversation), started(conversation.url, tmp_path, unused_port) as process:
            await until(lambda: any(one.path == lease for one in conversation.asked), 60)
            process.terminate()
            async with asyncio.timeout(20):
                return await process.wait()

    assert asyncio.run(main()) == 0


@contextlib.asynccontextmanager
async def started(
    url: str, folder: Path, port: int, namespace: str = "team", log: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The operator's process, for an API server. Killed if it has not ended by itself."""
    config = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (folder / "config").write_text(json.dumps(config))
    environ = {**os.environ, "KUBECONFIG": str(folder / "config"), "POD_NAMESPACE": namespace}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "POD_NAME": "operator-0"}
    arguments = [f"--namespace={namespace}", "--lease=l", f"--port={port}"]
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log is not None else None
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kintsugi_operator", *arguments, env=environ, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _is_leader(session: aiohttp.ClientSession, port: int) -> bool:
    try:
        async with session.get(f"http://127.0.0.1:{port}/leader") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


def test_only_a_signal_ends_it_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that was cancelled by something else looks like one that a signal has ended."""
    monkeypatch.setattr(sys, "argv", ["kintsugi-operator"])
    for error, said in ((asyncio.CancelledError(), "not by a signal"), (ValueError("broken"), "broken")):

        async def serve(settings: OperatorOptions, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(operator, "_serve", serve)
        assert operator.run() == 1
        assert said in caplog.text
    assert "SIGTERM" not in caplog.text


def test_the_log_is_one_json_object_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(settings: OperatorOptions) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr(operator, "main", fail)
    monkeypatch.setattr(sys, "argv", ["operator", "--log-format", "json"])
    monkeypatch.setattr(logging.root, "handlers", [])
    assert operator.run() == 1
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["message"]) == ("ERROR", "ended by an error, not by a signal")
    assert "ValueError: two\nlines" in told["exception"]
    assert told["time"].endswith("+00:00")


def test_the_command_line() -> None:
    environ = {"POD_NAME": "operator-0", "POD_NAMESPACE": "here"}
    settings = OperatorOptions.of(["--lease=l", "--namespace", "a", "--namespace", "b"], environ)
    assert settings == OperatorOptions("here", "operator-0", ("a", "b"), lease_name="l")
    with pytest.raises(SystemExit):
        OperatorOptions.of(["--what"], {})
