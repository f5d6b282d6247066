"""The SDK, with and without an event loop, against a gateway on gRPC with a stub for an engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

import kintsugi
from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    NotFound,
    ResourceExhausted,
    Unavailable,
    UnknownField,
)
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.sdk.client import AsyncClient, Client, ClientOptions
from kintsugi.sdk.transport import SERVICE
from kintsugi.sdk.types import Answer, Delta, Key, Plain, Prefetched, Sampling, Segment, Tokens
from tests.integration.serving.gateways import Running, Setup, running

PASSAGES = ["First passage, of a handful of words.", "Second passage, of some other words."]
QUESTION = "\nQuestion: which?\nAnswer:"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture
def client(gateway: Running, request: pytest.FixtureRequest) -> Iterator[Client]:
    name = "".join(letter for letter in request.node.name if letter.isalnum())
    with Client(gateway.address, namespace=name[:100]) as opened:
        yield opened


def test_a_rag_answer_in_five_lines(client: Client) -> None:
    chunks = client.put_chunks(PASSAGES)
    assert client.prefetch(chunks).accepted == 2
    answer = client.generate(chunks, QUESTION, max_tokens=5)
    assert answer.text == "made up by a stub "
    assert (answer.outcome, answer.reason, answer.finish_reason) == ("blended", "stub", "length")
    assert answer.accounting["chunks_hit"] == 2
    assert [segment.key for segment in answer.segments] == [chunk.key for chunk in chunks]
    assert answer.segments[0].start == 1, "behind the prefix"
    assert answer.usage.cached_tokens == sum(chunk.num_tokens for chunk in chunks)


def test_a_model_answers_to_all_its_names_and_to_no_other(client: Client) -> None:
    (model,) = client.list_models()
    assert (model.id, model.aliases) == ("stub", ("org/stub",))
    for name in (model.id, *model.aliases):
        assert client.generate(PASSAGES, QUESTION, max_tokens=1, model=name).text
    with pytest.raises(NotFound, match="org/stub"):
        client.generate(PASSAGES, QUESTION, model="org/other")


def test_a_put_is_idempotent_and_says_so(client: Client) -> None:
    (first,) = client.put_chunks(PASSAGES[:1])
    again, other = client.put_chunks(PASSAGES)
    assert (first.state, first.new) == ("stored", True)
    assert (again.key, again.state, again.new) == (first.key, "present", False)
    assert other.state == "stored"


def test_an_accepted_put_is_stored_soon(client: Client, gateway: Running) -> None:
    (put,) = client.put_chunks(PASSAGES[:1], wait=False)
    assert (put.state, put.new) == ("accepted", True)
    assert gateway.eventually(
        lambda: any(save[1] == client._calls._namespace for save in gateway.backend.seen.saves)
    )
    chunk = client.get_chunk(put.key)
    assert chunk is not None
    assert chunk.num_tokens == put.num_tokens


def test_every_way_to_name_a_segment_is_the_same_chunk(client: Client) -> None:
    (put,) = client.put_chunks(PASSAGES[:1])
    (text,) = client.tokenize(PASSAGES[:1])
    assert text.key == put.key
    segments: list[Segment] = [PASSAGES[0], Tokens(text.token_ids), Key(put.key), put]
    answer = client.generate(segments, QUESTION)
    assert {segment.key for segment in answer.segments} == {put.key}
    plain = client.generate([Plain(PASSAGES[0])], QUESTION)
    assert [segment.key for segment in plain.segments] == [""]


def test_chunks_are_listed_described_and_deleted(client: Client) -> None:
    puts = client.put_chunks([f"Passage number {number}." for number in range(5)])
    listed = list(client.list_chunks())
    assert [chunk.key for chunk in listed] == sorted(put.key for put in puts)
    found = client.get_chunk(puts[0].key)
    assert found is not None
    assert (found.num_tokens, found.codec, found.known) == (puts[0].num_tokens, "raw", True)
    assert client.delete_chunk(puts[0].key)
    assert not client.delete_chunk(puts[0].key)
    assert client.get_chunk(puts[0].key) is None
    with pytest.raises(NotFound, match="put it again"):
        client.generate(puts, QUESTION)


def test_a_stream_yields_pieces_and_last_the_whole(client: Client) -> None:
    *deltas, last = client.stream(PASSAGES, QUESTION, max_tokens=3)
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert isinstance(last, Answer)
    assert [delta.text for delta in deltas] == ["made ", "up ", "by "]
    assert last.text == "made up by "


def test_a_stream_that_is_left_ends_in_the_engine(client: Client, gateway: Running) -> None:
    gateway.backend.delays = type(gateway.backend.delays)(token_s=0.01)
    early = gateway.backend.seen.ended_early
    stream = client.stream(PASSAGES, QUESTION, max_tokens=1000)
    next(stream)
    stream.close()
    assert gateway.eventually(lambda: gateway.backend.seen.ended_early == early + 1)
    assert gateway.eventually(lambda: gateway.backend.seen.running == 0)
    gateway.backend.delays = type(gateway.backend.delays)()


def test_errors_are_ours_and_name_what_to_change(client: Client) -> None:
    with pytest.raises(InvalidField, match="ratio"):
        client.generate(PASSAGES, QUESTION, ratio=2.0)
    with pytest.raises(InvalidField, match=r"segments\[1\]"):
        client.generate([PASSAGES[0], ""], QUESTION)
    with pytest.raises(UnknownField, match="did you mean 'ratio'"):
        client.generate(PASSAGES, QUESTION, ratoi=0.5)  # type: ignore[call-arg]
    with pytest.raises(InvalidField, match="chunks: must be a list"):
        client.put_chunks("one string")
    with pytest.raises(InvalidField, match="texts: must be a list"):
        client.tokenize("one string")
    with pytest.raises(InvalidField, match=r"timeout_s: .* above 0"):
        client.generate(PASSAGES, QUESTION, timeout_s=0)
    with pytest.raises(InvalidField, match="max_tokens: 0 is not"):
        client.generate(PASSAGES, QUESTION, max_tokens=0)


def test_nothing_is_done_about_nothing(client: Client) -> None:
    """As for a retriever that finds nothing."""
    assert (client.put_chunks([]), client.tokenize([]), client.prefetch([])) == ([], [], Prefetched((), 0))
    assert client.generate([], QUESTION).finish_reason == "length"


def test_answers_are_greedy_unless_asked(gateway: Running, client: Client) -> None:
    client.generate(PASSAGES, QUESTION, max_tokens=2)
    assert gateway.backend.seen.requests[-1].sampling == {"max_tokens": 2, "temperature": 0.0}
    client.generate(PASSAGES, QUESTION, sampling=Sampling(temperature=0.7, seed=3))
    asked = {"max_tokens": 16, "temperature": 0.7, "seed": 3}
    assert gateway.backend.seen.requests[-1].sampling == asked


def test_an_event_loop_gets_the_same(gateway: Running) -> None:
    async def ask() -> tuple[Answer, list[str]]:
        async with AsyncClient(gateway.address, namespace="async") as client:
            chunks = await client.put_chunks(PASSAGES)
            answers = await asyncio.gather(*(client.generate(chunks, QUESTION) for _ in range(20)))
            assert len({answer.text for answer in answers}) == 1
            return answers[0], [chunk.key async for chunk in client.list_chunks()]

    answer, keys = asyncio.run(ask())
    assert answer.outcome == "blended"
    assert len(keys) == 2


def test_what_is_unavailable_is_asked_again() -> None:
    with running(Setup(down=True)) as gateway, Client(gateway.address, "early") as client:
        gateway.loop.call_later(0.3, gateway.backend.come_up)
        assert client.generate(PASSAGES, QUESTION).finish_reason == "length"


def test_what_stays_unavailable_is_an_error() -> None:
    options = ClientOptions(attempts=2, retry_wait_s_max=0.01)
    with Client("127.0.0.1:1", namespace="nobody", options=options) as client, pytest.raises(Unavailable):
        client.tokenize(["text"])


@contextmanager
def failing(code: grpc.StatusCode, messages: int = 0) -> Iterator[tuple[str, list[str]]]:
    """A server that fails every call, answers after so many messages; its address, and what it was asked."""
    asked: list[str] = []

    def unary(request: bytes, context: Any) -> bytes:
        asked.append("unary")
        return bytes(context.abort(code, "by the test"))

    def stream(request: bytes, context: Any) -> Iterator[bytes]:
        asked.append("stream")
        yield from [pb.GenerateResponse(delta=pb.Delta(text="a")).SerializeToString()] * messages
        context.abort(code, "by the test")

    handlers = {
        "Tokenize": grpc.unary_unary_rpc_method_handler(unary),
        "PutChunks": grpc.unary_unary_rpc_method_handler(unary),
        "Generate": grpc.unary_stream_rpc_method_handler(stream),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", asked
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("code", "attempts"),
    [
        (grpc.StatusCode.UNAVAILABLE, 3),
        (grpc.StatusCode.INTERNAL, 1),
        (grpc.StatusCode.UNKNOWN, 1),
        (grpc.StatusCode.ABORTED, 1),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
    ],
)
def test_only_what_is_safe_is_sent_again(code: grpc.StatusCode, attempts: int) -> None:
    options = ClientOptions(attempts=3, retry_wait_s_max=0.01)
    with failing(code) as (address, asked), Client(address, "n", options=options) as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.tokenize(["a"]),
            lambda: client.put_chunks(["a"]),
            lambda: client.generate(["a"], "b"),
        ]
        for call in calls:
            asked.clear()
            with pytest.raises((Unavailable, ResourceExhausted)):
                call()
            assert len(asked) == attempts

        async def ask() -> None:
            async with AsyncClient(address, "n", options=options) as asynchronous:
                await asynchronous.tokenize(["a"])

        asked.clear()
        with pytest.raises((Unavailable, ResourceExhausted)):
            asyncio.run(ask())
        assert len(asked) == attempts


def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    options = ClientOptions(attempts=3, retry_wait_s_max=0.01)
    failures = failing(grpc.StatusCode.UNAVAILABLE, messages=1)
    with failures as (address, asked), Client(address, "n", options=options) as client:
        with pytest.raises(Unavailable):
            client.generate(["a"], "b")
        assert asked == ["stream"]


def test_the_time_limit_is_for_all_attempts() -> None:
    options = ClientOptions(timeout_s=0.3, attempts=1000, retry_wait_s_max=0.05)
    with Client("127.0.0.1:1", namespace="nobody", options=options) as client:
        began_s = time.monotonic()
        with pytest.raises((Unavailable, DeadlineExceeded)):
            client.tokenize(["text"])
        assert time.monotonic() - began_s < 5, "and not a thousand times"


def test_a_token_is_not_sent_in_the_clear() -> None:
    with pytest.raises(InvalidField, match="unencrypted"):
        Client("gateway.example:7500", namespace="n", token="kg_secret")
    Client("gateway.example:7500", "n", token="kg_secret", options=ClientOptions(tls=True)).close()
    Client("gateway.example:7500", "n", token="kg_secret", options=ClientOptions(insecure=True)).close()


def test_the_package_exports_the_sdk_without_torch() -> None:
    assert kintsugi.Client is Client
    with pytest.raises(AttributeError):
        kintsugi.Clinet  # noqa: B018
    code = "import kintsugi, sys; kintsugi.AsyncClient; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env=environment).returncode == 0
