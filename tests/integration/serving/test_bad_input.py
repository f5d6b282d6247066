"""What clients get wrong: the standard status, a message that says what to change, and the next is served."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kintsugi.core.deploy import GatewaySpec, GatewaySpecExpert
from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.gateway.fronts.grpc_server import GatewayServer
from kintsugi.gateway.gateway import GatewayLimits
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.sdk.client import Client, ClientOptions
from kintsugi.store.protocol.access import TokenFile
from kintsugi.store.protocol.grpc_status import ERROR_METADATA
from tests.fakes.stub_backend import StubDelays
from tests.integration.serving.gateways import Running, Setup, bundled_tokenize, running, token_file

NAMESPACE = "tenant"
SERVICE = "/kintsugi.rpc.v1.Kintsugi"
QUESTION = pb.Content(text="Why?")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(Setup(max_model_len=512)) as started:
        yield started


@pytest.fixture
def channel(gateway: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(gateway.address) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _the_next_request_is_served(gateway: Running) -> Iterator[None]:
    yield
    with Client(gateway.address, NAMESPACE) as client:
        assert client.generate(["a b"], "c").finish_reason == "length"
    assert gateway.eventually(lambda: gateway.backend.seen.running == 0)


def refusal(channel: grpc.Channel, method: str, data: bytes) -> tuple[grpc.StatusCode, str, str]:
    """Status, message and the name of our error, of a call with these bytes."""
    kind = channel.unary_stream if method == "Generate" else channel.unary_unary
    call = kind(f"{SERVICE}/{method}", None, None)
    with pytest.raises(grpc.RpcError) as caught:
        list(call(data, timeout=20)) if method == "Generate" else call(data, timeout=20)
    error = caught.value
    name = dict(tuple(entry) for entry in error.trailing_metadata() or ()).get(ERROR_METADATA, "")
    return error.code(), error.details() or "", name


def generate(**fields: object) -> bytes:
    values: dict[str, Any] = {"namespace": NAMESPACE, "question": QUESTION, **fields}
    data: bytes = pb.GenerateRequest(**values).SerializeToString()
    return data


@pytest.mark.parametrize("method", ["Generate", "PutChunk", "PutChunks", "Tokenize", "ListChunks"])
def test_malformed_protobuf_is_the_clients_mistake(channel: grpc.Channel, method: str) -> None:
    code, details, name = refusal(channel, method, b"\xff\xff not protobuf")
    assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidField")
    assert "kintsugi.rpc.v1." in details


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no namespace": ({"namespace": ""}, "namespace: is mandatory"),
    "a namespace that is none": ({"namespace": "a b"}, "namespace"),
    "no question": ({"question": pb.Content()}, "question: is mandatory"),
    "an empty question": ({"question": pb.Content(text="")}, "question: has no tokens"),
    "an empty segment": ({"segments": [pb.Segment()]}, r"segments[0]: is empty"),
    "a segment without tokens": ({"segments": [pb.Segment(tokens=pb.TokenIds())]}, "segments[0]: has no tok"),
    "a key that is none": ({"segments": [pb.Segment(chunk_key="xyz")]}, "segments[0].chunk_key"),
    "a document id that is none": (
        {"segments": [pb.Segment(document=pb.DocumentChunk(corpus="c"))]},
        "segments[0].document.document_id: must have",
    ),
    "a ratio that is none": ({"ratio": 1.5}, "ratio: 1.5 is outside [0, 1]"),
    "a ratio that is no number": ({"ratio": float("nan")}, "ratio"),
    "a selector that is none": ({"selector": "best"}, "selector: 'best' is not one of"),
    "JSON that is none": ({"sampling": pb.Sampling(extra_json="{")}, "sampling.extra_json: is not JSON"),
    "JSON too deep": (
        {"sampling": pb.Sampling(extra_json="[" * 60_000)},
        "sampling.extra_json: is nested more than 100 levels deep",
    ),
    "JSON too long": ({"sampling": pb.Sampling(extra_json=" " * 70_000)}, "at most 65536 are allowed"),
    "JSON of another kind": (
        {"sampling": pb.Sampling(extra_json="[1]")},
        "sampling.extra_json: must be a JSON object, not list",
    ),
    "an unknown field in JSON": (
        {"sampling": pb.Sampling(extra_json='{"temprature": 1}')},
        "did you mean 'temperature'",
    ),
    "half a surrogate pair in JSON": (
        {"sampling": pb.Sampling(extra_json='{"\\ud800": 1}')},
        "sampling.extra_json: has half of a surrogate pair",
    ),
    "a prompt beyond the context": (
        {"segments": [pb.Segment(tokens=pb.TokenIds(ids=[5] * 510))]},
        "the model reads 512 in all: send fewer segments",
    ),
    "segments beyond the context": (
        {"segments": [pb.Segment(tokens=pb.TokenIds(ids=[5] * 300))] * 2},
        "segments: 600 tokens up to segments[1]; at most 512 are allowed",
    ),
    "an answer beyond the context": (
        {"sampling": pb.Sampling(max_tokens=512)},
        "sampling.max_tokens: 512 is too many; the model reads 512",
    ),
    "10,000 segments": (
        {"segments": [pb.Segment(text="x")] * 10_000},
        "10000 segments; a prompt has at most 1024",
    ),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "_"))
def test_a_generate_that_cannot_be_is_refused(channel: grpc.Channel, case: str) -> None:
    fields, message = CASES[case]
    code, details, _ = refusal(channel, "Generate", generate(**fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert message in details


def test_a_chunk_nobody_knows_is_not_found(channel: grpc.Channel) -> None:
    data = generate(segments=[pb.Segment(chunk_key="00" * 32)])
    code, details, _ = refusal(channel, "Generate", data)
    assert code is grpc.StatusCode.NOT_FOUND
    assert "send its text or tokens once" in details


def test_a_corpus_is_not_found_without_a_ledger(channel: grpc.Channel) -> None:
    document = pb.DocumentChunk(corpus="docs", document_id="a", index=0)
    code, details, _ = refusal(channel, "Generate", generate(segments=[pb.Segment(document=document)]))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "precompute ledger" in details


def test_a_chunk_of_another_space_is_refused(gateway: Running, channel: grpc.Channel) -> None:
    other = ChunkSpace(ModelFingerprint.of({"weights": "another model"}), NAMESPACE)
    key = ChunkKey.of(other, (1, 2, 3))
    gateway.gateway.known.remember(NAMESPACE, key, (1, 2, 3))
    code, details, name = refusal(channel, "Generate", generate(segments=[pb.Segment(chunk_key=key.hex)]))
    assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidField")
    assert "belongs to another chunk space" in details


def test_a_chunk_of_another_namespace_is_not_found(gateway: Running) -> None:
    with Client(gateway.address, "theirs") as client:
        (put,) = client.put_chunks(["a secret passage"])
    with grpc.insecure_channel(gateway.address) as channel:
        data = generate(segments=[pb.Segment(chunk_key=put.key)])
        assert refusal(channel, "Generate", data)[0] is grpc.StatusCode.NOT_FOUND
        get = pb.GetChunkRequest(namespace=NAMESPACE, key=put.key).SerializeToString()
        assert refusal(channel, "GetChunk", get)[0] is grpc.StatusCode.NOT_FOUND


def test_a_refused_request_pushes_out_nothing_that_is_known(gateway: Running, channel: grpc.Channel) -> None:
    known = len(gateway.gateway.known)
    news = [pb.Segment(text="a passage that nobody sent before"), pb.Segment(tokens=pb.TokenIds(ids=[5, 6]))]
    for data in (
        generate(segments=[*news, pb.Segment(chunk_key="00" * 32)]),
        generate(segments=[*news, pb.Segment(tokens=pb.TokenIds(ids=[7] * 510))]),
        generate(segments=news, priority=-1),
        generate(segments=news, sampling=pb.Sampling(extra_json='{"heat": 1}')),
    ):
        refusal(channel, "Generate", data)
    chunks = [pb.Content(text=news[0].text), pb.Content(tokens=pb.TokenIds(ids=[7] * 511))]
    data = pb.PutChunksRequest(namespace=NAMESPACE, chunks=chunks).SerializeToString()
    refusal(channel, "PutChunks", data)
    assert len(gateway.gateway.known) == known
    with Client(gateway.address, NAMESPACE) as client:
        client.generate([news[0].text], "why?")
    assert len(gateway.gateway.known) == known + 1


def test_a_chunk_that_the_model_cannot_take_is_refused(channel: grpc.Channel) -> None:
    chunk = pb.Content(tokens=pb.TokenIds(ids=[7] * 511))
    data = pb.PutChunksRequest(namespace=NAMESPACE, chunks=[chunk]).SerializeToString()
    code, details, _ = refusal(channel, "PutChunks", data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "chunks[0]: has 511 tokens; this model takes 510: cut it" in details
    chunks = [pb.Content(text="x")] * 1025
    data = pb.PutChunksRequest(namespace=NAMESPACE, chunks=chunks).SerializeToString()
    assert "send at most 1024" in refusal(channel, "PutChunks", data)[1]


def test_a_page_that_is_none_is_refused(channel: grpc.Channel) -> None:
    for fields, message in (({"page_size": 5000}, "page_size"), ({"page_token": "later"}, "page_token")):
        data = pb.ListChunksRequest(namespace=NAMESPACE, **fields).SerializeToString()
        code, details, _ = refusal(channel, "ListChunks", data)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message in details


def test_a_message_of_100_mb_is_refused_in_bounded_memory(channel: grpc.Channel) -> None:
    data = generate(segments=[pb.Segment(text="x" * (100 << 20))])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        code, details, _ = refusal(channel, "Generate", data)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in details
    # Client and server share this process: one copy on its way may be the client's.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 400 << 10


def test_bytes_that_are_no_http2_hurt_nobody(gateway: Running) -> None:
    host, port = gateway.address.rsplit(":", 1)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 10_000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff" * 50):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(data)


_LEAVER = """
import sys, time
from kintsugi import Client

