"""What is said to an API server, and what its answers mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi_operator.controller.cluster import BLEND_SERVICE, CLAIM, POD, RAY_CLUSTER, ApiServer, Refused
from kintsugi_operator.controller.cluster import SERVICE as SERVICE_KIND
from tests.unit.operator.conversation import Conversation, held

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "acme-grpc", "namespace": "team"},
    "spec": {"type": "ClusterIP"},
}


def talk(conversation: Conversation, say: Callable[[ApiServer], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with held(conversation) as client:
            return await say(ApiServer(client))

    return asyncio.run(main())


def test_applying_is_server_side_with_our_name() -> None:
    path = "/api/v1/namespaces/team/services/acme-grpc"
    conversation = Conversation({("PATCH", path): (200, {**SERVICE, "spec": {"clusterIP": "10.1.1.1"}})})
    applied = talk(conversation, lambda server: server.apply(SERVICE))
    assert applied["spec"] == {"clusterIP": "10.1.1.1"}
    (asked,) = conversation.asked
    assert asked.content_type == "application/apply-patch+yaml"
    assert asked.query == {"fieldManager": "kintsugi-operator", "force": "true"}
    assert asked.authorization == "Bearer secret"
    assert asked.body == SERVICE


def test_a_status_is_applied_to_its_subresource() -> None:
    path = "/apis/kintsugi.dev/v1alpha1/namespaces/team/blendservices/acme/status"
    conversation = Conversation({("PATCH", path): (200, {})})
    manifest = {"kind": "BlendService", "metadata": {"name": "acme", "namespace": "team"}, "status": {}}
    talk(conversation, lambda server: server.apply_status(manifest))
    assert conversation.asked[0].path == path


def test_lists_are_read_to_their_end() -> None:
    path = "/api/v1/namespaces/team/pods"

    def pages(asked: Any) -> tuple[int, Any]:
        if "continue" in asked.query:
            return 200, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]}
        return 200, {"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "a"}}]}

    conversation = Conversation({("GET", path): pages})
    found = talk(conversation, lambda server: server.list(POD, "team", {"kintsugi.dev/service": "acme"}))
    assert [one["metadata"]["name"] for one in found] == ["a", "b"]
    assert found[0]["kind"] == "Pod"
    assert conversation.asked[1].query["labelSelector"] == "kintsugi.dev/service=acme"


def test_what_is_not_there_is_none() -> None:
    assert talk(Conversation(), lambda server: server.get(BLEND_SERVICE, "team", "acme")) is None
    assert talk(Conversation(), lambda server: server.list(CLAIM, "team", {})) == []
    assert talk(Conversation(), lambda server: server.delete(CLAIM, "team", "gone")) is None
    assert talk(Conversation(), lambda server: server.list_served_kinds("ray.io/v1")) == frozenset()


def test_a_refusal_carries_the_servers_words() -> None:
    path = "/apis/ray.io/v1/namespaces/team/rayclusters/c1"
    conversation = Conversation({("PATCH", path): (422, {"message": "spec is invalid"})})
    with pytest.raises(Refused, match="spec is invalid") as caught:
        talk(conversation, lambda server: server.merge(RAY_CLUSTER, "team", "c1", {"spec": {}}))
    assert caught.value.status == 422
    assert conversation.asked[0].content_type == "application/merge-patch+json"


def test_an_eviction_may_be_forbidden_for_now() -> None:
    path = "/api/v1/namespaces/team/pods/p/eviction"
    assert talk(Conversation({("POST", path): (201, {})}), lambda server: server.evict("team", "p"))
    forbidden = Conversation({("POST", path): (429, {"message": "disruption budget"})})
    assert talk(forbidden, lambda server: server.evict("team", "p")) is False
    assert forbidden.asked[0].body["kind"] == "Eviction"
    # It is gone: nothing more to evict.
    assert talk(Conversation(), lambda server: server.evict("team", "p"))
    with pytest.raises(Refused):
        talk(Conversation({("POST", path): (403, {})}), lambda server: server.evict("team", "p"))


def test_what_is_served_is_discovered() -> None:
    resources = [{"name": "rayservices"}, {"name": "rayservices/status"}]
    conversation = Conversation({("GET", "/apis/ray.io/v1"): (200, {"resources": resources})})
    served = talk(conversation, lambda server: server.list_served_kinds("ray.io/v1"))
    assert served == {"rayservices", "rayservices/status"}


def test_nobody_there_is_unavailable() -> None:
    async def main() -> None:
        conversation = Conversation()
        async with held(conversation) as client:
            client.configuration.host = "http://127.0.0.1:9"
            with pytest.raises(Unavailable, match="does not answer"):
                await ApiServer(client).get(POD, "team", "p")

    asyncio.run(main())


def test_only_what_may_change_the_cluster_is_counted() -> None:
    path = "/api/v1/namespaces/team/services/acme-grpc"
    conversation = Conversation({("GET", path): (200, SERVICE), ("PATCH", path): (200, SERVICE)})
    writes = []

    async def main() -> None:
        async with held(conversation) as client:
            server = ApiServer(client, lambda: writes.append(1))
            await server.get(SERVICE_KIND, "team", "acme-grpc")
            assert writes == []
            await server.apply(SERVICE)
            assert writes == [1]

    asyncio.run(main())
