"""The HTTP front end over a scripted engine; what depends on a connection goes over a real one."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kintsugi.core import errors
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, OpenAICall
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway import chunks as gateway_chunks
from kintsugi.gateway.chunks import ToSave
from kintsugi.gateway.fill import FillConfig
from kintsugi.gateway.fronts import limits
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.gateway.gateway import GatewayLimits
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.store.protocol.access import Access, Caller
from tests.fakes.openai_backend import JSON, STREAM, Item, ScriptedBackend, answered, gateway_over
from tests.recorded_spans import recorded

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
DEADLINE_S = 20.0


class Tokens(Access):
    """Two callers, by the names of their tokens."""

    def caller(self, token: str | None, identities: Collection[str] = ()) -> Caller:
        match token:
            case "one":
                return Caller("one", ("acme",))
            case "many":
                return Caller("many", ("acme", "docs/*"))
            case _:
                raise errors.Unauthenticated("no such token")


def client(backend: ScriptedBackend, access: Access | None = None, **gateway: Any) -> httpx.AsyncClient:
    app = HttpFront(gateway_over(backend, access=access, **gateway)).app
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@asynccontextmanager
async def listening(backend: ScriptedBackend) -> AsyncIterator[str]:
    server = HttpServer(HttpFront(gateway_over(backend)).app, "127.0.0.1", 0)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await body()

    asyncio.run(bounded())


def scripted(*items: Item) -> ScriptedBackend:
    return ScriptedBackend(lambda call: items)


async def post(backend: ScriptedBackend, body: Any, path: str = CHAT_PATH, **more: Any) -> httpx.Response:
    async with client(backend) as http_client:
        return await http_client.post(path, json=body, **more)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == response.status_code
    return error


def test_answers_pass_through() -> None:
    async def body() -> None:
        backend = ScriptedBackend(lambda call: answered(call.path))
        for path in (CHAT_PATH, COMPLETIONS_PATH):
            response = await post(backend, {"messages": [], "prompt": "x"}, path)
            assert response.json()["choices"][0]["text"] == path
            assert response.headers["x-request-id"] == backend.calls[-1].request_id
        given = await post(backend, CHAT, headers={"x-request-id": "mine-1", **TRACE})
        assert given.headers["x-request-id"] == "mine-1"
        assert backend.calls[-1].trace == TRACE
        await post(backend, CHAT, headers={"x-request-id": "not one\tof ours"})
        assert len(backend.calls[-1].request_id) == 32

    run(body)


def test_engines_are_asked_for_times_by_those_who_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the caller has its request traced."""
    times = {"timeline": [], "began_unix_s": 1.5}

    async def body() -> None:
        backend = ScriptedBackend(lambda call: answered("fine", {"outcome": "blended", **times}))
        await post(backend, CHAT, headers=TRACE)
        assert not backend.calls[-1].params.timeline
        for own in ("timeline", "explain"):
            asked = await post(backend, {**CHAT, "kintsugi": {own: True}}, headers=TRACE)
            assert asked.json()["kv_transfer_params"]["kintsugi"] == {"outcome": "blended", **times}

    with recorded(monkeypatch):
        run(body)


def test_streams_pass_through_piece_by_piece() -> None:
    async def body() -> None:
        backend = scripted(STREAM, b"data: 1\n\n", 0.02, b"data: [DONE]\n\n")
        async with listening(backend) as address, httpx.AsyncClient() as caller:
            url = f"http://{address}{CHAT_PATH}"
            async with caller.stream("POST", url, json={**CHAT, "stream": True}) as response:
                assert response.headers["content-type"] == "text/event-stream"
                pieces = [piece async for piece in response.aiter_raw()]
        assert pieces == [b"data: 1\n\n", b"data: [DONE]\n\n"]
        assert backend.finished

    run(body)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidField("ratio", "no"), 400),
        (errors.NotFound("x"), 404),
        (errors.ResourceExhausted("x"), 429),
        (errors.DeadlineExceeded("x"), 504),
        (errors.Unavailable("x"), 503),
        (errors.Corrupted("x"), 500),
    ],
)
def test_errors_have_their_status(error: errors.KintsugiError, status: int) -> None:
    async def body() -> None:
        response = await post(scripted(error), CHAT)
        assert response.status_code == status
        assert error_of(response)["message"] == str(error)
        assert ("retry-after" in response.headers) == (status in (429, 503))

    run(body)


