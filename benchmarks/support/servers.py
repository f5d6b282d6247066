"""The two servers that are compared, each a tree of processes: vLLM's, and `kintsugi serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.support.engines import say
from benchmarks.support.load.run import Endpoint
from kintsugi.engine.asynchronous import BIND, UNIPROC
from kintsugi.gateway.addresses import free_port
from tests.fakes.random_models.factory import make_checkpoint_once

NAME = "measured"
NAMESPACE = "bench"
START_S = 300.0
STOP_S = 60.0
_CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, CLIENT_CORE = _CORES[0], _CORES[:2][-1]
"""The first two cores that this process may use; the same one twice if there is only one."""
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}\n\n{% endfor %}"
ONE_THREAD = {"OMP_NUM_THREADS": "1", BIND: "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
"""One compute thread each, without vLLM's binding, which would move it off the server's core."""
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """Settings of both servers, and those that only ours needs."""

    shape: str
    max_model_len: int
    kv_cache_bytes: int
    dtype: str = "bfloat16"
    engines: int = 1
    """Replicas of ours."""
    ratio: float = 0.15
    loading_controller: bool = True
    """Off for a model so small that a full prefill is faster than any blend: nothing would be blended."""
    is_pinned: bool = True
    """Whether the whole tree shares one core, so that servers are compared at equal cost. Otherwise ours runs
    with its defaults: on all cores, with one compute thread of the engine, reading through shared memory."""
    ram_gib: float = 6.0
    ssd_gib: float = 8.0
    expert: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of our `engines.expert`."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of our `model`."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine with values, for both servers."""
    privacy: Mapping[str, Any] = field(default_factory=dict)
    """Our service's rules by namespace pattern."""


@dataclass
class Server:
    """One that runs."""

    name: str
    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    grpc: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def processes(self) -> list[psutil.Process]:
        """The server's whole tree: Ray, shards, gateway and engines among them."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self) -> float:
        """Consumed so far by everything that runs now."""
        return sum(map(_cpu_s, self.processes()))

    def rss_bytes(self) -> int:
        """Resident memory of everything that runs now."""
        return sum(map(_rss_bytes, self.processes()))

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's Serve replicas, by Ray's title for them. The busiest comes
        first."""
        found = []
        for process in self.processes():
            try:
                if re.search(rf"ServeReplica:[^:]*:{deployment}\b", " ".join(process.cmdline())):
                    found.append((tree_cpu_s(process), process))
            except psutil.NoSuchProcess:
                continue
        return [process for _, process in sorted(found, key=lambda one: -one[0])]

    def replica(self, deployment: str) -> psutil.Process:
        """The busiest of `replicas`."""
        found = self.replicas(deployment)
        assert found, f"no process of {deployment} runs"
        return found[0]

    def metric(self, line: str) -> float:
        """The value of one of the gateway's series; 0 if it does not exist yet."""
        text = httpx.get(f"{self.endpoint.url.removesuffix('/v1')}/metrics", timeout=30).text
        found = [entry for entry in text.splitlines() if entry.startswith(line)]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def _cpu_s(process: psutil.Process) -> float:
    """Consumed so far by a process; 0 if it is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def tree_cpu_s(process: psutil.Process) -> float:
    """Consumed so far by a process and its children."""
    return sum(map(_cpu_s, [process, *process.children(recursive=True)]))


@contextmanager
def checkpoint(shape: str) -> Iterator[Path]:
    """The random model with a chat template beside it: links, not a copy."""
    with tempfile.TemporaryDirectory(prefix="kintsugi-bench-") as folder:
        linked = Path(folder) / "model"
        linked.mkdir()
        for file in make_checkpoint_once(shape).iterdir():
            (linked / file.name).symlink_to(file)
        (linked / "chat_template.jinja").write_text(TEMPLATE)
        yield linked


@contextmanager
def plain_server(
    model: Path, setting: Setting, transfer: Mapping[str, Any] | None = None
) -> Iterator[Server]:
    """vLLM's OpenAI server, with prefix caching; without us, unless `transfer` configures a connector."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", str(model), "--served-model-name", NAME, "--enforce-eager"]
    command += ["--dtype", setting.dtype, "--max-model-len", str(setting.max_model_len)]
    command += ["--kv-cache-memory-bytes", str(setting.kv_cache_bytes), "--disable-uvicorn-access-log"]
    # As in our engines: a separate worker process would compete with the core's process.
    command += ["--distributed-executor-backend", UNIPROC]
    for name, value in setting.vllm.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", NAME)
    # An installed plugin would register our connector, which does nothing unless configured; plain
    # vLLM runs without it.
    environment = {"VLLM_PLUGINS": ""} if transfer is None else {}
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with _running("plain", command, environment) as (process, log):
        _wait_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield Server("plain", process, endpoint)


