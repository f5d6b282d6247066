"""What is said to an API server, and what its answers mean."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi_operator.controller.cluster import (
    BLEND_SERVICE,
    CLAIM,
    POD,
    RAY_CLUSTER,
    ApiServer,
    Refused,
    parse_list,
)
from kintsugi_operator.controller.cluster import SERVICE as SERVICE_KIND
from tests.unit.operator.conversation import Conversation, held

SERVICE: dict[str, Any] = {
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
    metadata = {"name": "acme", "namespace": "team", "resourceVersion": "7"}
    live = {"kind": "BlendService", "metadata": {**metadata, "labels": {"a": "b"}}, "spec": {}}
    talk(conversation, lambda server: server.apply_status(live, {"phase": "Running"}))
    assert conversation.asked[0].path == path
    written = {"apiVersion": "kintsugi.dev/v1alpha1", "kind": "BlendService", "metadata": metadata}
    assert conversation.asked[0].body == {**written, "status": {"phase": "Running"}}


def test_lists_are_read_to_their_end() -> None:
    path = "/api/v1/namespaces/team/pods"
    items = [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]
    page = {"metadata": {"resourceVersion": "7"}, "items": items}
    conversation = Conversation({("GET", path): (200, page)})
    found = talk(conversation, lambda server: server.list(POD, "team", {"kintsugi.dev/service": "acme"}))
    assert [one["metadata"]["name"] for one in found] == ["a", "b"]
    assert found[0]["kind"] == "Pod"
    assert conversation.asked[0].query == {"labelSelector": "kintsugi.dev/service=acme"}


def test_what_is_not_there_is_none() -> None:
    assert talk(Conversation(), lambda server: server.get(BLEND_SERVICE, "team", "acme")) is None
    assert talk(Conversation(), lambda server: server.list(CLAIM, "team", {})) == []
    assert talk(Conversation(), lambda server: server.delete(CLAIM, "team", "gone")) is None


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


def test_nobody_there_is_unavailable() -> None:
    async def main() -> None:
        conversation = Conversation()
        async with held(conversation) as client:
            client.configuration.host = "http://127.0.0.1:9"
            with pytest.raises(Unavailable, match="does not answer"):
                await ApiServer(client).get(POD, "team", "p")

    asyncio.run(main())


def test_each_request_is_counted_by_its_verb_and_what_is_stored_is_told() -> None:
    path = "/api/v1/namespaces/team/services/acme-grpc"
    stored = {**SERVICE, "metadata": {**SERVICE["metadata"], "resourceVersion": "7"}}
    conversation = Conversation({("GET", path): (200, SERVICE), ("PATCH", path): (200, stored)})
    verbs: list[str] = []
    told: list[Any] = []

    async def main() -> None:
        async with held(conversation) as client:
            server = ApiServer(client, verbs.append, told.append)
            await server.get(SERVICE_KIND, "team", "acme-grpc")
            await server.list(POD, "team", {})
            assert told == []
            await server.apply(SERVICE)
            await server.merge(SERVICE_KIND, "team", "acme-grpc", {})

    asyncio.run(main())
    assert verbs == ["get", "list", "patch", "patch"]
    assert told == [stored, stored]


def test_a_first_list_comes_from_the_cache_and_spans_namespaces() -> None:
    page = {"metadata": {"resourceVersion": "9"}, "items": [{"metadata": {"name": "a"}}]}
    conversation = Conversation({("GET", "/api/v1/pods"): (200, page)})
    found: list[Any] = []
    assert talk(conversation, lambda server: server.scan(POD, "", "app", "0", found.append)) == 9
    assert found == [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}]
    (asked,) = conversation.asked
    assert asked.query == {"labelSelector": "app", "resourceVersion": "0"}
    with pytest.raises(Refused):
        talk(Conversation(), lambda server: server.scan(POD, "", "", "0", found.append))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_list_is_parsed_however_it_is_cut(size: int) -> None:
    items = [{"name": 'ä"items":[]', "spec": {"items": [1, {"b": "]"}]}}, {"name": "€"}]
    texts = [json.dumps({"metadata": {"v": "1"}, "items": items}, ensure_ascii=False, indent=None)]
    texts.append(json.dumps({"items": items, "metadata": {"v": "1"}}, ensure_ascii=False, indent=1))
    texts.append(texts[0].replace(" ", ""))
    for text in texts:
        assert parse(text.encode(), size) == [*((one, True) for one in items), (REST, False)]
    assert parse(b'{"metadata": {"v": "1"}, "items": []}', size) == [(REST, False)]
    assert parse(b'{"metadata": {"v": "1"}, "items": null}', size) == [({**REST, "items": None}, False)]
    with pytest.raises(Unavailable, match="cut off"):
        parse(texts[0].encode()[:-20], size)


REST = {"metadata": {"v": "1"}, "items": []}


def parse(text: bytes, size: int) -> list[tuple[Any, bool]]:
    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(text), size):
            yield text[begin : begin + size]

    async def main() -> list[tuple[Any, bool]]:
        return [one async for one in parse_list(pieces())]

    return asyncio.run(main())


def test_events_come_until_the_watch_ends_and_an_error_is_raised() -> None:
    path = "/api/v1/namespaces/team/pods"
    added = {"type": "ADDED", "object": {"metadata": {"name": "a" * 200_000}}}
    error = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version: 3"}}
    conversation = Conversation(events={path: [added, error]})
    seen: list[Any] = []

    async def follow(server: ApiServer) -> None:
        async for event in server.watch(POD, "team", "app", "3"):
            seen.append(event)

    with pytest.raises(Refused, match="too old") as caught:
        talk(conversation, follow)
    assert caught.value.status == 410
    assert seen == [added]
    (asked,) = conversation.asked
    assert asked.query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "600",
        "labelSelector": "app",
        "resourceVersion": "3",
    }
