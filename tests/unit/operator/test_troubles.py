"""Why pods do not start, from what Kubernetes writes into them."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi_operator.objects.names import LABEL_PART
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.troubles import trouble_of, troubles_of
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
            "it ends again and again (OOMKilled)",
        ),
        (waiting("CrashLoopBackOff", "back-off 80s"), "it ends again and again (see its log)"),
        (
            {"initContainerStatuses": [], **waiting("ContainerCreating")},
            "a Secret, ConfigMap or claim that it mounts may be missing",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
            "no node takes it",
        ),
    ],
)
def test_a_pod_says_why(status: dict[str, Any], says: str) -> None:
    said = trouble_of(pod(**status), NOW)
    assert said.startswith(says)
    assert bool(said) == bool(says)


def test_a_pod_that_was_just_made_may_still_get_its_volumes() -> None:
    assert trouble_of(pod(JUST_NOW, **waiting("ContainerCreating")), NOW) == ""
    assert trouble_of(pod(JUST_NOW, **waiting("ErrImagePull")), NOW)


def test_a_pod_that_goes_is_no_trouble() -> None:
    one = pod(**waiting("ErrImagePull"))
    one["metadata"]["deletionTimestamp"] = LONG_AGO
    assert trouble_of(one, NOW) == ""


def test_the_first_of_each_part_is_named() -> None:
    found = troubles_of(
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