def test_a_defect_is_logged_and_not_explained(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        response = await post(scripted(KeyError("a secret")), CHAT, headers={"x-request-id": "r-7"})
        assert response.status_code == 500
        assert "r-7" in error_of(response)["message"]
        assert "secret" not in response.text
        assert "KeyError" in caplog.text

    run(body)


@pytest.mark.parametrize("said", [[], [STREAM], [JSON]])
def test_an_engine_that_did_not_answer_is_asked_again_once(said: list[Item]) -> None:
    """vLLM has a stream's head ready when the request begins to wait: it is no answer yet."""

    async def body() -> None:
        tried: list[str] = []

        def script(call: OpenAICall) -> Sequence[Item]:
            tried.append(call.request_id)
            return [*said, errors.Unavailable("gone")] if len(tried) == 1 else answered("second")

        response = await post(ScriptedBackend(script), CHAT)
        assert response.json()["choices"][0]["text"] == "second"
        assert len(tried) == 2

    run(body)


def test_a_stream_that_no_engine_begins_has_an_errors_status() -> None:
    async def body() -> None:
        backend = scripted(STREAM, errors.Unavailable("gone"))
        response = await post(backend, CHAT)
        assert (response.status_code, error_of(response)["message"]) == (503, "gone")
        assert len(backend.calls) == 2
        empty = await post(scripted(STREAM), CHAT)
        assert (empty.status_code, empty.headers["content-type"]) == (200, "text/event-stream")

    run(body)


def test_a_stream_that_breaks_says_so_in_its_last_event() -> None:
    async def body() -> None:
        backend = scripted(STREAM, b"data: 1\n\n", errors.Unavailable("the engine died"))
        response = await post(backend, CHAT)
        events = response.text.strip().split("\n\n")
        assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 503
        assert events[2] == "data: [DONE]"
        assert len(backend.calls) == 1

    run(body)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe\xfa", "not JSON"),
        (b"[" * 200_000, "nested more than 100 levels"),
        (b'{"input": ' + b"[" * 100 + b"]" * 100 + b"}", "nested more than 100 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (
            b'{"kintsugi": {"namespace": "a", "n\\u0061mespace": "b"}}',
            "'namespace' occurs twice in an object",
        ),
        (b'{"kintsugi": {}, "kintsugi": {"namespace": "b"}}', "'kintsugi' occurs twice in an object"),
        (b'{"temperature": -1e999}', "-1e999 exceeds every number"),
        (b'{"temperature": 1' + b"0" * 400 + b"}", "exceeds every number"),
    ],
)
def test_bodies_that_are_no_json_object(raw: bytes, message: str) -> None:
    async def body() -> None:
        async with client(ScriptedBackend()) as caller:
            response = await caller.post(CHAT_PATH, content=raw)
            assert response.status_code == 400
            assert message in error_of(response)["message"]
            assert (await caller.post(CHAT_PATH, json=CHAT)).status_code == 200

    run(body)


@pytest.mark.parametrize(
    ("raw", "field", "problem"),
    [
        (b'{"x": ["a", "\\ud800"]}', "x[1]", "half of a surrogate pair at character 0"),
        (b'{"kintsugi": {"\\uDC00": 1}}', "kintsugi", "half of a surrogate pair"),
        (b'{"x": "\xed\xa0\x80"}', "body", "'utf-8' codec"),
        (b'{"x": NaN}', "body", "NaN is not a JSON number"),
    ],
)
def test_half_a_surrogate_pair_is_no_text(raw: bytes, field: str, problem: str) -> None:
    async def body() -> None:
        backend = scripted(*answered("fine"))
        async with client(backend) as caller:
            refused = await caller.post(CHAT_PATH, content=raw)
            assert (refused.status_code, error_of(refused)["param"]) == (400, field)
            assert problem in error_of(refused)["message"]
            whole = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
            assert (await caller.post(CHAT_PATH, content=whole)).status_code == 200

    run(body)


def test_nobody_goes_before_others() -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        urgent = {**CHAT, "priority": -1}
        refused = await post(backend, urgent)
        assert (refused.status_code, error_of(refused)["param"], backend.calls) == (400, "priority", [])

    run(body)


def test_a_time_limit_of_the_engines_is_not_the_bodys() -> None:
    async def body() -> None:
        assert (await post(scripted(TimeoutError("ray")), CHAT)).status_code == 500

    run(body)


