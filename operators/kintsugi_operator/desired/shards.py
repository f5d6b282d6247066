"""Decides which pods of the store are replaced next. The operator never takes down more than one shard that
holds chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi_operator.observed.views import HEAD, StorePod


@dataclass(frozen=True)
class ShardStep:
    """One step of an upgrade."""

    outdated: int = 0
    """Number of shards' pods with an outdated template; 0: the upgrade is complete."""
    message: str = ""
    pods: tuple[str, ...] = ()
    """The pods to evict; empty: none now. A shard writes back its RAM before it ends, and returns with its
    volumes."""


def next_step(templates: Sequence[str], head: str, pods: Sequence[StorePod]) -> ShardStep:
    """Decide from the wanted template digests, by shard and of the head, and the existing pods.

    Outdated pods that have nothing to lose (`observed.protection`) are evicted at once. One of the others is
    evicted only while every other shard has a ready pod, outdated pods included: while a shard is down, no
    second one is taken down. A head that runs is never evicted, because it would take all shards with it.
    """
    wanted = {**dict(enumerate(templates)), HEAD: head}
    outdated = [
        pod
        for pod in sorted(pods, key=lambda one: (one.shard, one.name))
        if pod.shard in wanted and pod.template != wanted[pod.shard]
    ]
    count = sum(pod.shard != HEAD for pod in outdated)
    present = [pod for pod in outdated if not pod.is_leaving]
    if idle := tuple(pod.name for pod in present if not pod.is_protected):
        return ShardStep(count, "replacing pods that are not ready", idle)
    if not count:
        return ShardStep()
    ready = {pod.shard for pod in pods if pod.is_ready and not pod.is_leaving}
    missing = set(range(len(templates))) - ready
    # A shard that is not ready is replaced first: this takes down no further shard.
    held = sorted((pod for pod in present if pod.shard != HEAD), key=lambda one: one.is_ready)
    chosen = next((pod for pod in held if missing <= {pod.shard}), None)
    if chosen is None:
        text = f"waiting for shard {', '.join(map(str, sorted(missing)))} before the next restart"
        return ShardStep(count, text)
    return ShardStep(count, f"restarting shard {chosen.shard}", (chosen.name,))


def ready_shards(shards: int, pods: Sequence[StorePod]) -> int:
    """Number of shards with a ready pod."""
    return len({pod.shard for pod in pods if pod.is_ready and not pod.is_leaving and 0 <= pod.shard < shards})
