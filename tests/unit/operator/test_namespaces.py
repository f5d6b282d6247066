"""Rules for namespaces on their way from a BlendService to gateways and shards."""

from __future__ import annotations

import pytest

from kintsugi.core.deploy import GATEWAY_DEPLOYMENT, SHARD_DEPLOYMENT
from kintsugi.core.errors import InvalidField
from kintsugi_operator.objects.deployed import service_config, store_config
from kintsugi_operator.objects.pods import Manifest
from tests.unit.operator.specs import spec_of

LIMITS = {"acme": {"requestsPerS": 5, "ramGib": 2}, "team/*": {"together": True, "weight": 3}}


def told(config: Manifest, deployment: str) -> Manifest:
    (found,) = [
        one["user_config"]
        for application in config["applications"]
        for one in application["deployments"]
        if one["name"] == deployment
    ]
    return dict(found)


def test_rules_reach_gateways_and_shards() -> None:
    spec = spec_of(limits=LIMITS, privacy={"acme": {"expert": {"ttftStepMs": 80, "accounting": False}}})
    expected = {"acme": {"requests_per_s": 5.0, "ram_gib": 2.0}, "team/*": {"together": True, "weight": 3.0}}
    gateway = told(service_config(spec, "blend", "team"), GATEWAY_DEPLOYMENT)
    assert gateway["limits"] == expected
    assert gateway["privacy"] == {"acme": {"expert": {"ttft_step_ms": 80.0, "accounting": False}}}
    shard = told(store_config(spec), SHARD_DEPLOYMENT)
    assert shard["limits"] == expected
    assert "tokens_file" not in shard


def test_rules_restart_nothing() -> None:
    for config in (store_config, lambda spec: service_config(spec, "blend", "team")):
        plain, ruled = (config(spec) for spec in (spec_of(), spec_of(limits=LIMITS)))
        assert [one["args"] for one in plain["applications"]] == [
            one["args"] for one in ruled["applications"]
        ]


def test_a_pattern_that_is_none_is_refused_with_its_name() -> None:
    with pytest.raises(InvalidField, match=r"limits: 'a\*b'"):
        service_config(spec_of(limits={"a*b": {}}), "blend", "team")