def test_ten_thousand_chunks_are_refused() -> None:
    async def body() -> None:
        response = await post(ScriptedBackend(), {**CHAT, "documents": [f"d{i}" for i in range(10_000)]})
        assert response.status_code == 400
        assert "4096 chunks" in error_of(response)["message"]

    run(body)


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused_and_not_kept(declared: bool) -> None:
    """100 MB: the caller reads 413, memory stays, and the next request is served."""

    async def body() -> None:
        size, piece = 100 << 20, b" " * (1 << 20)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(size // len(piece)):
                yield piece

        backend = ScriptedBackend()
        headers = {"content-length": str(size)} if declared else {}
        async with listening(backend) as address, httpx.AsyncClient(timeout=DEADLINE_S) as caller:
            url = f"http://{address}{CHAT_PATH}"
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            response = await caller.post(url, content=pieces(), headers=headers)
            grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) >> 10
            assert response.status_code == 413
            assert f"{GatewayLimits().message_bytes_max >> 20} MiB" in error_of(response)["message"]
            assert grown_mib < 4 * (GatewayLimits().message_bytes_max >> 20)
            assert (await caller.post(url, json=CHAT)).status_code == 200

    run(body)


def test_all_bodies_together_are_bounded() -> None:
    async def body() -> None:
        backend = scripted(0.05, *answered("slow"))
        async with client(backend, limits=GatewayLimits(messages_bytes_max=3000)) as caller:
            large = {"messages": [{"role": "user", "content": "x" * 1000}]}
            responses = await asyncio.gather(*(caller.post(CHAT_PATH, json=large) for _ in range(4)))
            assert sorted(response.status_code for response in responses) == [200, 200, 429, 429]
            assert (await caller.post(CHAT_PATH, json=large)).status_code == 200

    run(body)


def test_requests_in_flight_are_bounded() -> None:
    async def body() -> None:
        limits = GatewayLimits(http_concurrent_max=2)
        async with client(scripted(0.05, *answered("slow")), limits=limits) as caller:
            responses = await asyncio.gather(*(caller.post(CHAT_PATH, json=CHAT) for _ in range(3)))
            assert sorted(response.status_code for response in responses) == [200, 200, 429]

    run(body)


def test_a_body_that_does_not_come_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr(limits, "BODY_READ_S", 0.05)
        async with listening(ScriptedBackend()) as address:
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"POST {CHAT_PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{".encode()
            )
            assert b"408" in await reader.readline()
            writer.close()

    run(body)


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_that_leaves_ends_the_work(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        begun = asyncio.Event()

        def script(call: OpenAICall) -> Sequence[Item]:
            begun.set()
            return [STREAM, b"data: 1\n\n", DEADLINE_S] if stream else [DEADLINE_S, *answered("late")]

        backend = ScriptedBackend(script)
        async with listening(backend) as address:
            async with httpx.AsyncClient() as caller:
                request = asyncio.create_task(caller.post(f"http://{address}{CHAT_PATH}", json=CHAT))
                await begun.wait()
                request.cancel()
            while not backend.closed:
                await asyncio.sleep(0.01)
            assert not backend.finished
            left = f'kintsugi_gateway_requests_total{{method="{CHAT_PATH}",status="499"}} 1.0'
            async with httpx.AsyncClient() as caller:
                while left not in (await caller.get(f"http://{address}/metrics")).text:
                    await asyncio.sleep(0.01)

    run(body)
    assert "Traceback" not in caplog.text


def test_a_caller_that_leaves_before_the_body_came_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with listening(ScriptedBackend()) as address, httpx.AsyncClient() as caller:
            host, port = address.split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"POST {CHAT_PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{".encode()
            )
            await writer.drain()
            writer.close()
            left = f'kintsugi_gateway_requests_total{{method="{CHAT_PATH}",status="499"}} 1.0'
            while left not in (await caller.get(f"http://{address}/metrics")).text:
                await asyncio.sleep(0.01)

    run(body)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("token", "header", "named", "status", "namespace"),
    [
        ("one", None, None, 200, "acme"),
        ("one", "acme", None, 200, "acme"),
        ("one", "other", None, 403, None),
        ("one", None, "other", 403, None),
        ("many", None, None, 400, None),
        ("many", "docs/a", None, 200, "docs/a"),
        ("many", None, "docs/b", 200, "docs/b"),
        ("many", "docs/a", "docs/b", 400, None),
        ("none", "acme", None, 401, None),
        (None, None, None, 401, None),
    ],
)
def test_who_may_use_which_namespace(
    token: str | None, header: str | None, named: str | None, status: int, namespace: str | None
) -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        headers |= {"x-kintsugi-namespace": header} if header else {}
        request = {**CHAT, "kintsugi": {"namespace": named}} if named else CHAT
        async with client(backend, Tokens()) as caller:
            response = await caller.post(CHAT_PATH, json=request, headers=headers)
            assert response.status_code == status
            assert [call.params.namespace for call in backend.calls] == ([namespace] if namespace else [])
            models = await caller.get("/v1/models", headers=headers)
            assert models.status_code == (401 if token in (None, "none") else 200)

    run(body)


