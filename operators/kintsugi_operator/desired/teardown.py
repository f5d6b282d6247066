"""The order in which a service is deleted: engines, gateways and jobs, then shards, then everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi_operator.objects.names import LABEL_PART, LABEL_ROLE
from kintsugi_operator.objects.network import USERS
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import is_leaving, is_pod_ready, is_service_ready, label_of

DRAIN_S_MAX = 600.0
"""Limit of a drain, since a lost node would otherwise prevent the deletion forever."""


@dataclass(frozen=True)
class Teardown:
    """One step of a deletion."""

    delete: tuple[Manifest, ...] = ()
    message: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the finalizer may be removed. Kubernetes then deletes everything that the service owns."""
        return not self.message


def must_drain(ray: Sequence[Manifest], pods: Sequence[Manifest]) -> bool:
    """Whether a service needs the finalizer: one of its parts is ready. A part that was never ready has
    answered no request and stored no chunk."""
    is_working = any(label_of(one, LABEL_ROLE) in ("shard", "engine") and is_pod_ready(one) for one in pods)
    return is_working or any(is_service_ready(one) for one in ray)


def next_teardown(ray: Sequence[Manifest], pods: Sequence[Manifest], age_s: float) -> Teardown:
    """Decide from a service's RayServices and RayJobs, its pods, and the seconds since its deletion.

    Engines and jobs finish first, because they may still write chunks; then shards write back their RAM.
    """
    if age_s >= DRAIN_S_MAX:
        return Teardown(delete=tuple(one for one in ray if not is_leaving(one)))
    for parts, what in (
        (USERS, "engines, gateways and jobs are finishing"),
        (("store",), "shards are writing back"),
    ):
        objects = [one for one in ray if label_of(one, LABEL_PART) in parts]
        left = [one for one in pods if label_of(one, LABEL_PART) in parts]
        if objects or left:
            return Teardown(
                tuple(one for one in objects if not is_leaving(one)),
                f"{what}: {len(objects)} Ray objects and {len(left)} pods remain",
            )
    return Teardown()
