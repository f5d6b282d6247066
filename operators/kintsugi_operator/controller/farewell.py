"""What an operator does last if it is being removed for good, and not only restarted.

Nobody would be left to drain the services that its finalizer holds: it lets them go, whether they are being
deleted or may be later. It also gives up its claims, so that another operator takes over at once.
"""

from __future__ import annotations

import asyncio
import logging

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.api.manifest import API_VERSION, status_of, to_manifest
from kintsugi_operator.api.status import BlendServiceStatus, OperatorStatus
from kintsugi_operator.controller.cluster import BLEND_SERVICE, DEPLOYMENT, ApiServer, Refused
from kintsugi_operator.controller.finalizer import set_finalizer
from kintsugi_operator.controller.index import Index
from kintsugi_operator.desired.ownership import forget_operator
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import is_leaving

logger = logging.getLogger(__name__)

FAREWELL_S_MAX = 15.0
"""Less than the 30 s that a pod has to end."""


async def take_leave(
    cluster: ApiServer, index: Index, me: OperatorStatus, home: str, deployment: str
) -> None:
    """Let all services go if this operator is being removed. Raises nothing that the API server causes."""
    try:
        async with asyncio.timeout(FAREWELL_S_MAX):
            services = await _services(index)
            if not services or not await _is_removed(cluster, home, deployment):
                return
            logger.info("this operator is being removed: it lets its services go")
            for live in services:
                await _try_to_let_go(cluster, live, me)
    except (KintsugiError, TimeoutError) as error:
        logger.warning(
            "services may keep their finalizer (docs/operate/troubleshoot.md has the remedy): %s", error
        )


async def _services(index: Index) -> list[Manifest]:
    """All services that are known."""
    known = sorted(index.keys())
    ours = [key for key in known if key.kind == BLEND_SERVICE.kind]
    found = [await index.get(BLEND_SERVICE, key.namespace, key.name) for key in ours]
    return [one for one in found if one is not None]


async def _is_removed(cluster: ApiServer, home: str, deployment: str) -> bool:
    """Whether the operator's namespace is being deleted, or its Deployment is gone or going."""
    if not home or await cluster.is_terminating(home):
        return bool(home)
    if not deployment:
        return False
    found = await cluster.get(DEPLOYMENT, home, deployment)
    return found is None or is_leaving(found)


async def _try_to_let_go(cluster: ApiServer, live: Manifest, me: OperatorStatus) -> None:
    """Let one service go. What the API server refuses is tried once more on the object as it is now: a
    look that was cancelled in the middle of a write leaves the index behind."""
    metadata = live["metadata"]
    try:
        try:
            await _let_go(cluster, live, me)
        except Refused:
            now = await cluster.list(BLEND_SERVICE, metadata["namespace"], {})
            for one in now:
                if one["metadata"]["name"] == metadata["name"]:
                    await _let_go(cluster, one, me)
    except KintsugiError as error:
        logger.warning(
            "%s/%s may keep its finalizer (docs/operate/troubleshoot.md has the remedy): %s",
            metadata["namespace"],
            metadata["name"],
            error,
        )


async def _let_go(cluster: ApiServer, live: Manifest, me: OperatorStatus) -> None:
    status = status_of(BlendServiceStatus, live)
    # Before the claim, by which a second try would not know the service as this operator's any more.
    if status.operator.lease == me.lease:
        live = await set_finalizer(cluster, live, False)
        logger.info("let %s/%s go", live["metadata"]["namespace"], live["metadata"]["name"])
    forgotten = forget_operator(status, me)
    if forgotten != status and not is_leaving(live):
        metadata = {key: live["metadata"][key] for key in ("name", "namespace", "resourceVersion")}
        written = {"apiVersion": API_VERSION, "kind": live["kind"], "metadata": metadata}
        await cluster.apply_status({**written, "status": to_manifest(forgotten)})
