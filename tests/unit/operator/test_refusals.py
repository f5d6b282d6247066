"""Why pods do not start, from what Kubernetes writes into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kintsugi_operator.objects.names import LABEL_PART
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.refusals import STALLS_AFTER_S, describe_pod, list_refusals
from tests.unit.operator.refused import CASES, Case, why_untold
from tests.unit.operator.specs import NOW

LONG_AGO, JUST_NOW = "2026-11-21T11:57:00Z", "2026-11-21T11:59:30Z"


def pod(created: str = LONG_AGO, name: str = "p", part: str = "service", **status: Any) -> Manifest:
    metadata = {"name": name, "labels": {LABEL_PART: part}, "creationTimestamp": created}
    return {"kind": "Pod", "metadata": metadata, "status": status}


def waiting(reason: str, message: str = "", ended: str = "") -> dict[str, Any]:
    last = {"terminated": {"reason": ended}} if ended else {}
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"containerStatuses": [{"name": "c", "image": "r/x:1", "state": state, "lastState": last}]}


def said(one: Manifest) -> str:
    found = describe_pod(one, NOW)
    return found.message if found is not None else ""


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
    assert said(pod(**status)).startswith(says)
    assert bool(said(pod(**status))) == bool(says)


def test_a_pod_that_was_just_made_may_still_get_its_volumes() -> None:
    assert said(pod(JUST_NOW, **waiting("ContainerCreating"))) == ""
    assert said(pod(JUST_NOW, **waiting("ErrImagePull")))


def test_a_pod_that_terminates_has_not_failed() -> None:
    one = pod(**waiting("ErrImagePull"))
    one["metadata"]["deletionTimestamp"] = LONG_AGO
    assert said(one) == ""


def test_the_first_of_each_part_is_named() -> None:
    found = list_refusals(
        [
            pod(name="b", **waiting("ErrImagePull")),
            pod(name="a", **waiting("InvalidImageName", "no")),
            pod(name="s", part="store", **waiting("ErrImagePull")),
            pod(name="c", part="corpus"),
        ],
        (),
        (),
        (),
        NOW,
    )
    assert {part: one.message for part, one in found.items()} == {
        "service": "pod a: InvalidImageName: no",
        "store": "pod s: image r/x:1 cannot be pulled",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_refusal_is_told(case: Case) -> None:
    assert not why_untold(case)


def test_the_page_has_every_reason() -> None:
    page = (Path(__file__).parents[3] / "docs/operate/refusals.md").read_text()
    assert [one for one in STALLS_AFTER_S if f"`{one}`" not in page] == []
