"""Why pods do not start, from what Kubernetes writes into them."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi_operator.objects.names import LABEL_PART
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.pod_failures import describe_failure, list_pod_failures
from tests.unit.operator.specs import NOW

LONG_AGO, JUST_NOW = "2026-11-21T11:57:00Z", "2026-11-21T11:59:30Z"


def pod(created: str = LONG_AGO, name: str = "p", part: str = "service", **status: Any) -> Manifest:
    metadata = {"name": name, "labels": {LABEL_PART: part}, "creationTimestamp": created}
    return {"kind": "Pod", "metadata": metadata, "status": status}


def waiting(reason: str, message: str = "", ended: str = "") -> dict[str, Any]:
    last = {"terminated": {"reason": ended}} if ended else {}
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"containerStatuses": [{"name": "c", "image": "r/x:1", "state": state, "lastState": last}]}


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({}, ""),
        ({"containerStatuses": [{"name": "c", "state": {"running": {}}}]}, ""),
        (waiting("ImagePullBackOff", 'Back-off pulling image "r/x:1"'), "image r/x:1 cannot be pulled"),
        (waiting("ErrImagePull", "rpc error"), "image r/x:1 cannot be pulled"),
        (waiting("InvalidImageName", "bad name"), "InvalidImageName: bad name"),
        (
            waiting("CreateContainerConfigError", 'secret "t" not found'),
            'CreateContainerConfigError: secret "t" not found',
        ),
        (
            waiting("CrashLoopBackOff", "back-off 40s", "OOMKilled"),
            "it crashes repeatedly (OOMKilled)",
        ),
        (waiting("CrashLoopBackOff", "back-off 80s"), "it crashes repeatedly (see its log)"),
        (
            {"initContainerStatuses": [], **waiting("ContainerCreating")},
            "a Secret, ConfigMap or claim that it mounts may be missing",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
            "it cannot be scheduled",
        ),
    ],
)
def test_a_pod_says_why(status: dict[str, Any], says: str) -> None:
    said = describe_failure(pod(**status), NOW)
    assert said.startswith(says)
    assert bool(said) == bool(says)


def test_a_pod_that_was_just_made_may_still_get_its_volumes() -> None:
    assert describe_failure(pod(JUST_NOW, **waiting("ContainerCreating")), NOW) == ""
    assert describe_failure(pod(JUST_NOW, **waiting("ErrImagePull")), NOW)


def test_a_pod_that_terminates_has_not_failed() -> None:
    one = pod(**waiting("ErrImagePull"))
    one["metadata"]["deletionTimestamp"] = LONG_AGO
    assert describe_failure(one, NOW) == ""


def test_the_first_of_each_part_is_named() -> None:
    found = list_pod_failures(
        [
            pod(name="b", **waiting("ErrImagePull")),
            pod(name="a", **waiting("InvalidImageName", "no")),
            pod(name="s", part="store", **waiting("ErrImagePull")),
            pod(name="c", part="corpus"),
        ],
        NOW,
    )
    assert found == {
        "service": "pod a: InvalidImageName: no",
        "store": "pod s: image r/x:1 cannot be pulled",
    }
