"""Which pods are given which tokens."""

from __future__ import annotations

import json

from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.names import LABEL_ROLE
from tests.unit.operator.planned import named, objects_of, pod_templates
from tests.unit.operator.specs import secret_keys, spec_of


def test_each_client_of_the_store_is_given_its_own_token_alone() -> None:
    spec = spec_of(store={"tokensSecret": "store-access"})
    objects = objects_of(spec)
    service = named(objects, "RayService", f"acme-{EngineRevision.of(spec).name}")
    args = json.loads(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert args["store_url"].endswith(":7410?token_file=/etc/kintsugi/store-token/token")
    store = named(objects, "RayService", "acme-store")
    told = json.loads(store["spec"]["serveConfigV2"])["applications"][0]["args"]["store"]
    assert told["expert"]["tokens_file"] == "/etc/kintsugi/store-tokens/tokens.yaml"
    given: dict[str, list[tuple[str, str]]] = {}
    for template in pod_templates(objects):
        keys = secret_keys(template, "store-access")
        given.setdefault(template["metadata"]["labels"][LABEL_ROLE], []).extend(keys)
    token = [("token", "/etc/kintsugi/store-token/token")]
    assert given.pop("shard") == [("tokens.yaml", "/etc/kintsugi/store-tokens/tokens.yaml"), *token]
    assert given == {"engine": token, "gateway": token, "head": []}
