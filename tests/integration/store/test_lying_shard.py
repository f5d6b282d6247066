"""Shards that answer something else than they were asked: the client notices, and does not wait forever."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from kintsugi.core.errors import DeadlineExceeded, Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.interface import ChunkLost
from kintsugi.store.protocol.save_times import CLOCKS_DIFFER_S
from tests.contracts.store_contract import make_chunk

ASKED, FRAMES = make_chunk(range(40))
OTHER, OTHER_FRAMES = make_chunk(range(41))
LAYERS = range(3)
Answer = Callable[[Any, Any], Any]


class Liar:
    """A shard whose answers a test chooses by the name of the RPC."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {"Lookup": lambda request, context: look_up(ASKED)}

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        answer = self.answers.get(name)
        if answer is None:
            return None
        if name == "StreamLayers":
            return grpc.unary_stream_rpc_method_handler(answer)
        return grpc.unary_unary_rpc_method_handler(lambda *call: answer(*call).SerializeToString())


@pytest.fixture
def liar() -> Liar:
    return Liar()


@pytest.fixture
def store(liar: Liar) -> Iterator[GrpcStore]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, options=wire.CHANNEL_OPTIONS)
        server.add_generic_rpc_handlers((liar,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with closing(GrpcStore(f"127.0.0.1:{port}", GrpcOptions(same_host=False))) as store:
            yield store
        server.stop(0).wait()


def look_up(manifest: ChunkManifest) -> pb.LookupResponse:
    return pb.LookupResponse(found=[pb.Found(manifest=wire.manifest_to_wire(manifest), tier="ram")])


def message(chunk: int, layer: int, data: bytes = b"", **header: Any) -> bytes:
    frame = pb.FrameHeader(chunk=chunk, layer=layer, size_bytes=len(data), **header)
    return wire.with_payload(pb.StreamLayersResponse(frames=[frame]).SerializeToString(), [data])


def read(store: GrpcStore, deadline_s: float = 10.0) -> list[Any]:
    return list(store.stream("acme", [ASKED.key], LAYERS, HeadRange(0, 4), deadline_s))


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [(OTHER, "another chunk"), (replace(ASKED, namespace="victim"), "another namespace")],
)
def test_a_chunk_that_was_not_asked_for_is_refused(
    liar: Liar, store: GrpcStore, manifest: ChunkManifest, problem: str
) -> None:
    liar.answers["Lookup"] = lambda request, context: look_up(manifest)
    liar.answers["StreamLayers"] = lambda request, context: iter(
        [message(0, layer, frame) for layer, frame in enumerate(OTHER_FRAMES)]
    )
    for call in (lambda: store.find("acme", [ASKED.key]), lambda: read(store)):
        with pytest.raises(Unavailable, match=problem):
            call()


def test_chunks_of_another_namespace_are_not_listed(liar: Liar, store: GrpcStore) -> None:
    foreign = wire.manifest_to_wire(replace(ASKED, namespace="victim"))
    liar.answers["List"] = lambda request, context: pb.ListResponse(found=[pb.Found(manifest=foreign)])
    with pytest.raises(Unavailable, match="another namespace"):
        store.list("acme")


def test_a_page_that_comes_again_ends_a_listing(liar: Liar, store: GrpcStore) -> None:
    listed = pb.Found(manifest=wire.manifest_to_wire(ASKED), tier="ram")
    unreadable = pb.Found(manifest=pb.Manifest(format_version=99, key=ASKED.key.digest))
    for page in (pb.ListResponse(found=[listed]), pb.ListResponse(found=[unreadable])):
        liar.answers["List"] = partial(answer_with, page)
        with pytest.raises(Unavailable, match="same page"):
            store.list("acme")


def answer_with(response: Any, request: Any, context: Any) -> Any:
    return response


def endless(*messages: bytes) -> Answer:
    def answer(request: Any, context: Any) -> Iterator[bytes]:
        while context.is_active():
            yield from messages

    return answer


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (endless(b""), "other messages"),
        (endless(message(0, 0, FRAMES[0])), "out of order"),
        (endless(message(0, 1, FRAMES[1]), message(0, 0, FRAMES[0])), "out of order"),
        (endless(wire.with_payload(b"", [bytes(2 << 20)])), "other messages"),
        (lambda request, context: iter([message(0, 0, lost_reason="x" * (30 << 20))]), "other messages"),
    ],
    ids=["nothing", "one frame", "backwards", "no frames", "a long reason"],
)
def test_a_stream_without_an_end_ends(liar: Liar, store: GrpcStore, answer: Answer, problem: str) -> None:
    liar.answers["StreamLayers"] = answer
    with pytest.raises(Unavailable, match=problem):
        read(store)


def test_a_layer_that_drips_ends_at_its_deadline(liar: Liar, store: GrpcStore) -> None:
    """Each message comes in time, but not all frames of the layer."""
    keys = [replace(ASKED, key=make_chunk(range(number))[0].key) for number in range(50, 80)]

    def drip(request: Any, context: Any) -> Iterator[bytes]:
        for chunk in range(len(keys)):
            time.sleep(0.1)
            yield message(chunk, 0, FRAMES[0])

    liar.answers["Lookup"] = lambda request, context: pb.LookupResponse(
        found=[pb.Found(manifest=wire.manifest_to_wire(one), tier="ram") for one in keys]
    )
    liar.answers["StreamLayers"] = drip
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        list(store.stream("acme", [one.key for one in keys], LAYERS, HeadRange(0, 4), 1.0))
    assert time.monotonic() - began_s < 2.5


def test_a_long_reason_is_cut(liar: Liar, store: GrpcStore) -> None:
    liar.answers["StreamLayers"] = lambda request, context: iter([message(0, 0, lost_reason="x" * 10_000)])
    (lost,) = read(store)
    assert isinstance(lost, ChunkLost)
    assert len(lost.reason) == 500


@pytest.mark.parametrize(
    "erasure",
    [
        pb.Erasure(namespace="acme", at_s=math.nan, within="*"),
        pb.Erasure(namespace="acme", at_s=math.inf, within="*"),
        pb.Erasure(namespace="../x", at_s=1.0, within="*"),
        pb.Erasure(namespace="acme", key=b"short", at_s=1.0, within="*"),
        pb.Erasure(namespace="acme", at_s=1.0, within=""),
    ],
)
def test_malformed_erasures_are_refused(liar: Liar, store: GrpcStore, erasure: pb.Erasure) -> None:
    liar.answers["ListErasures"] = lambda request, context: pb.ListErasuresResponse(
        shard_id="s", erasures=[erasure]
    )
    with pytest.raises(Unavailable, match="malformed erasure"):
        store.erasures("")


def test_an_erasure_of_the_far_future_is_one_of_now(liar: Liar, store: GrpcStore) -> None:
    erasure = pb.Erasure(namespace="acme", at_s=1e300, within="*")
    liar.answers["ListErasures"] = lambda request, context: pb.ListErasuresResponse(
        shard_id="s", erasures=[erasure], merged=[pb.MergedErasures(pattern="*", number=3, at_s=1e300)]
    )
    found = store.list_erasures("s", 0)
    assert found.erasures[0].at_s <= time.time() + CLOCKS_DIFFER_S
    assert found.merged["*"].at_s <= time.time() + CLOCKS_DIFFER_S
