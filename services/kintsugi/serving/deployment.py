"""A whole service on Ray: starts Ray on this machine, deploys the generated configuration, watches and stops
it."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kintsugi.core.deploy import (
    DRAIN_S,
    END_MARGIN_S,
    ENGINE_DEPLOYMENT,
    GATEWAY_CPUS,
    GATEWAY_DEPLOYMENT,
    SERVICE_APP,
    SHARD_CPUS,
    SHARD_DEPLOYMENT,
    STORE_APP,
    ServiceSpec,
    serve_config,
)
from kintsugi.core.errors import DeadlineExceeded, KintsugiError, Unavailable
from kintsugi.core.exchange import EngineInfo
from kintsugi.precompute.local_ray import start_local_ray
from kintsugi.serving.directory import remove_directory
from kintsugi.serving.lost_parts import LostParts

log = logging.getLogger(__name__)
T = TypeVar("T")

OBJECT_STORE_BYTES = 200 << 20
"""Size of Ray's object store. Requests and answers are small, and chunk KV never passes through Ray."""
SERVE_ENVIRONMENT = {
    # With Ray's default niceness of 15, other processes starve the workers.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Each iteration takes about 3 ms of CPU, and the default is ten per second.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}
"""Defaults of environment variables for Serve and its workers on one machine."""
SYSTEM_CPUS = 1
"""CPUs for Serve's controller and for building applications."""
POLL_S = 0.25
ASK_TIMEOUT_S = 30.0
SERVE_ANSWER_S = 300.0
"""Time limit for Serve's controller to start or answer: seconds on an idle machine, minutes beside others'
work."""
STOP_SLACK_S = 15.0
"""Time limit for Serve to kill replicas whose drain time is over, and to report it."""
MESSAGE_CHARS_MAX = 2000


@dataclass(frozen=True)
class DeploymentProgress:
    """Running and wanted replicas of one deployment."""

    deployment: str
    running: int
    wanted: int
    status: str
    message: str = ""

    @property
    def is_ready(self) -> bool:
        return self.status == "HEALTHY" and self.running >= self.wanted


def start_ray(spec: ServiceSpec) -> None:
    """Start Ray on this machine, on loopback alone, with room for every replica that `spec` may want.

    Ray's CPUs are logical: on a machine with fewer cores, replicas share the cores. Raises `Unavailable`.
    """
    engines, store, gateway = spec.engines, spec.store, spec.gateway
    cpus = engines.most * engines.cpus
    cpus += (store.expert.shards_max or store.shards) * SHARD_CPUS + gateway.replicas * GATEWAY_CPUS
    for name, value in SERVE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Ray raises a plain `Exception` for a node that does not start in time.
    with _expect_ray("start", Exception):
        start_local_ray(
            num_cpus=max(os.cpu_count() or 1, math.ceil(cpus) + SYSTEM_CPUS),
            object_store_memory=OBJECT_STORE_BYTES,
        )


def _ray_errors() -> tuple[type[Exception], ...]:
    """Errors of Ray and Serve for a failed request or a timeout."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return RayError, RayServeException, TimeoutError, ConnectionError


@contextmanager
def _expect_ray(task: str, *more: type[Exception]) -> Iterator[None]:
    """Raise `Unavailable` when Ray or Serve fails in the body, or takes too long. ``more``: further error
    types to translate."""
    try:
        yield
    except KintsugiError:
        raise
    except (*_ray_errors(), *more) as error:
        said = str(error).strip().splitlines() or [""]
        raise Unavailable(
            f"Ray does not {task} ({type(error).__name__}: {said[-1][-MESSAGE_CHARS_MAX:]}); usually the "
            "machine lacks memory or is overloaded: stop other processes and try again"
        ) from error


def _ask_serve(ask: Callable[[], T]) -> T:
    """Return what `ask` returns. Raises `TimeoutError` after `SERVE_ANSWER_S`, with `ask` left in its thread:
    Serve itself waits for its controller without a limit."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001
            answer.set_exception(error)

    asking = threading.Thread(target=run, name="asks-serve", daemon=True)
    asking.start()
    asking.join(SERVE_ANSWER_S)
    if not answer.done():
        raise TimeoutError(f"Serve's controller does not answer within {SERVE_ANSWER_S:.0f} s")
    return answer.result()


def cause_in(message: str) -> str:
    """Extract Kintsugi's error from Serve's message about a failed replica, which usually is a traceback."""
    ours = re.findall(r"^kintsugi\.core\.errors\.(\w+: .+)$", message, re.MULTILINE)
    return str(ours[-1]) if ours else message[-MESSAGE_CHARS_MAX:]


class Service:
    """The two applications of one specification, on the Ray cluster that this process is connected to."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.config = serve_config(spec)
        self.lost = LostParts()

    def deploy(self) -> None:
        """Send the configuration to Serve, like `serve deploy`. Returns before replicas run. Raises
        `Unavailable`."""
        from ray.serve._private.api import serve_start
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(self.config)

        def start() -> None:
            client = serve_start(
                proxy_location=schema.proxy_location, http_options=schema.http_options.model_dump()
            )
            client.deploy_apps(schema)

        with _expect_ray("start Serve"):
            _ask_serve(start)

    def progress(self) -> list[DeploymentProgress]:
        """Return all deployments that Serve has created so far, shards first. Raises `Unavailable`."""
        from ray import serve

        found: list[DeploymentProgress] = []
        with _expect_ray("report its deployments"):
            applications = _ask_serve(serve.status).applications
        for name in (STORE_APP, SERVICE_APP):
            application = applications.get(name)
            if application is None:
                continue
            if application.status in ("DEPLOY_FAILED", "UNHEALTHY") and not application.deployments:
                status = application.status.value
                found.append(DeploymentProgress(name, 0, 1, status, application.message))
            for deployment, state in application.deployments.items():
                running = state.replica_states.get("RUNNING", 0)
                message = state.message or application.message
                wanted = self._count_wanted_replicas(deployment)
                found.append(DeploymentProgress(deployment, running, wanted, state.status.value, message))
        return found

    def _count_wanted_replicas(self, deployment: str) -> int:
        return {
            SHARD_DEPLOYMENT: self.spec.store.shards,
            ENGINE_DEPLOYMENT: self.spec.engines.replicas,
            GATEWAY_DEPLOYMENT: self.spec.gateway.replicas,
        }[deployment]

    def wait(
        self,
        timeout_s: float,
        say: Callable[[list[DeploymentProgress]], None],
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until everything runs, or ``gives_up`` returns true.

        Raises `Unavailable` with Serve's message for a deployment that failed, and `DeadlineExceeded`.
        """
        deadline_s = time.monotonic() + timeout_s
        while not gives_up():
            progress = self.progress()
            say(progress)
            for one in progress:
                if one.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise Unavailable(f"{one.deployment} does not start: {cause_in(one.message)}")
            count = sum(len(application["deployments"]) for application in self.config["applications"])
            if len(progress) == count and all(one.is_ready for one in progress):
                return
            if time.monotonic() > deadline_s:
                waiting = ", ".join(one.deployment for one in progress if not one.is_ready)
                raise DeadlineExceeded(f"not running after {timeout_s:.0f} s: {waiting or 'all deployments'}")
            time.sleep(POLL_S)

    def addresses(self) -> dict[str, str]:
        """Return `host:port` of one gateway's gRPC and HTTP ports. Raises `Unavailable`."""
        from ray import serve

        with _expect_ray("reach the gateway"):
            handle = serve.get_app_handle(SERVICE_APP)
            addresses: dict[str, str] = handle.addresses.remote().result(timeout_s=ASK_TIMEOUT_S)
        return addresses

    def info(self, timeout_s: float = ASK_TIMEOUT_S) -> EngineInfo:
        """Describe one engine. Raises `Unavailable` if none answers in time."""
        from ray import serve

        try:
            handle = serve.get_deployment_handle(ENGINE_DEPLOYMENT, SERVICE_APP)
            info: EngineInfo = handle.info.remote().result(timeout_s=timeout_s)
        except _ray_errors() as error:
            raise Unavailable(f"no engine answers ({type(error).__name__}); Serve restarts it") from error
        return info

    def stop(self) -> None:
        """Drain and end all replicas, engines before shards, then the directory. Idempotent.

        Raises `DeadlineExceeded` for an application that does not end in time, and `Unavailable`.
        """
        from ray import serve
        from ray.serve.exceptions import RayServeException

        with _expect_ray("end the service"):
            try:
                self._end(SERVICE_APP)
                self._end(STORE_APP)
                _ask_serve(serve.shutdown)
            except RayServeException as error:
                log.info("Serve is not running, so there is nothing to shut down: %s", error)
            remove_directory()

    def _end(self, application: str) -> None:
        """Delete an application and wait until it has ended. Serve's own function would wait only 60 s."""
        from ray import serve

        timeout_s = DRAIN_S + END_MARGIN_S + STOP_SLACK_S
        deadline_s = time.monotonic() + timeout_s
        _ask_serve(lambda: serve.delete(application, _blocking=False))
        while application in _ask_serve(serve.status).applications:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{application} did not end within {timeout_s:.0f} s; Ray kills it")
            time.sleep(POLL_S)
