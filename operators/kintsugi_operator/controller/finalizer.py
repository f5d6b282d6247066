"""The finalizer that keeps a deleted BlendService until it has drained.

An operator that is removed for good can no longer drain services. Before it ends, it removes its finalizer
from them and gives up their ownership, so that another operator can take over at once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.api.manifest import status_of, to_manifest
from kintsugi_operator.api.status import BlendServiceStatus, OperatorStatus
from kintsugi_operator.controller.cluster import BLEND_SERVICE, DEPLOYMENT, ApiServer, Refused
from kintsugi_operator.controller.index import Index
from kintsugi_operator.objects.names import FINALIZER
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import is_leaving

logger = logging.getLogger(__name__)

RELEASE_S_MAX = 15.0
"""Time limit of a release: less than a pod's termination grace period of 30 s."""


def is_held(live: Manifest) -> bool:
    """Whether the object has our finalizer."""
    return FINALIZER in live["metadata"].get("finalizers", [])


async def set_finalizer(cluster: ApiServer, live: Manifest, is_wanted: bool) -> Manifest:
    """Add or remove our finalizer. Returns the object as it is stored now. Raises `Refused` if the object has
    changed since it was read."""
    if is_held(live) is is_wanted:
        return live
    metadata = live["metadata"]
    others = [one for one in metadata.get("finalizers", []) if one != FINALIZER]
    finalizers = [*others, FINALIZER] if is_wanted else others
    patch = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
    return await cluster.merge(BLEND_SERVICE, metadata["namespace"], metadata["name"], patch)


async def release_services(
    cluster: ApiServer, index: Index, me: OperatorStatus, home: str, deployment: str
) -> None:
    """Release all services if this operator is being removed. Errors of the API server are logged.

    `home`: the operator's namespace. `deployment`: the Deployment that runs the operator; empty: unknown.
    """
    try:
        async with asyncio.timeout(RELEASE_S_MAX):
            keys = [key for key in sorted(index.keys()) if key.kind == BLEND_SERVICE.kind]
            services = [await index.get(BLEND_SERVICE, key.namespace, key.name) for key in keys]
            if not any(services) or not await _is_removed(cluster, home, deployment):
                return
            logger.info("this operator is being removed: it releases its services")
            for live in filter(None, services):
                await _try_release(cluster, live, me)
    except (KintsugiError, TimeoutError) as error:
        logger.warning("services may keep their finalizer (see docs/operate/troubleshoot.md): %s", error)


async def _is_removed(cluster: ApiServer, home: str, deployment: str) -> bool:
    """Whether the operator's namespace is being deleted, or its Deployment is deleted or being deleted."""
    if await cluster.is_terminating(home):
        return True
    if not deployment:
        return False
    found = await cluster.get(DEPLOYMENT, home, deployment)
    return found is None or is_leaving(found)


async def _try_release(cluster: ApiServer, live: Manifest, me: OperatorStatus) -> None:
    """Release one service. After a refusal, retry once with the object as it is stored now: a reconciliation
    that was cancelled during a write leaves an old version in the index."""
    namespace, name = live["metadata"]["namespace"], live["metadata"]["name"]
    try:
        try:
            await _release(cluster, live, me)
        except Refused:
            for one in await cluster.list(BLEND_SERVICE, namespace, {}):
                if one["metadata"]["name"] == name:
                    await _release(cluster, one, me)
    except KintsugiError as error:
        logger.warning(
            "%s/%s may keep its finalizer (see docs/operate/troubleshoot.md): %s", namespace, name, error
        )


async def _release(cluster: ApiServer, live: Manifest, me: OperatorStatus) -> None:
    status = status_of(BlendServiceStatus, live)
    if status.operator.lease != me.lease:
        return
    # First the finalizer: a second attempt recognises this operator's service by its ownership.
    live = await set_finalizer(cluster, live, False)
    logger.info("released %s/%s", live["metadata"]["namespace"], live["metadata"]["name"])
    if not is_leaving(live):
        await cluster.apply_status(live, to_manifest(replace(status, operator=OperatorStatus())))
