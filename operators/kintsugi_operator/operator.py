"""The process: kopf watches, a queue remembers what changed, workers reconcile, a Lease names the leader.

kopf writes nothing to objects: raw-event handlers need neither its finalizer nor its annotations, so nothing
is written while nothing changes. The reconciler alone sets and removes the finalizer that holds a service
until it has drained.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config
from kubernetes.aio.config.config_exception import ConfigException

from kintsugi_operator.api.manifest import API_VERSION, GROUP, VERSION
from kintsugi_operator.controller.cluster import BLEND_SERVICE, CORPUS_PRECOMPUTE, ApiServer
from kintsugi_operator.controller.election import LeaseLost, lead
from kintsugi_operator.controller.pulse import Pulse
from kintsugi_operator.controller.queue import ObjectKey, WorkQueue
from kintsugi_operator.controller.reconcile import SOON_S, Reconciler, utc_now
from kintsugi_operator.controller.scrape import Web
from kintsugi_operator.objects.names import FIELD_MANAGER, KOPF_FINALIZER, LABEL_CORPUS, LABEL_SERVICE

logger = logging.getLogger(__name__)

WORKERS = 4
WATCHED_RAY = ("rayservices", "rayjobs")


@dataclass(frozen=True)
class OperatorOptions:
    """Options from the command line and the pod's environment."""

    lease_namespace: str
    identity: str
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    health_port: int = 8080
    metrics_port: int = 9090
    lease_name: str = FIELD_MANAGER

    @staticmethod
    def of(arguments: Sequence[str], environ: Mapping[str, str]) -> OperatorOptions:
        """Parse options. Prints the usage and exits for an unknown one."""
        parser = argparse.ArgumentParser(prog="kintsugi-operator", description=__doc__.split("\n")[0])
        parser.add_argument(
            "--namespace",
            action="append",
            default=[],
            help="watch only this namespace (default: all); may be repeated",
        )
        parser.add_argument("--lease", default=FIELD_MANAGER, help="name of the Lease that names the leader")
        parser.add_argument("--health-port", type=int, default=8080, help="port of /healthz and /leader")
        parser.add_argument("--metrics-port", type=int, default=9090, help="port of /metrics")
        given = parser.parse_args(arguments)
        return OperatorOptions(
            lease_namespace=environ.get("POD_NAMESPACE", "default"),
            identity=environ.get("POD_NAME", "") or f"{socket.gethostname()}-{os.getpid()}",
            namespaces=tuple(given.namespace),
            health_port=given.health_port,
            metrics_port=given.metrics_port,
            lease_name=given.lease,
        )


