"""Objects of another version, operators that leave a service alone, and mounts that hide what is ours."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.manifest import from_live_spec, from_manifest, to_manifest
from kintsugi_operator.api.pod_template import PodTemplate, VolumeMount
from kintsugi_operator.api.status import OperatorStatus
from kintsugi_operator.desired.validation import check_pod_template
from tests.unit.operator.specs import spec_of

OWNER = OperatorStatus("team/operator", "Namespace")


def test_fields_of_a_newer_crd_are_left_out() -> None:
    known = to_manifest(spec_of())
    newer = {**known, "priorities": {"a": 1}, "engines": {**known["engines"], "warmUp": True}}
    with pytest.raises(UnknownField):
        from_manifest(BlendServiceSpec, newer)
    assert from_live_spec(BlendServiceSpec, {"spec": newer}) == spec_of()
    assert "priorities" in newer, "the live object is as it was"


def test_what_a_person_adds_to_pods_is_not_left_out() -> None:
    known = to_manifest(spec_of())
    newer = {**known, "expert": {"podTemplates": {"engines": {"hostNetwork": True}}}}
    with pytest.raises(InvalidField, match="hostNetwork"):
        from_live_spec(BlendServiceSpec, {"spec": newer})


@pytest.mark.parametrize(
    ("path", "sub_path"),
    [
        ("//tmp", ""),
        ("//etc/kintsugi/tokens", ""),
        ("/models", ""),
        ("/var/run/secrets/kubernetes.io/serviceaccount", ""),
        ("/data-of-mine", "/etc"),
    ],
)
def test_mounts_over_what_is_ours_are_refused_however_they_are_written(path: str, sub_path: str) -> None:
    template = PodTemplate(
        volumes=({"name": "mine", "emptyDir": {}},),
        volume_mounts=(VolumeMount(name="mine", mount_path=path, sub_path=sub_path),),
    )
    with pytest.raises(InvalidField):
        check_pod_template(template, "spec.expert.podTemplates.engines")
