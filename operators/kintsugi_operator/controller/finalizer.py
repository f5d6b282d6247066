"""Our finalizer, which holds a deleted BlendService until it has drained."""

from __future__ import annotations

from kintsugi_operator.controller.cluster import BLEND_SERVICE, ApiServer
from kintsugi_operator.objects.names import FINALIZER
from kintsugi_operator.objects.pods import Manifest


def is_held(live: Manifest) -> bool:
    """Whether the object has our finalizer."""
    return FINALIZER in live["metadata"].get("finalizers", [])


async def set_finalizer(cluster: ApiServer, live: Manifest, is_wanted: bool) -> Manifest:
    """Set or remove our finalizer; refused if somebody has changed the object since it was read. Returns the
    object as it is stored now."""
    if is_held(live) is is_wanted:
        return live
    metadata = live["metadata"]
    others = [one for one in metadata.get("finalizers", []) if one != FINALIZER]
    finalizers = [*others, FINALIZER] if is_wanted else others
    patch = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
    return await cluster.merge(BLEND_SERVICE, metadata["namespace"], metadata["name"], patch)
