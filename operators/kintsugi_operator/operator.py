"""The process: watches fill an index, a queue holds the keys of changed objects, workers reconcile them. A
Lease names the leader.

Nothing is written while nothing changes. An operator that is removed for good releases its services
(`controller.finalizer`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config
from kubernetes.aio.config.config_exception import ConfigException

from kintsugi_operator.api.status import OperatorStatus
from kintsugi_operator.controller.cluster import BLEND_SERVICE, ApiServer
from kintsugi_operator.controller.election import Candidate, LeaseLost, lead
from kintsugi_operator.controller.finalizer import release_services
from kintsugi_operator.controller.index import Index
from kintsugi_operator.controller.metrics import OperatorMetrics
from kintsugi_operator.controller.owners import CLUSTER, NAMESPACE
from kintsugi_operator.controller.queue import ObjectKey, WorkQueue
from kintsugi_operator.controller.reconcile import Reconciler, utc_now
from kintsugi_operator.controller.scrape import Web
from kintsugi_operator.controller.watch import Watches
from kintsugi_operator.objects.names import FIELD_MANAGER

logger = logging.getLogger(__name__)

WORKERS = 4


@dataclass(frozen=True)
class OperatorOptions:
    """Options from the command line and the pod's environment."""

    lease_namespace: str
    identity: str
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    port: int = 9090
    lease_name: str = FIELD_MANAGER
    deployment: str = ""
    """Name of the Deployment that runs this operator; empty: unknown."""
    log_format: str = "text"
    """`text`, or `json`: one object per line."""

    @property
    def operator(self) -> OperatorStatus:
        """This operator, as recorded in the status of its services."""
        scope = NAMESPACE if self.namespaces else CLUSTER
        return OperatorStatus(f"{self.lease_namespace}/{self.lease_name}", scope)

    @staticmethod
    def of(arguments: Sequence[str], environ: Mapping[str, str]) -> OperatorOptions:
        """Parse options. Prints the usage and exits for an unknown option."""
        parser = argparse.ArgumentParser(prog="kintsugi-operator", description=__doc__.split("\n")[0])
        parser.add_argument(
            "--namespace",
            action="append",
            dest="namespaces",
            default=[],
            help="watch only this namespace (default: all); may be repeated",
        )
        parser.add_argument(
            "--lease",
            dest="lease_name",
            default=FIELD_MANAGER,
            help="name of the Lease that names the leader",
        )
        parser.add_argument(
            "--deployment",
            default="",
            help="name of the Deployment that runs this operator; deleting it deletes the Lease and releases "
            "the services",
        )
        parser.add_argument("--log-format", choices=("text", "json"), default="text", help="form of the log")
        parser.add_argument("--port", type=int, default=9090, help="port of /healthz, /leader and /metrics")
        given = vars(parser.parse_args(arguments))
        identity = environ.get("POD_NAME", "") or f"{socket.gethostname()}-{os.getpid()}"
        namespaces = tuple(given.pop("namespaces"))
        return OperatorOptions(environ.get("POD_NAMESPACE", "default"), identity, namespaces, **given)


async def operate(
    client: ApiClient, settings: OperatorOptions, session: aiohttp.ClientSession, metrics: OperatorMetrics
) -> None:
    """Watch and reconcile until cancelled. Raises the error of a watch or worker that fails."""
    index = Index(settings.namespaces)
    cluster = ApiServer(client, metrics.count_request, index.absorb)
    home, me = settings.lease_namespace, settings.operator
    reconciler = Reconciler(cluster, index, Web(session), utc_now, me, metrics, home)

    async def look(key: ObjectKey) -> float | None:
        reconcile = reconciler.service if key.kind == BLEND_SERVICE.kind else reconciler.corpus
        with metrics.time_look(key):
            again_s = await reconcile(key.namespace, key.name)
        if again_s is None:
            metrics.forget(key)
        return again_s

    queue = WorkQueue(look, time.monotonic)
    metrics.show_waiting(lambda: len(queue))

    def enqueue(changed: Iterable[ObjectKey]) -> None:
        for key in changed:
            queue.add(key)

    async def work() -> None:
        # Before the first lists are complete a reconciliation would fail, and be retried much later.
        await watches.wait()
        await queue.run()

    watches = Watches(cluster, index, enqueue)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watches.run())
            for _ in range(WORKERS):
                tasks.create_task(work())
    finally:
        await release_services(cluster, index, me, home, settings.deployment)


async def main(settings: OperatorOptions) -> None:
    """Answer probes, wait for the Lease, then operate until SIGTERM. Raises `LeaseLost`."""
    is_terminated = _cancel_on_sigterm()
    try:
        await _serve(settings)
    except asyncio.CancelledError:
        if not is_terminated.is_set():
            raise
        logger.info("ended by SIGTERM")


async def _serve(settings: OperatorOptions) -> None:
    configuration = await _configuration()
    metrics = OperatorMetrics()
    runner = await metrics.serve(settings.port)
    try:
        async with ApiClient(configuration) as client, aiohttp.ClientSession() as session:

            async def work() -> None:
                metrics.is_leader = True
                logger.info("%s leads", settings.identity)
                await operate(client, settings, session, metrics)

            logger.info("%s waits for the Lease", settings.identity)
            names = (settings.lease_name, settings.lease_namespace, settings.identity, settings.deployment)
            await lead(Candidate(ApiServer(client), *names), work)
    finally:
        await runner.cleanup()


def _cancel_on_sigterm() -> asyncio.Event:
    """Cancel this task on SIGTERM, and set the returned event. Without a handler, a container's first process
    ignores SIGTERM and is killed only after its grace period."""
    task, is_terminated = asyncio.current_task(), asyncio.Event()
    assert task is not None

    def end() -> None:
        is_terminated.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    return is_terminated


async def _configuration() -> Configuration:
    """The API server's address and credentials, from the pod's ServiceAccount or else the kubeconfig."""
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)
    except ConfigException:
        await load_kube_config(client_configuration=configuration)
    return configuration


class JsonLines(logging.Formatter):
    """One JSON object per line, with the time in UTC and an exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def run() -> int:
    """The console script. Exit status 0: ended by SIGTERM. 1: the Lease was lost, and the restarted pod is a
    standby; or an error, which the log describes."""
    options = OperatorOptions.of(sys.argv[1:], os.environ)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.log_format == "json":
        logging.getLogger().handlers[0].setFormatter(JsonLines())
    try:
        asyncio.run(main(options))
    except LeaseLost as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130
    except (Exception, asyncio.CancelledError):
        logger.exception("ended by an error, not by a signal")
        return 1
    return 0
