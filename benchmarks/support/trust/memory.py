"""Tests a service whose memory other programs fill, and how its killed processes are reported.

`kintsugi serve` runs with the threshold of Ray's memory monitor (`RAY_memory_usage_threshold`) below what the
machine uses already: to Ray, others have filled the memory, so that nothing has to be filled. The control
turns the monitor on, as Ray does by default, and counts what it ends before the service is up, or within a
minute.

Then each part is killed with SIGKILL, as the kernel does when no memory is left. A loss counts as reported
when `kintsugi serve` prints it, and as repaired when a new process runs and answers.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.servers import NAME, Server, serve
from kintsugi.gateway.addresses import free_port
from kintsugi.models.bundled import bundled_checkpoint

FULL_FROM = 0.05
"""Share of the machine's memory from which on it counts as full; less than the service itself uses."""
MINUTES, QUICK_MINUTES = 10.0, 1.0
LOOK_S = 0.1
TOLD_S_MAX, BACK_S_MAX = 5.0, 60.0
GIVE_UP_S = 180.0
PARTS = {
    "Gateway": r"^ray::ServeReplica:.*:Gateway",
    "StoreShard": r"^ray::ServeReplica:.*:StoreShard",
    "Directory": r"^ray::DirectoryActor",
    "Engine": r"^VLLM::EngineCore",
    "ServeController": r"^ray::ServeController",
}
"""The title of each part's process. An engine is killed at its core, which has most of the memory."""
Found = tuple[int, float]
"""A process: its id, and the time at which it began, since ids are used again."""


def _specification(folder: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(bundled_checkpoint()), "name": NAME},
        "engines": {"vllm": {"kv_cache_memory_bytes": 256 << 20}},
        "store": {"ram_gib": 0.25, "expert": {"directory_port": free_port("127.0.0.1", 28410, 64)}},
        # With 0, a gateway that is started again would listen elsewhere.
        "gateway": {
            "grpc_port": free_port("127.0.0.1", 28510, 64),
            "http_port": free_port("127.0.0.1", 28610, 64),
        },
    }


class Watched:
    """A service, and the lost processes that it prints."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.told: dict[str, float] = {}
        """When each part was last reported as lost."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._server.process.stdout is not None
        for line in self._server.process.stdout:
            event = json.loads(line)
            say(f"{event}")
            if event["event"] == "lost":
                self.told[event["part"]] = time.monotonic()

    def find(self, part: str) -> set[Found]:
        found = set()
        for process in self._server.processes():
            try:
                if re.search(PARTS[part], " ".join(process.cmdline()).strip()):
                    found.add((process.pid, process.create_time()))
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def answers(self, timeout_s: float = 5.0) -> bool:
        body = {"model": NAME, "prompt": "The tide", "max_tokens": 1}
        try:
            return httpx.post(
                f"{self._server.endpoint.url}/completions", json=body, timeout=timeout_s
            ).is_success
        except httpx.TransportError:
            return False

    def kill(self, part: str) -> tuple[float, float]:
        """Kill a part. Returns the seconds until the loss was reported, and until it was repaired."""
        before = self.find(part)
        (pid, _) = next(iter(before))
        began_s = time.monotonic()
        psutil.Process(pid).kill()
        told_s = _seconds_until(lambda: self.told.get(part, 0.0) >= began_s, began_s)
        _seconds_until(lambda: bool(self.find(part) - before), began_s)
        return told_s, _seconds_until(self.answers, began_s)


def _seconds_until(condition: Callable[[], bool], began_s: float) -> float:
    while not condition():
        if time.monotonic() - began_s > GIVE_UP_S:
            return float("inf")
        time.sleep(LOOK_S)
    return time.monotonic() - began_s


def _environment(**more: str) -> dict[str, str]:
    return {"RAY_memory_usage_threshold": str(FULL_FROM), **more}


def _count_ended_with_monitor() -> int:
    """The processes that Ray ends if its monitor is on."""
    with tempfile.TemporaryDirectory(prefix="km-", ignore_cleanup_errors=True) as folder:
        environment = _environment(RAY_memory_monitor_refresh_ms="250", RAY_TMPDIR=folder)
        try:
            with serve(_specification, environment=environment):
                time.sleep(60)
        except (AssertionError, subprocess.SubprocessError):
            say("with the monitor on the service does not come up")
        logs = Path(folder).glob("ray/session_2*/logs/raylet.out")
        text = "".join(one.read_text(errors="replace") for one in logs)
    return len(re.findall(r"Killing \d+ worker", text))


def measure(*, quick: bool, seed: int) -> list[Figure]:
    minutes = QUICK_MINUTES if quick else MINUTES
    with serve(_specification, environment=_environment()) as server:
        watched = Watched(server)
        before = {part: watched.find(part) for part in PARTS}
        assert all(before.values()), f"not all parts were found: {before}"
        end_s, answered, asked = time.monotonic() + 60 * minutes, 0, 0
        while time.monotonic() < end_s:
            answered, asked = answered + watched.answers(30.0), asked + 1
            time.sleep(1.0)
        ended = {part: len(found - watched.find(part)) for part, found in before.items()}
        killed = {part: watched.kill(part) for part in PARTS}
    control = "" if quick else f"; {_count_ended_with_monitor()} with Ray's monitor on"
    told = ", ".join(f"{part} {told_s:.1f}" for part, (told_s, _) in killed.items())
    back = ", ".join(f"{part} {back_s:.1f}" for part, (_, back_s) in killed.items())
    detail = f"in {minutes:g} minutes, {answered} of {asked} requests answered{control}"
    return [
        Figure.at_most("foreign_memory_kills", sum(ended.values()), 0, "processes", detail),
        Figure.at_most("kill_told_s", max(told_s for told_s, _ in killed.values()), TOLD_S_MAX, "s", told),
        Figure.at_most("kill_back_s", max(back_s for _, back_s in killed.values()), BACK_S_MAX, "s", back),
    ]