@contextmanager
def our_server(model: Path, setting: Setting) -> Iterator[Server]:
    """`kintsugi serve`: Ray, one shard with RAM and a disk below it, one engine, the gateway."""
    with serve(lambda folder: _specification(model, setting, folder), is_pinned=setting.is_pinned) as server:
        yield server


@contextmanager
def serve(
    specify: Callable[[Path], dict[str, Any]],
    is_pinned: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`kintsugi serve` with the configuration that ``specify`` returns for a folder of its own."""
    # Short: the names of Ray's sockets begin with it, and have a bound.
    with tempfile.TemporaryDirectory(prefix="kg-", ignore_cleanup_errors=True) as folder:
        config = Path(folder) / "service.yaml"
        config.write_text(yaml.safe_dump(specify(Path(folder))))
        environment = {"RAY_TMPDIR": folder, **(environment or {})}
        command = [sys.executable, "-c", "from kintsugi.cli.console_script import main; main()"]
        command += ["serve", "--config", str(config), "--json"]
        with _running("kintsugi", command, environment, stdout=True, is_pinned=is_pinned) as started:
            process, log = started
            ready = _ready_event(process, log)
            endpoint = Endpoint(f"{ready['http']}/v1", ready["model"], namespace=NAMESPACE)
            yield Server("kintsugi", process, endpoint, ready["grpc"], ready)


def _specification(model: Path, setting: Setting, folder: Path) -> dict[str, Any]:
    patience_ms = 30_000  # A busy machine must not turn into declined blends.
    expert = {
        "ratio": setting.ratio,
        "loading_controller": setting.loading_controller,
        "load_deadline_ms": patience_ms,
        **setting.expert,
    }
    return {
        "model": {
            "path": str(model),
            "name": NAME,
            **setting.model,
        },
        "engines": {
            "replicas": setting.engines,
            "quality": "off",  # what is compared is speed
            "expert": expert,
            "vllm": {
                "dtype": setting.dtype,
                "max_model_len": setting.max_model_len,
                "kv_cache_memory_bytes": setting.kv_cache_bytes,
                **setting.vllm,
            },
        },
        "store": {
            "ram_gib": setting.ram_gib,
            "data_dir": str(folder / "data"),
            "tiers": [{"path": str(folder / "ssd"), "gib": setting.ssd_gib}] if setting.ssd_gib else [],
            "expert": {"directory_port": free_port("127.0.0.1", 28410, 64)},
        },
        "gateway": {"grpc_port": 0, "http_port": 0},
        "privacy": dict(setting.privacy),
    }


@contextmanager
def _running(
    name: str,
    command: list[str],
    environment: dict[str, str],
    stdout: bool = False,
    is_pinned: bool = True,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process, on the servers' core if `is_pinned`, ended with SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="kintsugi-bench-log-") as folder:
        log = Path(folder) / f"{name}.log"
        paths = [str(REPOSITORY / part) for part in ("services", "operators", ".")]
        everything = {
            **os.environ,
            **ONE_THREAD,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            **environment,
        }
        say(f"starting {name}")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=everything,
                stdout=subprocess.PIPE if stdout else output,
                stderr=output,
                preexec_fn=(lambda: os.sched_setaffinity(0, {SERVER_CORE})) if is_pinned else None,
            )
        try:
            yield process, log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    raise AssertionError("the server did not come up:\n" + log.read_text(errors="replace")[-4000:])


def _ready_event(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Return the `ready` line of `kintsugi serve --json`. A service that takes too long is ended."""
    assert process.stdout is not None
    ending = threading.Timer(START_S, process.kill)
    ending.start()
    try:
        for line in process.stdout:
            if not line.rstrip().endswith(b"}"):  # what failed is printed over several lines
                log.open("ab").write(line + process.stdout.read())
                break
            event: dict[str, Any] = json.loads(line)
            if event.get("event") == "ready":
                return event
    finally:
        ending.cancel()
    raise AssertionError("kintsugi serve did not come up:\n" + log.read_text(errors="replace")[-4000:])
