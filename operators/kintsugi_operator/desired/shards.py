"""Decides which shard restarts next, so that the operator never takes down more than one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi_operator.observed.views import ShardPod


@dataclass(frozen=True)
class ShardStep:
    """One step of an upgrade."""

    outdated: int = 0
    """Number of pods with an outdated template; 0: the upgrade is complete."""
    message: str = ""
    pod: str = ""
    """The pod to evict; empty: none now. It writes back its RAM before it ends, and returns with its
    volumes."""


def next_step(templates: Sequence[str], pods: Sequence[ShardPod]) -> ShardStep:
    """Decide from the wanted template digests, by shard, and the existing pods.

    Evicts only while every shard has a ready pod, outdated pods included: while a shard is down, no second
    one is taken down.
    """
    outdated = [
        pod
        for pod in sorted(pods, key=lambda one: (one.shard, one.name))
        if 0 <= pod.shard < len(templates) and pod.template != templates[pod.shard]
    ]
    if not outdated:
        return ShardStep()
    ready = {pod.shard for pod in pods if pod.is_ready and not pod.is_leaving}
    missing = set(range(len(templates))) - ready
    # An outdated pod that is not ready is replaced first, because nothing is lost.
    down = (pod for pod in outdated if not pod.is_ready and not pod.is_leaving and missing <= {pod.shard})
    chosen = next(down, None if missing else outdated[0])
    if chosen is None:
        text = f"waiting for shard {', '.join(map(str, sorted(missing)))} before the next restart"
        return ShardStep(len(outdated), text)
    return ShardStep(len(outdated), f"restarting shard {chosen.shard}", chosen.name)


def ready_shards(shards: int, pods: Sequence[ShardPod]) -> int:
    """Number of shards with a ready pod."""
    return len({pod.shard for pod in pods if pod.is_ready and not pod.is_leaving and 0 <= pod.shard < shards})