client = Client(sys.argv[1], sys.argv[2])
streams = [client.stream(["a b c"], "d", max_tokens=400) for _ in range(10)]
for stream in streams:
    next(stream)
print("ready", flush=True)
time.sleep(60)
"""


def test_clients_that_are_killed_end_the_work(gateway: Running) -> None:
    gateway.backend.delays = StubDelays(token_s=0.05)
    early = gateway.backend.seen.ended_early
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _LEAVER, gateway.address, NAMESPACE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        assert gateway.backend.seen.running == 10
        client.kill()
    assert gateway.eventually(lambda: gateway.backend.seen.ended_early == early + 10)
    gateway.backend.delays = StubDelays()


def test_a_deadline_ends_the_work(gateway: Running) -> None:
    gateway.backend.delays = StubDelays(first_token_s=30.0)
    early = gateway.backend.seen.ended_early
    options = ClientOptions(attempts=1)
    with Client(gateway.address, NAMESPACE, options=options) as client, pytest.raises(DeadlineExceeded):
        client.generate(["a b c"], "d", timeout_s=0.3)
    gateway.backend.delays = StubDelays()
    assert gateway.eventually(lambda: gateway.backend.seen.ended_early == early + 1)


def test_requests_beyond_the_bound_are_refused_at_once() -> None:
    setup = Setup(delays=StubDelays(token_s=0.05), gateway={"limits": GatewayLimits(concurrent_max=2)})
    with running(setup) as gateway, grpc.insecure_channel(gateway.address) as channel:
        with Client(gateway.address, NAMESPACE) as client:
            streams = [client.stream(["a"], "b", max_tokens=200) for _ in range(2)]
            for stream in streams:
                next(stream)
            assert refusal(channel, "Generate", generate())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            for stream in streams:
                stream.close()
        assert gateway.eventually(lambda: gateway.backend.seen.running == 0)


def test_tokens_bind_callers_to_their_namespaces(tmp_path: Path) -> None:
    path, tokens = token_file(tmp_path, ("ours", ("ours", "ours/*")))
    with running(Setup(gateway={"access": TokenFile(path)})) as gateway:
        with Client(gateway.address, "ours/a", token=tokens["ours"]) as client:
            client.put_chunks(["a passage"])
        with Client(gateway.address, "theirs", token=tokens["ours"]) as client:
            for call in (
                lambda: client.put_chunks(["a passage"]),
                lambda: client.generate(["a passage"], "b"),
                lambda: client.prefetch(["a passage"]),
                lambda: client.tokenize(["a passage"]),
                lambda: client.get_chunk("00" * 32),
                lambda: client.delete_chunk("00" * 32),
                lambda: list(client.list_chunks()),
            ):
                with pytest.raises(PermissionDenied, match="bound to ours, ours/"):
                    call()
        for token in (None, "kg_wrong"):
            with Client(gateway.address, "ours", token=token) as client, pytest.raises(Unauthenticated):
                client.tokenize(["a passage"])
        assert gateway.backend.seen.requests == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GatewaySpec(host="0.0.0.0", grpc_port=0), "or pass --insecure"),
        (GatewaySpec(host="", grpc_port=0), "is not host:port"),
        (
            GatewaySpec(grpc_port=0, expert=GatewaySpecExpert(tls_client_ca="ca.pem")),
            "tls_client_ca needs both",
        ),
    ],
)
def test_an_address_that_must_not_be_is_refused(gateway: Running, spec: GatewaySpec, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        GatewayServer(gateway.gateway, spec)


def test_all_requests_together_are_bounded() -> None:
    setup = Setup(delays=StubDelays(first_token_s=0.5))
    setup.gateway["limits"] = GatewayLimits(messages_bytes_max=3000)
    with running(setup) as gateway, Client(gateway.address, NAMESPACE) as client:

        def ask(_: int) -> str:
            try:
                return client.generate(["a passage " * 100], "why?", max_tokens=1).finish_reason
            except ResourceExhausted as error:
                return str(error)

        with ThreadPoolExecutor(4) as pool:
            answers = sorted(pool.map(ask, range(4)))
        refused = "too few of the 3000 bytes for requests are free; try again later"
        assert answers == ["length"] * 2 + [refused] * 2
        with pytest.raises(ResourceExhausted):
            client.tokenize(["x" * 3000])
        assert (ask(0), client.tokenize(["x"])[0].token_ids) == ("length", bundled_tokenize()("x"))
