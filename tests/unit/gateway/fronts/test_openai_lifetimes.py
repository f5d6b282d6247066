"""How long what is stored on behalf of an OpenAI request is kept, if it is stored at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, SaveOutcome
from kintsugi.core.spaces import TokenIds
from kintsugi.gateway.fill import FillConfig
from kintsugi.gateway.fronts.http import HttpFront
from tests.fakes.openai_backend import ScriptedBackend, answered, gateway_over
from tests.unit.gateway.fronts.test_http import error_of, post, run

PASSAGE = "a passage that no store has"
QUESTION = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": PASSAGE, "kintsugi": {"chunk": True}}]}
    ]
}


@dataclass
class MissingBackend(ScriptedBackend):
    """Answers that it lacked a chunk, and notes with which lifetime it is asked to save what."""

    saves: asyncio.Queue[tuple[list[TokenIds], float | None]] = field(default_factory=asyncio.Queue)

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        self.saves.put_nowait((list(chunks), ttl_s))
        return [SaveOutcome(is_saved=True)] * len(chunks)


@pytest.mark.parametrize(
    ("own", "ttl_s"), [({"ttl_s": 3600}, 3600.0), ({"ttl_s": 0.5}, 0.5), ({"ttl_s": None}, None), ({}, None)]
)
def test_a_requests_lifetime_reaches_the_engine_and_what_is_filled_for_it(
    own: dict[str, Any], ttl_s: float | None
) -> None:
    async def body() -> None:
        backend = MissingBackend(lambda call: answered("fine", {"chunks_missed": 1}))
        gateway = gateway_over(backend, fill=FillConfig(sights=1))
        transport = httpx.ASGITransport(HttpFront(gateway).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as caller:
            response = await caller.post(CHAT_PATH, json={**QUESTION, "kintsugi": own})
        assert response.status_code == 200
        (call,) = backend.calls
        assert call.params.ttl_s == ttl_s, "of what the engine discovers in the prompt"
        assert "kintsugi" not in call.body
        assert await backend.saves.get() == ([TokenIds.of([ord(letter) for letter in PASSAGE])], ttl_s)
        await gateway.close()

    run(body)


def test_nothing_of_a_request_that_says_no_store_is_saved_when_it_missed() -> None:
    async def body() -> None:
        backend = MissingBackend(lambda call: answered("fine", {"chunks_missed": 1}))
        gateway = gateway_over(backend, fill=FillConfig(sights=1))
        transport = httpx.ASGITransport(HttpFront(gateway).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as caller:
            for passage, own in (("one of them", {"no_store": True}), ("the other one", {})):
                part = {"type": "text", "text": passage, "kintsugi": {"chunk": True}}
                message = {"role": "user", "content": [part]}
                response = await caller.post(CHAT_PATH, json={"messages": [message], "kintsugi": own})
                assert response.status_code == 200
        (saved,), _ = await backend.saves.get()
        assert saved == TokenIds.of([ord(letter) for letter in "the other one"])
        assert backend.saves.empty()
        await gateway.close()

    run(body)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
@pytest.mark.parametrize(
    ("ttl_s", "param", "sentence"),
    [
        (
            0,
            "kintsugi.ttl_s",
            "0.0 must be above 0 and at most 315360000 seconds (ten years); leave it out to keep chunks",
        ),
        (
            -1.5,
            "kintsugi.ttl_s",
            "-1.5 must be above 0 and at most 315360000 seconds (ten years); leave it out to keep",
        ),
        (
            1e9,
            "kintsugi.ttl_s",
            "at most 315360000 seconds (ten years); leave it out to keep chunks until they are evicted",
        ),
        ("3600", "kintsugi.ttl_s", "number"),
        (True, "kintsugi.ttl_s", "number"),
    ],
)
def test_an_impossible_lifetime_is_refused_with_what_to_do(
    ttl_s: object, param: str, sentence: str, path: str
) -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        asked = {"messages": [], "prompt": "x", "kintsugi": {"ttl_s": ttl_s}}
        response = await post(backend, asked, path)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert sentence in error_of(response)["message"]
        assert backend.calls == []

    run(body)
