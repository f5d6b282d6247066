"""The order in which a service goes: first what takes requests, then what holds chunks, then the claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi_operator.objects.names import LABEL_PART
from kintsugi_operator.objects.pods import Manifest

DRAIN_S_MAX = 600.0
"""A node that is lost must not keep a service from going."""
USERS = ("service", "calibration", "corpus")


@dataclass(frozen=True)
class Teardown:
    """One step."""

    delete: tuple[Manifest, ...] = ()
    message: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the finalizer may go; Kubernetes collects what is owned."""
        return not self.message


def next_teardown(ray: Sequence[Manifest], pods: Sequence[Manifest], age_s: float) -> Teardown:
    """From the RayServices and RayJobs of a service, its pods, and the seconds since it was to go.

    Engines and jobs finish what they have begun and may still write chunks; only then do shards write back
    what only RAM holds.
    """
    if age_s >= DRAIN_S_MAX:
        return Teardown(delete=tuple(one for one in ray if not _is_leaving(one)))
    for parts, what in ((USERS, "engines, gateways and jobs finish"), (("store",), "shards write back")):
        objects = [one for one in ray if _part(one) in parts]
        left = [one for one in pods if _part(one) in parts]
        if objects or left:
            return Teardown(
                tuple(one for one in objects if not _is_leaving(one)),
                f"{what}: {len(objects)} Ray objects and {len(left)} pods are left",
            )
    return Teardown()


def _part(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("labels", {}).get(LABEL_PART, ""))


def _is_leaving(manifest: Manifest) -> bool:
    return "deletionTimestamp" in manifest["metadata"]
