"""What the operator plans for a spec, and parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hypothesis import HealthCheck, settings

from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.status import BlendServiceStatus
from kintsugi_operator.desired.plan import plan_service
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import Observed, RayServiceView
from tests.unit.operator.specs import NOW, OWNER

PROPERTY = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
OLDEST, NEWEST = "1.30", "1.36"
"""Kubernetes versions that are supported."""
BEFORE = BlendServiceStatus()


def matches(chosen: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """Whether all labels of a selector are there."""
    return chosen.items() <= found.items()


def objects_of(
    spec: BlendServiceSpec, owner: Owner = OWNER, observed: Observed | None = None
) -> tuple[Manifest, ...]:
    store_up = Observed(store=RayServiceView(is_ready=True))
    return plan_service(spec, owner, BEFORE, observed or store_up, NOW).objects


def pod_templates(objects: Iterable[Manifest]) -> Iterator[Manifest]:
    """All pods that Ray's clusters would have."""
    for one in objects:
        spec = one.get("spec", {})
        cluster = spec.get("rayClusterConfig") or spec.get("rayClusterSpec")
        if cluster:
            yield cluster["headGroupSpec"]["template"]
            yield from (group["template"] for group in cluster["workerGroupSpecs"])


def named(objects: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    (found,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found