def registry(queue: WorkQueue, login: Callable[..., Any]) -> kopf.OperatorRegistry:
    """Handlers that only put keys into the queue."""
    handlers = kopf.OperatorRegistry()
    kopf.on.login(registry=handlers)(login)

    @kopf.on.startup(registry=handlers)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        # kopf removes a finalizer of this name from every object: raw-event handlers need none.
        settings.persistence.finalizer = KOPF_FINALIZER
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
        settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
        # Events tell what happened to a service (`controller.events`), not which handler has run.
        settings.posting.enabled = False
        # It logs a line for each event that a handler has taken.
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        # Neither CRDs nor namespaces are watched, which would need rights over the whole cluster.
        settings.scanning.disabled = True
        # Detects a connection that has died silently.
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330

    def own(kind: str) -> Callable[..., Coroutine[Any, Any, None]]:
        async def enqueue_changed(namespace: str | None, name: str | None, spec: kopf.Spec, **_: Any) -> None:
            queue.add(ObjectKey(kind, namespace or "", name or ""))
            # A service that waits for its corpora has to notice their progress.
            if kind == CORPUS_PRECOMPUTE.kind and spec.get("service"):
                queue.add(ObjectKey(BLEND_SERVICE.kind, namespace or "", str(spec["service"])))

        return enqueue_changed

    for resource in (BLEND_SERVICE, CORPUS_PRECOMPUTE):
        kopf.on.event(GROUP, VERSION, resource.plural, registry=handlers, id=resource.plural)(
            own(resource.kind)
        )

    async def enqueue_owner(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        if corpus := labels.get(LABEL_CORPUS):
            queue.add(ObjectKey(CORPUS_PRECOMPUTE.kind, namespace or "", corpus))
        elif service := labels.get(LABEL_SERVICE):
            queue.add(ObjectKey(BLEND_SERVICE.kind, namespace or "", service))

    for plural in WATCHED_RAY:
        kopf.on.event(
            "ray.io", "v1", plural, labels={LABEL_SERVICE: kopf.PRESENT}, registry=handlers, id=plural
        )(enqueue_owner)
    return handlers


async def operate(
    client: ApiClient,
    settings: OperatorOptions,
    session: aiohttp.ClientSession,
    pulse: Pulse,
    login: Callable[..., Any] = kopf.login_via_client,
) -> None:
    """Watch and reconcile until cancelled. `login` tells kopf how to reach the API server."""
    cluster = ApiServer(client, pulse.count_write)
    reconciler = Reconciler(
        cluster, Web(session), utc_now, home=settings.lease_namespace, metrics=pulse.objects
    )

    async def look(key: ObjectKey) -> float | None:
        pulse.looks += 1
        reconcile = reconciler.service if key.kind == BLEND_SERVICE.kind else reconciler.corpus
        try:
            with pulse.objects.time_look(key):
                again_s = await reconcile(key.namespace, key.name)
        except Exception:
            pulse.failures += 1
            raise
        if again_s is None:
            pulse.objects.forget(key)
        return again_s

    await _until_served(cluster)
    queue = WorkQueue(look, time.monotonic)
    pulse.waiting = lambda: len(queue)
    workers = [asyncio.create_task(queue.run()) for _ in range(WORKERS)]
    watching = asyncio.create_task(
        kopf.operator(
            registry=registry(queue, login),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
        )
    )
    try:
        await asyncio.wait({watching, *workers}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, *workers):
            if task.done():
                task.result()
    finally:
        for task in (watching, *workers):
            task.cancel()
        await asyncio.gather(watching, *workers, return_exceptions=True)


async def main(settings: OperatorOptions) -> None:
    """Answer probes, wait for the lease, then operate. Raises `LeaseLost`."""
    _end_by_signal()
    configuration = await _configuration()
    pulse = Pulse()
    runners = [await pulse.serve(port) for port in (settings.health_port, settings.metrics_port)]
    try:
        async with ApiClient(configuration) as client, aiohttp.ClientSession() as session:

            async def work() -> None:
                pulse.is_leader = True
                logger.info("%s leads", settings.identity)
                await operate(client, settings, session, pulse)

            logger.info("%s waits for the lease", settings.identity)
            lease = (settings.lease_name, settings.lease_namespace, settings.identity)
            await lead(ApiServer(client), *lease, work)
    finally:
        for runner in runners:
            await runner.cleanup()


def _end_by_signal() -> None:
    """Cancel this task on SIGTERM. A container's first process gets no signal without a handler, so a standby
    would be killed only after its grace period. kopf takes the signal over once it runs."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _until_served(cluster: ApiServer) -> None:
    """Wait until our CRDs are there: kopf looks for them only once."""
    needed = {BLEND_SERVICE.plural, CORPUS_PRECOMPUTE.plural}
    while missing := needed - await cluster.list_served_kinds(API_VERSION):
        logger.warning("the API server does not serve %s: apply the chart's CRDs", ", ".join(sorted(missing)))
        await asyncio.sleep(SOON_S)


async def _configuration() -> Configuration:
    """The API server's address and credentials, from the pod's ServiceAccount or else the kubeconfig."""
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)
    except ConfigException:
        await load_kube_config(client_configuration=configuration)
    return configuration


def run() -> int:
    """The console script. Exit status 1 means that the lease is lost; the restarted pod is a standby."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(main(OperatorOptions.of(sys.argv[1:], os.environ)))
    except LeaseLost as error:
        logger.error("%s", error)
        return 1
    except asyncio.CancelledError:
        logger.info("ended by a signal")
    except KeyboardInterrupt:
        return 130
    return 0
