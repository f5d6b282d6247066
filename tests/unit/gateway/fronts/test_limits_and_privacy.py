"""Rules for namespaces as callers meet them over HTTP: refusals, padded answers, accounting not told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from kintsugi.core import errors
from kintsugi.core.exchange import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    RESPONSES_PATH,
    EngineDelta,
    EngineRequest,
    OpenAIHead,
)
from kintsugi.core.namespaces import NamespaceLimits, NamespacePrivacy, NamespaceRules, PrivacyExpert
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.chunks import Saver
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_answer import ANSWER_TOKENS_ASSUMED as ASSUMED
from kintsugi.gateway.fronts.openai_answer import estimate_tokens
from kintsugi.gateway.prompts import GenerateCall
from kintsugi.gateway.texts.segments import Segment
from kintsugi.store.protocol.access import Access, Caller
from tests.fakes.openai_backend import JSON, STREAM, Item, ScriptedBackend, answered, gateway_over

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
ACCOUNTING = {"outcome": "blended", "chunks_hit": 3, "ttft_ms": 7.0}
STEP_S = 0.1
HIDDEN = NamespaceRules(privacy={"acme": NamespacePrivacy(expert=PrivacyExpert(accounting=False))})


class Tokens(Access):
    """A tenant's token and the operator's, with rules beside them."""

    def __init__(self, rules: NamespaceRules) -> None:
        self.now = rules

    def caller(self, token: str | None, identities: Collection[str] = ()) -> Caller:
        return Caller("operator", ("*",)) if token == "operator" else Caller("tenant", ("acme",))

    def rules(self) -> NamespaceRules:
        return self.now


def client(backend: ScriptedBackend, rules: NamespaceRules, **gateway: Any) -> httpx.AsyncClient:
    app = HttpFront(gateway_over(backend, access=Tokens(rules), **gateway)).app
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def limited(**limits: Any) -> NamespaceRules:
    return NamespaceRules(limits={"acme": NamespaceLimits(**limits)})


@pytest.mark.parametrize(
    ("limits", "says"), [({"requests_per_s": 0.05}, "requests a second"), ({"tokens_per_s": 10}, "tokens a")]
)
def test_a_tenant_beyond_its_limit_is_told_when_to_come_back(limits: dict[str, float], says: str) -> None:
    async def body() -> None:
        async with client(ScriptedBackend(), limited(**limits)) as caller:
            statuses = [await caller.post(CHAT_PATH, json={**CHAT, "max_tokens": 40}) for _ in range(3)]
            assert [one.status_code for one in statuses] == [200, 429, 429]
            assert says in statuses[1].json()["error"]["message"]
            assert 1 <= int(statuses[1].headers["retry-after"]) <= 60
            operator = {"authorization": "Bearer operator", "x-kintsugi-namespace": "other"}
            assert (await caller.post(CHAT_PATH, json=CHAT, headers=operator)).status_code == 200
            metrics = (await caller.get("/metrics")).text
            (name,) = limits
            assert (
                f'kintsugi_gateway_namespace_refused_total{{limit="{name}",namespace="acme"}} 2.0' in metrics
            )
            assert f'kintsugi_gateway_namespace_limit{{namespace="acme",resource="{name}"}}' in metrics
            assert 'namespace="other"' not in metrics

    run(body)


def test_somebody_elses_limit_is_not_charged_by_a_caller_who_may_not_use_it() -> None:
    async def body() -> None:
        rules = NamespaceRules(limits={"victim": NamespaceLimits(requests_per_s=0.01)})
        async with client(ScriptedBackend(), rules) as caller:
            for _ in range(3):
                refused = await caller.post(CHAT_PATH, json=CHAT, headers={"x-kintsugi-namespace": "victim"})
                assert refused.status_code == 403
            owner = {"authorization": "Bearer operator", "x-kintsugi-namespace": "victim"}
            assert (await caller.post(CHAT_PATH, json=CHAT, headers=owner)).status_code == 200

    run(body)


def test_rules_beside_the_tokens_count_before_the_services_and_are_read_again() -> None:
    async def body() -> None:
        tokens = Tokens(limited(concurrent=7))
        service = {**limited(concurrent=1).limits, "other": NamespaceLimits(concurrent=2)}
        gateway = gateway_over(ScriptedBackend(), access=tokens, rules=NamespaceRules(limits=service))
        assert gateway.rules().limits_of("acme") == NamespaceLimits(concurrent=7)
        assert gateway.rules().limits_of("other") == NamespaceLimits(concurrent=2)
        tokens.now = NamespaceRules()
        assert gateway.rules().limits_of("acme") == NamespaceLimits(concurrent=1)
        gateway.set_rules(NamespaceRules())
        assert gateway.rules().limits_of("acme") is None
        await gateway.close()

    run(body)


def test_engines_are_asked_for_no_more_than_their_places() -> None:
    async def body() -> None:
        backend = ScriptedBackend(lambda call: [JSON, 0.02, b"{}"])
        async with client(backend, NamespaceRules(), engine_places=1) as caller:
            answers = [asyncio.create_task(caller.post(CHAT_PATH, json=CHAT)) for _ in range(3)]
            while not backend.calls:
                await asyncio.sleep(0.001)
            assert len(backend.calls) - len(backend.closed) == 1
            assert [(await answer).status_code for answer in answers] == [200] * 3

    run(body)


def piece(**more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": "x"}}], **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}


@pytest.mark.parametrize("token", ["tenant", "operator"])
def test_what_was_cached_is_told_to_those_who_may_know(token: str) -> None:
    told: dict[str, Any] = {"usage": USAGE, "kv_transfer_params": {"kintsugi": ACCOUNTING, "more": 1}}
    whole = json.dumps(told).encode()
    streamed: list[Item] = [STREAM, piece(), piece(**told), b"data: [DONE]\n\n"]
    scripts: dict[str, list[Item]] = {CHAT_PATH: streamed, COMPLETIONS_PATH: [JSON, whole]}

    async def body() -> None:
        backend = ScriptedBackend(lambda call: scripts[call.path])
        headers = {"authorization": f"Bearer {token}", "x-kintsugi-namespace": "acme"}
        async with client(backend, HIDDEN) as caller:
            for path in scripts:
                text = (await caller.post(path, json={**CHAT, "prompt": "x"}, headers=headers)).text
                assert ("chunks_hit" in text) == (token == "operator")
                assert ("cached_tokens" in text) == (token == "operator")
                assert '"prompt_tokens"' in text.replace(" ", "")
        if token == "tenant":
            assert '"more"' in text

    run(body)


@pytest.mark.parametrize(
    ("name", "value"), [("shared", "victim"), ("chunk_tokens_multiple", 2), ("discover", True)]
)
def test_callers_do_not_choose_whose_chunks_they_read(name: str, value: object) -> None:
    async def body() -> None:
        async with client(ScriptedBackend(), NamespaceRules()) as caller:
            refused = await caller.post(CHAT_PATH, json={**CHAT, "kintsugi": {name: value}})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == f"kintsugi.{name}"

    run(body)


def test_a_namespaces_privacy_reaches_the_engine() -> None:
    async def body() -> None:
        rules = NamespaceRules(
            privacy={"acme": NamespacePrivacy(shared="docs", expert=PrivacyExpert(chunk_tokens_multiple=16))}
        )
        backend = ScriptedBackend()
        async with client(backend, rules) as caller:
            await caller.post(CHAT_PATH, json=CHAT)
        (call,) = backend.calls
        assert (call.params.shared, call.params.chunk_tokens_multiple) == ("docs", 16)
        assert KintsugiParams.from_mapping(call.params.to_mapping()["kintsugi"]) == call.params

    run(body)


def test_prompts_of_a_namespace_that_is_left_out_are_not_measured() -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        rules = NamespaceRules(privacy={"acme*": NamespacePrivacy(expert=PrivacyExpert(learn=False))})
        async with client(backend, rules) as caller:
            await caller.post(CHAT_PATH, json=CHAT)
            await caller.post(CHAT_PATH, json=CHAT, headers={"x-tenant-id": "one"})
            other = {"authorization": "Bearer operator", "x-kintsugi-namespace": "other"}
            await caller.post(CHAT_PATH, json=CHAT, headers=other)
        assert [call.params.learn for call in backend.calls] == [False, False, True]

    run(body)


@pytest.mark.parametrize(
    ("privacy", "discovers"),
    [
        (NamespacePrivacy(), False),
        (NamespacePrivacy(shared="docs"), True),
        (NamespacePrivacy(shared="docs", discover=False), False),
        (NamespacePrivacy(discover=True), True),
    ],
)
def test_chunks_are_discovered_where_a_rule_or_a_namespace_of_ones_own_allows_it(
    privacy: NamespacePrivacy, discovers: bool
) -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        async with client(backend, NamespaceRules(privacy={"acme": privacy})) as caller:
            await caller.post(CHAT_PATH, json={**CHAT, "kintsugi": {"no_store": True}})
        (call,) = backend.calls
        assert (call.params.discover, call.params.no_store) == (discovers, True)
        assert KintsugiParams.from_mapping(call.params.to_mapping()["kintsugi"]) == call.params

    run(body)


def test_texts_that_a_shared_namespace_knows_are_found() -> None:
    text = "a passage of the shared corpus that is long enough to be found"

    async def body() -> None:
        rules = NamespaceRules(privacy={"acme": NamespacePrivacy(shared="docs")})
        gateway = gateway_over(ScriptedBackend(), access=Tokens(rules))
        gateway.known.remember("docs", ChunkKey(bytes(32)), [1, 2], text)
        message = f"Use this: {text}"
        assert gateway.find_known_texts("acme", message) == [(10, len(message))]
        assert gateway.find_known_texts("docs", message) == [(10, len(message))]
        assert gateway.find_known_texts("other", message) == []
        await gateway.close()

    run(body)


async def _time_s(caller: httpx.AsyncClient) -> float:
    began_s = time.perf_counter()
    assert (await caller.post(CHAT_PATH, json=CHAT)).status_code == 200
    return time.perf_counter() - began_s


def test_a_whole_answer_is_as_late_as_its_first_token_is() -> None:
    """Rounding the whole time up would tell, across a step, how early the first token was."""
    rules = NamespaceRules(
        privacy={"acme": NamespacePrivacy(expert=PrivacyExpert(ttft_step_ms=STEP_S * 1e3))}
    )

    async def body() -> None:
        for first_s, total_s in ((0.01, 0.04), (0.07, 0.1)):
            text = answered("fine", {**ACCOUNTING, "ttft_ms": first_s * 1e3})
            items: list[Item] = [total_s, *text]
            backend = ScriptedBackend(lambda call: items)  # noqa: B023
            async with client(backend, rules) as caller:
                took_s = await _time_s(caller)
            assert took_s >= STEP_S + total_s - first_s - 0.005

    run(body)


def test_streams_begin_at_the_step_whatever_was_cached() -> None:
    rules = NamespaceRules(
        privacy={"acme": NamespacePrivacy(expert=PrivacyExpert(ttft_step_ms=STEP_S * 1e3))}
    )

    async def body() -> None:
        for first_s in (0.0, 0.05):
            items: list[Item] = [STREAM, first_s, piece(), piece()]
            backend = ScriptedBackend(lambda call: items)  # noqa: B023
            async with client(backend, rules) as caller:
                assert await _time_s(caller) >= STEP_S

    run(body)


@pytest.mark.parametrize(
    ("path", "request_body", "expected"),
    [
        (COMPLETIONS_PATH, {"prompt": "x" * 400, "max_tokens": 5}, (101, 5)),
        (COMPLETIONS_PATH, {"prompt": [1, 2, 3], "max_tokens": 5}, (3, 5)),
        (COMPLETIONS_PATH, {"prompt": [[1, 2], [3]], "max_tokens": 5, "n": 2}, (3, 20)),
        (COMPLETIONS_PATH, {"prompt": ["x" * 40, "y" * 40]}, (22, 2 * ASSUMED)),
        (CHAT_PATH, {"messages": [{"content": "x" * 40}], "max_completion_tokens": 7}, (11, 7)),
        (
            CHAT_PATH,
            {"messages": [{"content": [{"text": "x" * 40}]}], "max_tokens": 1},
            (11, 1),
        ),
        (CHAT_PATH, {"messages": "no list", "n": "two", "max_tokens": -5}, (2, 0)),
        (CHAT_PATH, {"documents": [{"text": "x" * 40}, "y" * 40], "messages": [], "max_tokens": 1}, (22, 1)),
        (RESPONSES_PATH, {"instructions": "x" * 40, "input": "y" * 40, "max_output_tokens": 9}, (22, 9)),
        (
            RESPONSES_PATH,
            {"input": [{"output": "x" * 40}, {"arguments": "y" * 40}]},
            (22, ASSUMED),
        ),
        # What a path does not read counts for nothing.
        (RESPONSES_PATH, {"input": "q", "max_tokens": 1, "max_output_tokens": 3000}, (1, 3000)),
        (CHAT_PATH, {"messages": [], "input": "x" * 400, "max_output_tokens": 0}, (0, ASSUMED)),
        (CHAT_PATH, {"messages": [], "prompt": [[1]] * 9, "max_tokens": 2}, (0, 2)),
    ],
)
def test_what_a_request_may_cost_is_estimated(
    path: str, request_body: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert estimate_tokens(path, request_body) == expected


def test_retry_after_crosses_grpc() -> None:
    from kintsugi.store.protocol.grpc_status import RETRY_AFTER, abort_call, error_of_call

    class Context:
        metadata: tuple[tuple[str, str], ...] = ()

        def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
            self.metadata = metadata

        async def abort(self, code: Any, details: str) -> None:
            self.code_, self.details_ = code, details

        def code(self) -> Any:
            return self.code_

        def details(self) -> str:
            return self.details_

        def trailing_metadata(self) -> Any:
            return self.metadata

    context = Context()
    asyncio.run(abort_call(context, errors.ResourceExhausted("too much", 3.2)))
    assert dict(context.metadata)[RETRY_AFTER] == "4"
    read = error_of_call(context, "here")
    assert isinstance(read, errors.ResourceExhausted)
    assert read.retry_after_s == 4


def _refused_by_engine(call: Any) -> list[Item]:
    return [OpenAIHead(400, "application/json"), b'{"error": {}}']


@pytest.mark.parametrize(
    "script", [lambda call: answered("fine"), _refused_by_engine, lambda call: [errors.Unavailable("gone")]]
)
def test_a_number_that_no_answer_reaches_does_not_use_up_a_rate(script: Any) -> None:
    """Or one request would keep all callers of a namespace out for as long as it likes."""

    async def body() -> None:
        backend = ScriptedBackend(script)
        async with client(backend, limited(tokens_per_s=10_000)) as caller:
            assert (await caller.get("/readyz")).status_code == 200
            for huge in (10**400, 10**15):
                asked = await caller.post(CHAT_PATH, json={**CHAT, "max_tokens": huge})
                assert asked.status_code in (200, 400, 503)
            backend.script = lambda call: answered("fine")
            assert (await caller.post(CHAT_PATH, json={**CHAT, "max_tokens": 1})).status_code == 200

    run(body)


@pytest.mark.parametrize(
    ("usage", "used"),
    [
        (USAGE, 11),
        ({"prompt_tokens": 9, "completion_tokens": 5000}, 5009),
        ({"prompt_tokens": 9}, 9),
        ({"prompt_tokens": "9"}, None),
        ({"completion_tokens": -(10**9)}, None),
        (None, None),
    ],
)
def test_a_whole_answer_is_charged_what_it_says_it_used(usage: Any, used: int | None) -> None:
    """The request does not bound its answer, so it was first charged for an answer of assumed length."""

    async def body() -> None:
        whole = json.dumps({"choices": [], "usage": usage}).encode()
        gateway = gateway_over(
            ScriptedBackend(lambda call: [JSON, whole]), access=Tokens(limited(tokens_per_s=10_000))
        )
        transport = httpx.ASGITransport(HttpFront(gateway).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as caller:
            assert (await caller.post(CHAT_PATH, json=CHAT)).status_code == 200
        (account,) = gateway.shares.accounts
        assert account.tokens_charged > ASSUMED
        expected = account.tokens_charged if used is None else used
        assert account.tokens_charged - account.tokens_unused == expected
        await gateway.close()

    run(body)


@pytest.mark.parametrize(("status", "is_charged"), [(400, False), (404, False), (503, False), (500, True)])
def test_an_answer_that_failed_behind_an_engine_is_charged(status: int, is_charged: bool) -> None:
    """Or whoever finds a request of which no answer can be made computes for nothing."""

    async def body() -> None:
        head = OpenAIHead(status, "application/json")
        gateway = gateway_over(
            ScriptedBackend(lambda call: [head, b'{"error": {}}']),
            access=Tokens(limited(tokens_per_s=10_000)),
        )
        transport = httpx.ASGITransport(HttpFront(gateway).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as caller:
            assert (await caller.post(CHAT_PATH, json=CHAT)).status_code == status
        (account,) = gateway.shares.accounts
        assert (account.tokens_unused < account.tokens_charged) == is_charged
        await gateway.close()

    run(body)


def test_a_request_that_got_nothing_is_charged_nothing() -> None:
    """An engine that refused it, none that answered, or no room in the queue."""

    async def body() -> None:
        scripts: list[list[Item]] = [_refused_by_engine(None), [errors.Unavailable("gone")], [JSON, b"{}"]]
        backend = ScriptedBackend()
        rules = limited(tokens_per_s=100)
        async with client(backend, rules, engine_places=1) as caller:
            await caller.get("/readyz")
            most = {**CHAT, "max_tokens": 190}
            for script in scripts:
                backend.script = lambda call: script  # noqa: B023
                assert (await caller.post(CHAT_PATH, json=most)).status_code in (400, 503, 200)
            assert len(backend.calls) == 1 + 2 + 1

    run(body)


def test_prefetch_does_not_tell_what_is_hidden() -> None:
    async def body() -> None:
        gateway = gateway_over(ScriptedBackend(), access=Tokens(HIDDEN))
        tenant, operator = Caller("tenant", ("acme",)), Caller("operator", ("*",))
        key = ChunkKey(bytes(32))
        with pytest.raises(errors.PermissionDenied, match="named by key"):
            await gateway.prefetch(tenant, "acme", [Segment(key=key)])
        with pytest.raises(errors.NotFound):
            await gateway.prefetch(operator, "acme", [Segment(key=key)])
        gateway._store.run = AsyncMock(return_value=1)  # type: ignore[method-assign]
        assert (await gateway.prefetch(tenant, "acme", [Segment(text="guess")]))[1] == 0
        assert (await gateway.prefetch(operator, "acme", [Segment(text="guess")]))[1] == 1
        await gateway.close()

    run(body)


def test_what_is_shorter_than_a_chunk_is_never_saved_as_one() -> None:
    async def body() -> None:
        rules = NamespaceRules(
            privacy={"acme": NamespacePrivacy(expert=PrivacyExpert(chunk_tokens_multiple=16))}
        )
        gateway = gateway_over(ScriptedBackend(), rules=rules)
        found = await gateway.prompts.learn_texts("acme", ["short", "long enough for one chunk"])
        assert [len(tokens) for _, tokens in found] == [16]
        await gateway.close()

    run(body)


class Refusing(ScriptedBackend):
    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        raise errors.InvalidField("max_tokens", "must be positive")


def test_an_answer_of_fewer_than_no_tokens_does_not_fill_a_rate() -> None:
    async def body() -> None:
        gateway = gateway_over(Refusing(), rules=limited(tokens_per_s=100))
        call = GenerateCall("acme", (), Segment(text="hello"), {"max_tokens": -(10**6)})
        with pytest.raises(errors.InvalidField, match="positive"):
            _ = [event async for event in gateway.generate(Caller("tenant", ("acme",)), call)]
        (account,) = gateway.shares.accounts
        assert account.tokens_charged > 0
        assert account.tokens_unused == account.tokens_charged
        await gateway.close()

    run(body)


def test_a_put_that_found_no_room_is_charged_nothing() -> None:
    async def body() -> None:
        gateway = gateway_over(ScriptedBackend(), rules=limited(tokens_per_s=100))
        gateway._saver = Saver(gateway.backend, waiting_tokens_max=0)
        for _ in range(3):
            with pytest.raises(errors.ResourceExhausted, match="wait to be prefilled"):
                await gateway.put_chunks(Caller("tenant", ("acme",)), "acme", [Segment(text="x" * 150)])
        await gateway.close()

    run(body)