def test_a_strangers_body_is_not_read() -> None:
    async def body() -> None:
        async with client(ScriptedBackend(), Tokens()) as caller:
            assert (await caller.post(CHAT_PATH, content=b"{")).status_code == 401

    run(body)


def test_without_tokens_clients_that_name_nothing_share_a_namespace() -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        await post(backend, CHAT)
        assert backend.calls[0].params.namespace == "default"

    run(body)


def test_chunks_that_were_computed_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a passage that is long enough to be found"
    question = {"messages": [{"role": "user", "content": f"{text}: why?"}]}

    async def body() -> None:
        missed: list[tuple[str, tuple[TokenIds, ...]]] = []
        accounting: dict[str, object] = {"chunks_hit": 1, "tokens_hit": 5, "tokens_missed": 0}
        backend = ScriptedBackend(lambda call: answered("fine", accounting))
        known = KnownChunks()
        known.remember("acme", ChunkKey(bytes(32)), (1, 2), text)
        gateway = gateway_over(backend, access=Tokens(), known=known, fill=FillConfig())
        assert gateway._filler is not None

        async def suspect(namespace: str, chunks: Sequence[ToSave], ttl_s: float | None) -> None:
            missed.append((namespace, tuple(tokens for _, tokens in chunks)))

        monkeypatch.setattr(gateway._filler, "suspect", suspect)
        transport = httpx.ASGITransport(HttpFront(gateway).app)

        async def ask(caller: httpx.AsyncClient) -> int:
            """How many of the answers so far were handed on."""
            headers = {"authorization": "Bearer one"}
            assert (await caller.post(CHAT_PATH, json=question, headers=headers)).status_code == 200
            await asyncio.gather(*gateway.answers._follow_ups)
            return len(missed)

        async with httpx.AsyncClient(transport=transport, base_url="http://test") as caller:
            assert await ask(caller) == 0
            accounting["tokens_missed"] = 3
            backend.info_error = errors.Unavailable("whatever becomes of it, the answer is out")
            assert await ask(caller) == 0
            backend.info_error = None
            monkeypatch.setattr(gateway_chunks, "RECENT_S", 0.0)
            assert await ask(caller) == 1
            assert missed == [("acme", (TokenIds.of([ord(letter) for letter in text]),))]
            accounting |= {"outcome": "declined", "chunks_hit": 0, "tokens_missed": 0}
            assert await ask(caller) == 2
            metrics = (await caller.get("/metrics")).text
        assert 'kintsugi_gateway_chunk_tokens_total{result="missed"} 6.0' in metrics
        assert f'kintsugi_gateway_requests_total{{method="{CHAT_PATH}",status="200"}} 4.0' in metrics
        await gateway.close()

    run(body)


def test_models_and_health(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr(gateway_chunks, "RECENT_S", 0.0)
        backend = ScriptedBackend()
        async with client(backend) as caller:
            (model,) = (await caller.get("/v1/models")).json()["data"]
            assert (model["id"], model["kintsugi"]["blending"]) == ("scripted", "on")
            assert (await caller.get("/readyz")).status_code == 200
            backend.info_error = errors.Unavailable("no engine is up")
            ready = await caller.get("/readyz")
            assert (ready.status_code, ready.json()["reason"]) == (503, "no engine is up")
            for path in ("/healthz", "/health"):
                assert (await caller.get(path)).status_code == 200
            assert (await caller.get("/v1/models")).status_code == 503
            for response, status in (
                (await caller.get("/v1/nothing"), 404),
                (await caller.get(CHAT_PATH), 405),
            ):
                assert response.status_code == status
                assert "POST /v1/chat/completions" in error_of(response)["message"]

    run(body)


def test_an_address_in_use_is_said() -> None:
    async def body() -> None:
        async with listening(ScriptedBackend()) as address:
            other = HttpServer(HttpFront(gateway_over(ScriptedBackend())).app, "127.0.0.1", int(address[10:]))
            with pytest.raises(errors.Unavailable, match="free it"):
                await other.start()
            await other.stop()

    run(body)


def test_a_response_that_broke_after_its_head_is_cut_off() -> None:
    """There is no valid end to it; the connection's is the only true one."""

    async def body() -> None:
        backend = scripted(JSON, b'{"half":', errors.Unavailable("the engine died"))
        async with listening(backend) as address, httpx.AsyncClient() as caller:
            with pytest.raises(httpx.RemoteProtocolError):
                await caller.post(f"http://{address}{CHAT_PATH}", json=CHAT)

    run(body)
