"""What routers ask over HTTP."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from threading import current_thread
from typing import Any

import httpx
import pytest

from kintsugi.core.namespaces import (
    NamespacePrivacy,
    NamespaceRules,
    PrivacyExpert,
)
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.requests import RESIDENCY_PATH
from kintsugi.gateway.texts.segments import Segment
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.access import ANYONE, Access, Caller, Verb
from tests.fakes.stub_backend import StubBackend
from tests.unit.gateway.fronts.test_http import error_of, run

TEXTS = [
    "A first passage that is long enough to be found wherever a message holds it.",
    "A second passage that is long enough to be found wherever a message holds it.",
]
OTHER = "A third passage that nobody has put, long enough to be found in a message."


class Tokens(Access):
    """One token may list, and the other one may only generate."""

    def caller(self, token: str | None, identities: Collection[str] = ()) -> Caller:
        verbs = frozenset({Verb.GENERATE}) if token == "blind" else frozenset(Verb)
        return Caller("one", ("docs", "other"), verbs)


def open_gateway(**more: Any) -> Gateway:
    store = RamStore()
    return Gateway(StubBackend(store=store), store, lambda text: [ord(one) for one in text], **more)


def client(gateway: Gateway, token: str = "seeing", namespace: str = "docs") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {token}", "x-kintsugi-namespace": namespace}
    transport = httpx.ASGITransport(HttpFront(gateway).app)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


async def put(gateway: Gateway, namespace: str = "docs") -> list[str]:
    puts = await gateway.put_chunks(ANYONE, namespace, [Segment(text=text) for text in TEXTS])
    return [one.key.hex for one in puts]


def test_a_prompts_chunks_are_found_where_they_lie() -> None:
    async def body() -> None:
        gateway = open_gateway(access=Tokens())
        keys = await put(gateway)
        prompt = f"{TEXTS[1]}\n{OTHER}\n{TEXTS[0]}\nWhy?"
        marked = {"type": "text", "text": OTHER, "kintsugi": {"chunk": True}}
        asked: list[tuple[dict[str, Any], list[int | None]]] = [
            ({"messages": [{"role": "user", "content": prompt}]}, [1, 0]),
            ({"prompt": prompt}, [1, 0]),
            ({"messages": [{"role": "user", "content": [marked]}]}, [None]),
            ({"chunks": [TEXTS[0], OTHER]}, [0, None]),
            ({"keys": [keys[1], "ab" * 32]}, [1, None]),
            ({"prompt": "Why?"}, []),
            # Only an engine finds what stands in token ids.
            ({"prompt": [ord(one) for one in prompt]}, [1, 0]),
        ]
        async with client(gateway) as caller:
            for question, expected in asked:
                answer = (await caller.post(RESIDENCY_PATH, json=question)).json()
                assert answer["exact"] is False
                chunks = answer["chunks"]
                assert [one["resident"] for one in chunks] == [place is not None for place in expected]
                resident = [one for one in chunks if one["resident"]]
                there = [place for place in expected if place is not None]
                assert [one["key"] for one in resident] == [keys[place] for place in there]
                assert {(one["tier"], one["namespace"]) for one in resident} <= {("ram", "docs")}
                assert answer["resident_tokens"] == sum(len(TEXTS[place]) for place in there)
                assert sum(one["resident_tokens"] for one in answer["shards"]) == answer["resident_tokens"]
        await gateway.close()

    run(body)


async def discovered(gateway: Gateway, namespace: str, texts: Sequence[str]) -> list[str]:
    """Store chunks as an engine does that discovers them: the gateway is not told. Their keys."""
    backend = gateway.backend
    assert isinstance(backend, StubBackend)
    chunks = [TokenIds.of([ord(one) for one in text]) for text in texts]
    outcomes = await backend.save("s", namespace, chunks)
    assert all(one.is_saved for one in outcomes)
    return [ChunkKey.of(backend.space(namespace), chunk).hex for chunk in chunks]


def test_discovered_chunks_are_found_in_a_prompt_that_declares_none() -> None:
    prompt = f"{TEXTS[1]}\n{OTHER}\n{TEXTS[0]}\n{TEXTS[1]}\nWhy?"

    async def body() -> None:
        gateway = open_gateway(access=Tokens())
        keys = await discovered(gateway, "docs", TEXTS)
        theirs = await discovered(gateway, "other", [OTHER])
        async with client(gateway) as caller:
            for question in ({"messages": [{"role": "user", "content": prompt}]}, {"prompt": prompt}):
                answer = (await caller.post(RESIDENCY_PATH, json=question)).json()
                assert [one["key"] for one in answer["chunks"]] == [keys[1], keys[0]], "each once"
                assert {(one["resident"], one["tier"], one["namespace"]) for one in answer["chunks"]} == {
                    (True, "ram", "docs")
                }
                assert answer["resident_tokens"] == answer["chunk_tokens"] == sum(map(len, TEXTS))
            narrowed = {"x-tenant-id": "acme", "x-kintsugi-namespace": "docs"}
            answer = (await caller.post(RESIDENCY_PATH, json={"prompt": prompt}, headers=narrowed)).json()
            assert answer["chunks"] == [], "a part has chunks of its own"
            gateway.set_rules(NamespaceRules(privacy={"docs": NamespacePrivacy(shared="other")}))
            answer = (await caller.post(RESIDENCY_PATH, json={"prompt": prompt})).json()
            found = [(one["namespace"], one["key"]) for one in answer["chunks"]]
            assert found == [("docs", keys[1]), ("other", theirs[0]), ("docs", keys[0])]
        await gateway.close()

    run(body)


def test_a_prompt_with_declared_chunks_is_not_searched_for_others() -> None:
    """Nor is it when it is answered."""
    part = {"type": "text", "text": OTHER, "kintsugi": {"chunk": True}}
    message = {"role": "user", "content": [part, {"type": "text", "text": TEXTS[0]}]}

    async def body() -> None:
        gateway = open_gateway(access=Tokens())
        await discovered(gateway, "docs", TEXTS[:1])
        async with client(gateway) as caller:
            answer = (await caller.post(RESIDENCY_PATH, json={"messages": [message]})).json()
        assert [one["resident"] for one in answer["chunks"]] == [False]
        assert searched(gateway) == 0
        await gateway.close()

    run(body)


def test_no_engine_answers_is_no_empty_answer() -> None:
    async def body() -> None:
        gateway = open_gateway(access=Tokens())
        async with client(gateway) as caller:
            assert (await caller.post(RESIDENCY_PATH, json={"prompt": "Why?"})).json()["chunks"] == []
            gateway.backend.down = True  # type: ignore[attr-defined]
            assert (await caller.post(RESIDENCY_PATH, json={"prompt": "Why?"})).status_code == 503
        await gateway.close()

    run(body)


def searched(gateway: Gateway) -> int:
    """How many prompts engines have searched."""
    assert isinstance(gateway.backend, StubBackend)
    return len(gateway.backend.seen.searched)


def test_residency_is_told_to_nobody_who_may_not_list() -> None:
    async def body() -> None:
        hidden = NamespaceRules(privacy={"docs": NamespacePrivacy(expert=PrivacyExpert(accounting=False))})
        cases: list[tuple[dict[str, Any], str]] = [({}, "blind"), ({"rules": hidden}, "seeing")]
        for more, token in cases:
            gateway = open_gateway(access=Tokens(), **more)
            await put(gateway)
            async with client(gateway, token) as caller:
                for text in (TEXTS[0], "Why?"):
                    answer = await caller.post(RESIDENCY_PATH, json={"prompt": text})
                    assert answer.status_code == 403, "whether or not a chunk is known"
                    assert searched(gateway) == 0
            await gateway.close()

    run(body)


def test_nothing_is_told_of_another_namespace() -> None:
    async def body() -> None:
        gateway = open_gateway(access=Tokens())
        keys = await put(gateway)
        async with client(gateway, namespace="other") as caller:
            answer = (await caller.post(RESIDENCY_PATH, json={"keys": keys})).json()
            assert not any(one["resident"] for one in answer["chunks"])
            narrowed = {"x-tenant-id": "acme", "x-kintsugi-namespace": "docs"}
            answer = (await caller.post(RESIDENCY_PATH, json={"chunks": TEXTS}, headers=narrowed)).json()
            assert not any(one["resident"] for one in answer["chunks"])
            named = {"x-kintsugi-namespace": "third"}
            assert (await caller.post(RESIDENCY_PATH, json={"keys": keys}, headers=named)).status_code == 403
        await gateway.close()

    run(body)


def test_a_shared_namespaces_chunks_are_found_with_where_they_are() -> None:
    async def body() -> None:
        rules = NamespaceRules(privacy={"docs": NamespacePrivacy(shared="other")})
        gateway = open_gateway(access=Tokens(), rules=rules)
        await put(gateway, "other")
        async with client(gateway) as caller:
            answer = (await caller.post(RESIDENCY_PATH, json={"chunks": TEXTS})).json()
        assert [(one["resident"], one["namespace"]) for one in answer["chunks"]] == [(True, "other")] * 2
        await gateway.close()

    run(body)


def test_the_answer_is_padded_where_first_tokens_are() -> None:
    async def body() -> None:
        rules = NamespaceRules(privacy={"docs": NamespacePrivacy(expert=PrivacyExpert(ttft_step_ms=200))})
        gateway = open_gateway(access=Tokens(), rules=rules)
        await put(gateway)
        async with client(gateway) as caller:
            for text in (TEXTS[0], OTHER):
                began_s = time.perf_counter()
                assert (await caller.post(RESIDENCY_PATH, json={"chunks": [text]})).status_code == 200
                assert time.perf_counter() - began_s >= 0.2
        await gateway.close()

    run(body)


def test_what_an_engine_finds_does_not_show_in_when_the_answer_comes() -> None:
    """The step grows with the prompt, whatever of it is stored."""
    rules = NamespaceRules(
        privacy={"docs": NamespacePrivacy(expert=PrivacyExpert(ttft_step_us_per_token=1000))}
    )

    async def body() -> None:
        gateway = open_gateway(access=Tokens(), rules=rules)
        await discovered(gateway, "docs", TEXTS[:1])
        async with client(gateway) as caller:
            for text in (TEXTS[0], OTHER):
                prompt = f"{text}{'?' * (300 - len(text))}"
                began_s = time.perf_counter()
                assert (await caller.post(RESIDENCY_PATH, json={"prompt": prompt})).status_code == 200
                assert time.perf_counter() - began_s >= 0.3
        await gateway.close()

    run(body)


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ({}, "body"),
        ({"prompt": "a", "keys": []}, "body"),
        ({"chunks": "a"}, "chunks"),
        ({"keys": [1]}, "keys[0]"),
        ({"keys": ["xy"]}, "keys[0]"),
        ({"chunks": ["a"] * 1025}, "chunks"),
    ],
)
def test_a_bad_question_names_its_field(question: dict[str, Any], field: str) -> None:
    async def body() -> None:
        gateway = open_gateway(access=Tokens())
        async with client(gateway) as caller:
            answer = await caller.post(RESIDENCY_PATH, json=question)
        assert (answer.status_code, error_of(answer)["param"]) == (400, field)
        await gateway.close()

    run(body)


def test_a_large_question_is_parsed_and_searched_beside_the_others() -> None:
    async def body() -> None:
        gateway = open_gateway(access=Tokens())
        threads: list[str] = []
        find = gateway.find_known_texts
        gateway.find_known_texts = lambda *asked: (threads.append(current_thread().name), find(*asked))[1]  # type: ignore[method-assign]
        async with client(gateway) as caller:
            for text in ("short", "long" * 30_000):
                assert (await caller.post(RESIDENCY_PATH, json={"prompt": text})).status_code == 200
        assert [name == current_thread().name for name in threads] == [True, False]
        await gateway.close()

    run(body)
