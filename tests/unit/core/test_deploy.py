"""What a service consists of, and the Serve configuration that follows from it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.core.deploy import (
    DRAIN_S,
    END_MARGIN_S,
    ENGINE_DEPLOYMENT,
    GATEWAY_DEPLOYMENT,
    SERVICE_APP,
    SHARD_DEPLOYMENT,
    STORE_APP,
    EngineExpert,
    EngineSpec,
    GatewaySpec,
    GatewaySpecExpert,
    ModelSpec,
    Placement,
    ServiceSpec,
    StoreExpert,
    StoreSpec,
    TierSpec,
    directory_url,
    serve_config,
    service_application,
    spec_from_yaml_mapping,
    store_application,
)
from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.namespaces import NamespaceRules
from kintsugi.core.schema import load
from kintsugi.core.settings import non_default_fields

SMALL = ServiceSpec(ModelSpec("/models/llama"))


def deployments(application: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {deployment["name"]: deployment for deployment in application["deployments"]}


def test_both_applications_and_no_proxy() -> None:
    config = serve_config(SMALL)
    assert [application["name"] for application in config["applications"]] == [STORE_APP, SERVICE_APP]
    assert config["proxy_location"] == "Disabled"
    assert set(deployments(config["applications"][0])) == {SHARD_DEPLOYMENT}
    assert set(deployments(config["applications"][1])) == {ENGINE_DEPLOYMENT, GATEWAY_DEPLOYMENT}


def test_one_application_for_a_cluster_of_its_own() -> None:
    config = serve_config(SMALL, applications=(STORE_APP,))
    assert [application["name"] for application in config["applications"]] == [STORE_APP]


def specs() -> st.SearchStrategy[ServiceSpec]:
    amounts = st.floats(0.25, 64, allow_nan=False)
    engines = st.integers(1, 4).flatmap(
        lambda least: st.builds(
            EngineSpec,
            replicas=st.just(least),
            replicas_max=st.none() | st.integers(least, 8),
            cpus=amounts,
            gpus=st.sampled_from([0.0, 1.0, 8.0]),
            expert=st.sampled_from([EngineExpert(), EngineExpert(ratio=0.2, portable=False)]),
        )
    )
    stores = st.integers(1, 8).flatmap(
        lambda shards: st.builds(
            StoreSpec,
            shards=st.just(shards),
            replication=st.integers(1, shards),
            ram_gib=amounts,
            tiers=st.sampled_from([(), (TierSpec("/mnt/a", 10.0), TierSpec("/mnt/b", 100.0))]),
            data_dir=st.just("/data"),
            expert=st.builds(StoreExpert, shards_max=st.none() | st.integers(shards, 16)),
        )
    )
    gateways = st.builds(
        GatewaySpec,
        replicas=st.integers(1, 3),
        expert=st.builds(GatewaySpecExpert, fill_on_miss=st.booleans()),
    )
    return st.builds(ServiceSpec, st.just(ModelSpec("m", "n")), engines, stores, gateways)


@settings(deadline=None, max_examples=50)
@given(spec=specs(), groups=st.booleans())
def test_serve_accepts_every_configuration(spec: ServiceSpec, groups: bool) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="install the extra `serving`")
    placement = Placement(shard={"kintsugi_shard": 1.0}) if groups else Placement()
    config = serve_config(spec, placement)
    assert json.loads(json.dumps(config)) == config
    parsed = schema.ServeDeploySchema.model_validate(config)
    by_name = {app.name: {d.name: d for d in app.deployments} for app in parsed.applications}
    shard = by_name[STORE_APP][SHARD_DEPLOYMENT]
    assert shard.ray_actor_options.resources == ({"kintsugi_shard": 1.0} if groups else {})
    engine = by_name[SERVICE_APP][ENGINE_DEPLOYMENT]
    if spec.engines.replicas_max in (None, spec.engines.replicas):
        assert engine.num_replicas == spec.engines.replicas
    else:
        assert engine.autoscaling_config["max_replicas"] == spec.engines.replicas_max


def test_metrics_of_engines_listen_where_the_store_does() -> None:
    store = StoreSpec(expert=StoreExpert(host="10.0.0.7", insecure=True))
    assert service_application(ServiceSpec(ModelSpec("m"), store=store))["args"]["host"] == "10.0.0.7"


@pytest.mark.parametrize(("ratio", "told"), [(0.3, 0.3), (1.0, 1.0), (0.0, None)])
def test_shards_are_told_the_ratio_of_blends_without_a_restart(ratio: float, told: float | None) -> None:
    other = dataclasses.replace(SMALL, engines=EngineSpec(expert=EngineExpert(ratio=ratio)))
    assert store_application(other)["args"] == store_application(SMALL)["args"]
    assert deployments(store_application(other))[SHARD_DEPLOYMENT]["user_config"].get("ratio") == told
    assert "ratio" not in deployments(store_application(SMALL))[SHARD_DEPLOYMENT]["user_config"]


@given(spec=specs())
def test_what_builders_get_is_what_was_asked_for(spec: ServiceSpec) -> None:
    store = load(StoreSpec, store_application(spec)["args"]["store"])
    expert = dataclasses.replace(spec.store.expert, shards_max=None)
    assert store == dataclasses.replace(spec.store, shards=1, replication=1, expert=expert)
    told = deployments(store_application(spec))[SHARD_DEPLOYMENT]["user_config"]
    assert told["replication"] == spec.store.replication
    assert told.get("tokens_file", "") == spec.gateway.tokens_file
    service = service_application(spec)
    assert load(ModelSpec, service["args"]["model"]) == spec.model
    engines = load(EngineSpec, service["args"]["engines"])
    assert (engines.vllm, engines.expert) == (spec.engines.vllm, spec.engines.expert)
    told = deployments(service)[GATEWAY_DEPLOYMENT]["user_config"]
    assert load(GatewaySpec, told["gateway"]) == dataclasses.replace(spec.gateway, replicas=1)


def args_of(spec: ServiceSpec) -> tuple[Any, Any]:
    """What restarts replicas when it changes."""
    return store_application(spec)["args"], service_application(spec)["args"]


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SMALL, engines=EngineSpec(replicas=1, replicas_max=4, cpus=8.0)),
        dataclasses.replace(
            SMALL, store=StoreSpec(shards=4, replication=2, expert=StoreExpert(shards_max=6))
        ),
        dataclasses.replace(
            SMALL, gateway=GatewaySpec(replicas=2, expert=GatewaySpecExpert(fill_on_miss=False))
        ),
    ],
)
def test_counts_resources_and_the_gateway_restart_no_shard_and_no_engine(other: ServiceSpec) -> None:
    assert args_of(other) == args_of(SMALL)


def test_another_model_restarts_no_shard() -> None:
    other = dataclasses.replace(SMALL, model=ModelSpec("/models/other"))
    assert store_application(other) == store_application(SMALL)
    assert service_application(other)["args"] != service_application(SMALL)["args"]


def test_engines_know_the_directory_alone() -> None:
    assert service_application(SMALL)["args"]["store_url"] == "shards://127.0.0.1:7410"
    elsewhere = Placement(store_url="shards://store-head:7410")
    assert service_application(SMALL, elsewhere)["args"]["store_url"] == "shards://store-head:7410"
    tls = StoreSpec(tls_ca="/a", tls_cert="/c", tls_key="/k", expert=StoreExpert(host="::1"))
    assert directory_url(tls) == "shards://[::1]:7410?tls_ca=/a&tls_cert=/c&tls_key=/k"
    assert (
        directory_url(StoreSpec(expert=StoreExpert(token_file="/t")))
        == "shards://127.0.0.1:7410?token_file=/t"
    )
    named = dataclasses.replace(tls, expert=StoreExpert(tls_name="store"))
    assert directory_url(named).endswith("&tls_key=/k&tls_name=store")
    assert directory_url(StoreSpec(), "head") == "shards://head:7410"


def test_paths_arrive_as_they_were_written() -> None:
    store = StoreSpec(
        tls_ca="/a+b/ca", tls_cert="/a&b/50%25.crt", tls_key="/a#b/ä key=", expert=StoreExpert(tls_name="a b")
    )
    query = parse_qs(urlsplit(directory_url(store)).query, strict_parsing=True)
    assert query == {
        "tls_ca": ["/a+b/ca"],
        "tls_cert": ["/a&b/50%25.crt"],
        "tls_key": ["/a#b/ä key="],
        "tls_name": ["a b"],
    }


def test_engines_and_gateways_get_keys_and_shards_none() -> None:
    keyed = dataclasses.replace(SMALL, store=StoreSpec(expert=StoreExpert(keys_file="/k/a b.json")))
    assert store_application(keyed) == store_application(SMALL)
    url = service_application(keyed)["args"]["store_url"]
    assert parse_qs(urlsplit(url).query, strict_parsing=True) == {"keys": ["/k/a b.json"]}
    with_tls = dataclasses.replace(keyed.store, tls_ca="/a", tls_cert="/c", tls_key="/t")
    assert directory_url(with_tls).endswith("?keys=/k/a+b.json&tls_ca=/a&tls_cert=/c&tls_key=/t")


def test_replicas_may_use_all_of_their_drain_time() -> None:
    every = [deployments(made(SMALL)) for made in (store_application, service_application)]
    given = {one["graceful_shutdown_timeout_s"] for found in every for one in found.values()}
    assert given == {DRAIN_S + END_MARGIN_S}
    assert END_MARGIN_S > 2  # that Serve waits before it asks a replica to end


def test_only_what_differs_from_its_default_is_written() -> None:
    assert non_default_fields(StoreSpec()) == {}
    assert non_default_fields(StoreSpec(ram_gib=8, tiers=(TierSpec("/a", 1),), data_dir="/d"), "ram_gib") == {
        "tiers": [{"path": "/a", "gib": 1}],
        "data_dir": "/d",
    }


def test_a_configuration_file() -> None:
    values = {"model": {"path": "m"}, "store": {"tiers": [{"path": "/a", "gib": 4}], "data_dir": "/d"}}
    assert spec_from_yaml_mapping(values).store.tiers == (TierSpec("/a", 4.0),)


M = {"model": {"path": "m"}}


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({}, "config.model"),
        ({"model": {"path": ""}}, "model.path"),
        ({"model": {"path": "m", "codec": "zip"}}, "codec"),
        ({**M, "engines": {"replicas": 3, "replicas_max": 1}}, "engines.replicas_max"),
        ({**M, "engines": {"replicas": 0}}, "engines.replicas"),
        ({**M, "engines": {"cpus": -1}}, "engines.cpus"),
        ({**M, "engines": {"gpus": float("nan")}}, "engines.gpus"),
        ({**M, "engines": {"expert": {"ratio": 1.5}}}, "engines.expert.ratio"),
        ({**M, "engines": {"expert": {"ratio": "most"}}}, "config.engines.expert.ratio"),
        (
            {"model": {"path": "m"}, "engines": {"expert": {"load_deadline_ms": 0}}},
            "engines.expert.load_deadline_ms",
        ),
        ({**M, "engines": {"vllm": {"model": "x"}}}, "engines.vllm.model"),
        ({**M, "store": {"shards": 0}}, "store.shards"),
        (
            {"model": {"path": "m"}, "store": {"shards": 2, "expert": {"shards_max": 1}}},
            "store.expert.shards_max",
        ),
        ({**M, "store": {"replication": 2}}, "store.replication"),
        ({**M, "store": {"tiers": [{"path": "/a", "gib": 1}]}}, "store.data_dir"),
        ({**M, "store": {"tiers": [{"path": "", "gib": 1}]}}, "store.tiers.0.path"),
        ({**M, "store": {"tiers": [{"path": "/a", "gib": 0}]}}, "store.tiers.0.gib"),
        ({**M, "store": {"ram_gib": 0}}, "store.ram_gib"),
        ({**M, "store": {"tls_ca": "/a"}}, "store.tls"),
        ({**M, "store": {"expert": {"tokens_file": "/a"}}}, "store.expert.token_file"),
        ({**M, "store": {"expert": {"directory_port": 0}}}, "store.expert.directory_port"),
        ({**M, "gateway": {"replicas": 0}}, "gateway.replicas"),
        ({**M, "gateway": {"http_port": -1}}, "gateway.http_port"),
        (
            {"model": {"path": "m"}, "gateway": {"expert": {"engine_places": 0}}},
            "gateway.expert.engine_places",
        ),
        ({**M, "gateway": {"tls_cert": "/c"}}, "gateway.tls"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidField) as raised:
        spec_from_yaml_mapping(values)
    assert raised.value.field == where


def test_a_misspelt_key_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UnknownField, match="did you mean 'replication'") as raised:
        spec_from_yaml_mapping({"model": {"path": "m"}, "store": {"replicatoin": 2}})
    assert raised.value.field == "config.store.replicatoin"


def test_rules_for_namespaces_reach_gateways_and_shards_and_restart_nothing() -> None:
    plain = ServiceSpec(ModelSpec("/model"))
    ruled = spec_from_yaml_mapping(
        {
            "model": {"path": "/model"},
            "limits": {"acme": {"ram_gib": 2, "requests_per_s": 5}},
            "privacy": {"acme": {"expert": {"accounting": False}}},
        }
    )
    assert args_of(ruled) == args_of(plain)
    shard = deployments(store_application(ruled))[SHARD_DEPLOYMENT]["user_config"]
    gateway = deployments(service_application(ruled))[GATEWAY_DEPLOYMENT]["user_config"]
    assert shard["limits"] == gateway["limits"] == {"acme": {"ram_gib": 2.0, "requests_per_s": 5.0}}
    assert load(NamespaceRules, {name: gateway[name] for name in ("limits", "privacy")}) == ruled.rules
    assert "limits" not in deployments(store_application(plain))[SHARD_DEPLOYMENT]["user_config"]


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        ({"limits": {"a": {"request_per_s": 1}}}, "request_per_s"),
        ({"limits": {"a": {"weight": 0}}}, "weight"),
        ({"limits": {"a b": {}}}, "limits"),
        ({"limits": {"a*b": {}}}, "limits"),
        ({"privacy": {"a": {"ttft_step_ms": -1}}}, "ttft_step_ms"),
        ({"privacy": {"a": {"shared": "no such name"}}}, "shared"),
        ({"privacy": {"team*": {"shared": "team"}}}, "outside it"),
    ],
)
def test_impossible_rules_are_refused(rules: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=field.replace("*", r"\*")):
        spec_from_yaml_mapping({"model": {"path": "/model"}, **rules})


@pytest.mark.parametrize("written", ["off", '"off"', "false"])
def test_off_needs_no_quotes_in_yaml(written: str) -> None:
    values = yaml.safe_load(f"model: {{path: m}}\nengines: {{quality: {written}}}\n")
    assert spec_from_yaml_mapping(values).engines.quality == "off"
    with pytest.raises(InvalidField, match="'strict', 'balanced', 'off'"):
        spec_from_yaml_mapping({"model": {"path": "m"}, "engines": {"quality": "on"}})
