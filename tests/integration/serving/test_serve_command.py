"""`kintsugi serve` as its users start it: a process of its own that is told to stop by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="install the extra `serving`")

from kintsugi.cli.commands.serve import PAIRS_SHOWN
from kintsugi.gateway.addresses import free_port
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint
from kintsugi.quality.questions import read_questions
from kintsugi.sdk.client import Client
from kintsugi.sdk.types import Sampling
from tests.fakes.random_models.factory import make_checkpoint_once

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START_S = 300.0
STOP_S = 120.0
LEARNED_S = 120.0


class Command:
    """One `kintsugi serve --json`."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from kintsugi.cli.console_script import main; main()",
                "serve",
                "--json",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._events: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def event(self, name: str, timeout_s: float, **details: Any) -> dict[str, Any]:
        """The next event of this name with these details; others are passed over."""
        while True:
            try:
                event = self._events.get(timeout=timeout_s)
            except Empty:
                raise AssertionError(f"no event {name}; see {self._log.name}") from None
            if event["event"] == name and details.items() <= event.items():
                return event

    def stop(self, number: int) -> int:
        """The exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[Command]:
    ports = ["--grpc-port", str(free_port("127.0.0.1", 28500, 64))]
    ports += ["--http-port", str(free_port("127.0.0.1", 28600, 64))]
    command = Command([*ports, "--ram", "256MiB", *arguments], tmp_path / "serve.log")
    try:
        yield command
    finally:
        command.close()


def descendants(process: int) -> set[int]:
    """Ids of all processes below a process, from the kernel's list."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


def test_the_bundled_model_is_served_by_its_report_and_stops_cleanly(tmp_path: Path) -> None:
    (question,) = read_questions(bundled_checkpoint() / "questions.jsonl.xz", 1)
    config = tmp_path / "service.yaml"
    # A model this small is prefilled faster than anything is loaded: blend it all the same.
    expert = {"loading_controller": False, "load_deadline_ms": 60_000}
    config.write_text(
        json.dumps(
            {
                "model": {"path": BUNDLED_NAME},
                "engines": {"expert": expert},
            }
        )
    )
    with serving(tmp_path, "--config", str(config)) as command:
        ready = command.event("ready", START_S)
        assert (ready["model"], ready["blending"]) == (BUNDLED_NAME, "on")
        with Client(ready["grpc"], namespace="demo") as client:
            client.put_chunks(question.chunks)
            sampling = Sampling(max_tokens=2, temperature=0.0)
            answer = client.generate(question.chunks, question.tail, sampling=sampling)
        assert answer.outcome == "blended", answer.reason
        assert question.answers[0] in answer.text
        assert httpx.get(f"{ready['http']}/healthz").status_code == 200
        left = descendants(command.process.pid)
        assert command.stop(signal.SIGTERM) == 0
        command.event("stopped", 1.0)
        assert not {process for process in left if Path(f"/proc/{process}").exists()}


@pytest.mark.full
def test_a_new_model_learns_from_what_it_serves(tmp_path: Path) -> None:
    model = str(make_checkpoint_once("tiny-llama"))
    with serving(tmp_path, "--model", model) as command:
        ready = command.event("ready", START_S)
        assert ready["blending"].startswith("learning")
        with Client(ready["grpc"], namespace="demo") as client:
            for number in range(3 * PAIRS_SHOWN):
                chunks = [f"the first text {number} of some length", f"and a second text {number}"]
                sampling = Sampling(max_tokens=2, temperature=0.0)
                answer = client.generate(chunks, "and a question", sampling=sampling)
                assert (answer.outcome, answer.reason.split(":")[0]) == ("declined", "learning")
                time.sleep(0.3)
        learned = command.event("blending", LEARNED_S)
        assert learned["pairs"] >= PAIRS_SHOWN
        assert command.stop(signal.SIGINT) == 0


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = subprocess.run(
            [
                *(sys.executable, "-c", "from kintsugi.cli.console_script import main; main()"),
                *("serve", "--json", "--model", BUNDLED_NAME, "--http-port", str(port), "--grpc-port", "0"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ},
        )
    assert finished.returncode == 4
    message = json.loads(finished.stdout)["error"]["message"]
    assert f"127.0.0.1:{port} is in use" in message
    assert "--http-port 0" in message
    assert "kintsugi status" in message
