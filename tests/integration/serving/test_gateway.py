"""What a gateway does beside answering: fills, documents, metrics, logs, health, TLS, other services."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kintsugi.core.deploy import GatewaySpec, GatewaySpecExpert
from kintsugi.core.errors import InvalidField, NotFound, ResourceExhausted, Unavailable
from kintsugi.core.exchange import EngineInfo
from kintsugi.core.spaces import ChunkKey, TokenIds, token_bytes
from kintsugi.gateway import chunks as gateway_chunks
from kintsugi.gateway.chunks import Saver
from kintsugi.gateway.fill import FillConfig
from kintsugi.gateway.fronts import grpc_server
from kintsugi.gateway.fronts.grpc_server import GatewayServer, load_gateway_tls
from kintsugi.gateway.gateway import Gateway, GatewayLimits
from kintsugi.gateway.texts.segments import Segment
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.checkpoint import tokenizer_digest
from kintsugi.precompute.documents import (
    DocumentIndex,
    DocumentRef,
    IndexedChunk,
    KnownChunk,
    NameKey,
    no_name_key,
)
from kintsugi.precompute.ledger import Ledger, ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import pack_tokens
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.rpc.v1.gateway_pb2_grpc import KintsugiStub
from kintsugi.sdk.client import Client, ClientOptions
from kintsugi.sdk.types import DocumentChunk, Plain, Sampling
from kintsugi.store.protocol.access import ANYONE, TokenFile
from tests.fakes.stub_backend import StubBackend, StubDelays
from tests.integration.serving.gateways import Running, Setup, bundled_tokenize, running, token_file

NAMESPACE = "tenant"
PASSAGES = ["First passage, of a handful of words.", "Second passage, of some other words."]
QUESTION = "\nQuestion: which?\nAnswer:"
FILLING = Setup(gateway={"fill": FillConfig(batch=8)})


def counted(gateway: Running, name: str, **labels: str) -> float:
    return gateway.gateway.metrics.registry.get_sample_value(f"kintsugi_gateway_{name}", labels) or 0.0


def filled(gateway: Running) -> list[TokenIds]:
    return [chunk for save in gateway.backend.seen.saves for chunk in save[2]]


def test_what_is_missed_twice_is_filled_when_nobody_waits() -> None:
    with running(FILLING) as gateway, Client(gateway.address, NAMESPACE) as client:
        assert client.generate(PASSAGES, QUESTION).outcome == "declined"
        assert gateway.eventually(lambda: counted(gateway, "fill_events_total", event="counted") == 2)
        assert filled(gateway) == []
        client.generate(PASSAGES, QUESTION)
        assert gateway.eventually(lambda: counted(gateway, "fill_events_total", event="filled") == 2)
        answer = client.generate(PASSAGES, QUESTION)
        assert (answer.outcome, answer.accounting["chunks_hit"]) == ("blended", 2)
        assert {save[3] for save in gateway.backend.seen.saves} == {1000}, "behind everything else"


def test_a_fill_waits_until_nobody_does() -> None:
    with running(FILLING) as gateway, Client(gateway.address, NAMESPACE) as client:
        gateway.backend.delays = StubDelays(token_s=0.02)
        long_one = client.stream(["another passage"], QUESTION, max_tokens=1000)
        next(long_one)
        gateway.backend.delays = StubDelays()
        for _ in range(2):
            client.generate(PASSAGES, QUESTION)
        assert gateway.eventually(lambda: counted(gateway, "fill_queue_chunks") == 2)
        assert filled(gateway) == []
        long_one.close()
        assert gateway.eventually(lambda: len(filled(gateway)) == 2)


def test_no_room_for_a_fill_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = FillConfig(sights=1, failures_max=1)
    with running(Setup(gateway={"fill": fill})) as gateway, Client(gateway.address, NAMESPACE) as client:
        monkeypatch.setattr(gateway.gateway._saver._waiting_tokens, "each", 0)
        client.generate(PASSAGES, QUESTION)
        assert gateway.eventually(lambda: counted(gateway, "fill_events_total", event="full") == 2)
        monkeypatch.undo()
        client.generate(PASSAGES, QUESTION)
        assert gateway.eventually(lambda: counted(gateway, "fill_events_total", event="filled") == 2)
        assert counted(gateway, "fill_events_total", event="failed") == 0
    one_only = Setup(gateway={"fill": FillConfig(sights=1, queue_max=1)})
    with running(one_only) as gateway, Client(gateway.address, NAMESPACE) as client:
        client.generate(PASSAGES, QUESTION)
        assert gateway.eventually(lambda: counted(gateway, "fill_events_total", event="filled") == 1)
        assert counted(gateway, "fill_events_total", event="full") == 1


def test_a_store_that_does_not_say_makes_nothing_look_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FILLING) as gateway, Client(gateway.address, NAMESPACE) as client:

        def silent(namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
            raise Unavailable("a shard does not answer")

        monkeypatch.setattr(gateway.store, "tiers", silent)
        for _ in range(3):
            client.generate(PASSAGES, QUESTION)
        filler = gateway.gateway._filler
        assert filler is not None
        assert gateway.eventually(lambda: not gateway.gateway.answers._follow_ups)
        assert len(filler.queue) == 0


def test_what_could_not_be_deleted_is_neither_found_nor_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FILLING) as gateway, Client(gateway.address, NAMESPACE) as client:

        def silent(namespace: str, keys: Sequence[ChunkKey], at_s: float, within: str) -> None:
            raise Unavailable("a shard does not answer")

        gateway.backend.delays = StubDelays(token_s=0.02)
        long_one = client.stream([Plain("another passage")], QUESTION, max_tokens=1000)
        next(long_one)  # nothing is filled while it goes on
        gateway.backend.delays = StubDelays()
        for _ in range(2):
            client.generate(PASSAGES[:1], QUESTION)
        assert gateway.eventually(lambda: counted(gateway, "fill_queue_chunks") == 1)
        (text,) = client.tokenize(PASSAGES[:1])
        key = ChunkKey.from_hex(text.key)
        assert gateway.gateway.known.knows(NAMESPACE, key)
        monkeypatch.setattr(gateway.store, "erase", silent)
        with pytest.raises(Unavailable, match="a shard does not answer"):
            client.delete_chunk(text.key)
        assert not gateway.gateway.known.knows(NAMESPACE, key)
        assert counted(gateway, "fill_queue_chunks") == 0
        long_one.close()


class OneCorpus(DocumentIndex):
    """A corpus of one document; stands in for a precompute ledger."""

    def __init__(self, chunks: list[KnownChunk]) -> None:
        self._chunks = chunks

    def resolve(
        self, corpus: str, refs: Sequence[DocumentRef], name_key: NameKey = no_name_key
    ) -> list[KnownChunk | None]:
        if corpus != "docs":
            raise NotFound(f"corpus {corpus!r} is not complete in this ledger; run kintsugi precompute")
        known = {(c.ref.document_id, c.ref.index): c for c in self._chunks}
        found = [known.get((ref.document_id, ref.index)) for ref in refs]
        return [
            chunk if chunk and ref.version in (None, chunk.version) else None
            for ref, chunk in zip(refs, found, strict=True)
        ]

    def chunks(self, fingerprint: str, after: int, limit: int) -> list[IndexedChunk]:
        numbered = [
            IndexedChunk(number, NAMESPACE, chunk.key, chunk.token_ids)
            for number, chunk in enumerate(self._chunks, start=1)
        ]
        return [chunk for chunk in numbered if chunk.number > after][:limit]

    def close(self) -> None:
        return None


def test_a_documents_chunk_is_what_precompute_made_of_it() -> None:
    tokenize = bundled_tokenize()
    space = StubBackend().space(NAMESPACE)
    chunks = [
        KnownChunk(DocumentRef("a.md", index), "v1", ChunkKey.of(space, tokenize(text)), tokenize(text))
        for index, text in enumerate(PASSAGES)
    ]
    with running(Setup(gateway={"documents": OneCorpus(chunks)})) as gateway:
        with Client(gateway.address, NAMESPACE) as client:
            refs = [DocumentChunk("docs", "a.md", 1), DocumentChunk("docs", "a.md", 0, "v1")]
            answer = client.generate(refs, QUESTION)
            assert [segment.key for segment in answer.segments] == [chunks[1].key.hex, chunks[0].key.hex]
            for ref in (
                DocumentChunk("docs", "a.md", 2),
                DocumentChunk("docs", "a.md", 0, "v2"),
                DocumentChunk("docs", "b.md", 0),
            ):
                with pytest.raises(NotFound, match="run kintsugi precompute"):
                    client.generate([ref], QUESTION)
            with pytest.raises(NotFound, match="corpus 'others'"):
                client.generate([DocumentChunk("others", "a.md", 0)], QUESTION)
        with Client(gateway.address, "another") as client, pytest.raises(NotFound, match="'another'"):
            client.generate([DocumentChunk("docs", "a.md", 0)], QUESTION)


def test_texts_of_a_precomputed_corpus_are_found_in_messages(tmp_path: Path) -> None:
    tokenize = bundled_tokenize()
    backend = StubBackend()
    space = backend.space(NAMESPACE)
    texts = [
        "one that is long enough to be found in a longer text",
        "another of them, which ends in a smile 🙂",
    ]
    scanned = [
        ScannedChunk(ChunkKey.of(space, ids).digest, pack_tokens(token_bytes(ids)), len(ids))
        for text in texts
        for ids in [tokenize(text)]
    ]
    ledger = Ledger(tmp_path)
    edition = ledger.open_edition("docs", space, "source", "model", "chunking")
    run = ledger.begin_run(edition)
    ledger.record(edition, run, NAMESPACE, [ScannedDocument("u", 0, "a.md", "v1", b"d", 9, tuple(scanned))])
    ledger.end_run(run, 0, 0.0, complete=True)
    ledger.close()

    async def learn() -> None:
        spec = GatewaySpec(expert=GatewaySpecExpert(ledger=str(tmp_path)))
        gateway = await Gateway.open(spec, backend, "ram://learning", bundled_checkpoint())
        async with asyncio.timeout(20):
            while len(gateway.known) < 2:
                await asyncio.sleep(0.01)
        message = f"Use:\n{texts[1]}\n\n{texts[0]}"
        assert [message[start:end] for start, end in gateway.known.find(NAMESPACE, message)] == texts[::-1]
        (piece,) = await gateway._resolver.pieces(space, [Segment(key=ChunkKey(scanned[0].key))])
        assert tuple(piece.token_ids) == tuple(tokenize(texts[0]))
        await gateway.close()

    asyncio.run(learn())


def test_requests_are_counted_and_logged_without_what_they_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kintsugi.gateway")
    with running() as gateway, Client(gateway.address, NAMESPACE) as client:
        client.generate(["a secret passage"], "a secret question", max_tokens=3)
        with pytest.raises(InvalidField):
            client.generate(["a secret passage"], "")
        assert gateway.eventually(
            lambda: counted(gateway, "requests_total", method="Generate", status="INVALID_ARGUMENT") == 1
        )
        assert counted(gateway, "requests_total", method="Generate", status="OK") == 1
        assert counted(gateway, "ttft_seconds_count", method="Generate") == 1
        assert counted(gateway, "chunk_tokens_total", result="missed") > 0
        assert counted(gateway, "outcomes_total", outcome="declined") == 1
        assert counted(gateway, "active_requests") == 0
    records = [
        json.loads(record.getMessage()) for record in caplog.records if record.name == "kintsugi.gateway"
    ]
    assert [record["status"] for record in records] == ["OK", "INVALID_ARGUMENT"]
    assert all(record["request_id"] and record["namespace"] == NAMESPACE for record in records)
    assert "secret" not in caplog.text


def test_nobody_goes_before_others() -> None:
    with running() as gateway, Client(gateway.address, NAMESPACE) as client:
        with pytest.raises(InvalidField, match="leave it out, or send a number above 0"):
            client.generate(PASSAGES, QUESTION, priority=-1)
        assert not gateway.backend.seen.requests
        client.generate(PASSAGES, QUESTION, priority=7)
        assert gateway.backend.seen.requests[0].priority == 7


def test_what_comes_with_a_request_reaches_the_engine() -> None:
    with running() as gateway, Client(gateway.address, NAMESPACE) as client:
        sampling = Sampling(4, temperature=0.0, stop=["x"], top_k=0, ignore_eos=False, extra={"n": 1})
        client.generate(PASSAGES, QUESTION, sampling=sampling, ratio=0.25, selector="query", priority=3)
        (request,) = gateway.backend.seen.requests
        assert request.sampling == {
            "max_tokens": 4,
            "temperature": 0.0,
            "stop": ["x"],
            "top_k": 0,
            "ignore_eos": False,
            "n": 1,
        }
        assert (request.params.ratio, request.params.selector, request.priority) == (0.25, "query", 3)
        assert request.params.namespace == NAMESPACE
        assert request.prompt_token_ids[0] == 1, "the prefix that chunks were prefilled behind"
        assert request.fingerprint == gateway.backend.space(NAMESPACE).fingerprint.hex


def test_a_trace_and_a_request_id_go_through_to_the_engine() -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    metadata = (
        ("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),
        ("x-request-id", "mine-1"),
    )
    request = pb.GenerateRequest(namespace=NAMESPACE, question=pb.Content(text="Why?"))
    with running() as gateway, grpc.insecure_channel(gateway.address) as channel:
        call = KintsugiStub(channel).Generate(request, metadata=metadata)
        first, *_ = list(call)
        assert first.resolved.request_id == "mine-1"
        assert dict(tuple(entry) for entry in call.initial_metadata())["x-request-id"] == "mine-1"
        (seen,) = gateway.backend.seen.requests
        assert seen.request_id.startswith("mine-1-")
        assert seen.trace["traceparent"].split("-")[1] == trace_id
        unusable = (("x-request-id", "no id at all"),)
        first, *_ = list(KintsugiStub(channel).Generate(request, metadata=unusable))
        assert len(first.resolved.request_id) == 32, "one is made up"


def test_an_engine_that_goes_before_it_answers_is_asked_again() -> None:
    with running() as gateway, Client(gateway.address, NAMESPACE) as client:
        client.generate(PASSAGES, QUESTION)
        gateway.backend.down = True
        gateway.loop.call_later(0.02, gateway.backend.come_up)
        assert client.generate(PASSAGES, QUESTION).finish_reason == "length"


def test_health_follows_the_engines_and_reflection_names_the_services() -> None:
    with running() as gateway, grpc.insecure_channel(gateway.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def status() -> int:
            return int(health.Check(health_pb2.HealthCheckRequest(service="")).status)

        serving = health_pb2.HealthCheckResponse.SERVING
        assert any(status() == serving for _ in range(200))
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = list(stub.ServerReflectionInfo(asked))
        assert "kintsugi.rpc.v1.Kintsugi" in {s.name for s in answer.list_services_response.service}


def test_health_goes_on_when_an_engine_fails_in_a_new_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HEALTH_PERIOD_S", 0.01)
    monkeypatch.setattr(grpc_server, "INFO_TTL_S", 0.0)
    with running() as gateway, grpc.insecure_channel(gateway.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def is_serving() -> bool:
            status = health.Check(health_pb2.HealthCheckRequest(service="")).status
            return bool(status == health_pb2.HealthCheckResponse.SERVING)

        async def broken() -> EngineInfo:
            raise RuntimeError("not one of ours")

        asked = gateway.backend.info
        assert any(is_serving() for _ in range(200))
        monkeypatch.setattr(gateway.backend, "info", broken)
        assert any(not is_serving() for _ in range(200))
        monkeypatch.setattr(gateway.backend, "info", asked)
        assert any(is_serving() for _ in range(200))


def test_strangers_hold_no_place(tmp_path: Path) -> None:
    path, tokens = token_file(tmp_path, ("tenant", ("tenant",)))
    limits = GatewayLimits(concurrent_max=4)
    setup = Setup(gateway={"access": TokenFile(path), "limits": limits})
    with running(setup) as gateway, grpc.insecure_channel(gateway.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        bearer = (("authorization", f"Bearer {tokens['tenant']}"),)
        watched = health_pb2.HealthCheckRequest(service="")
        for call in [health.Watch(watched) for _ in range(4)] + [reflection.ServerReflectionInfo(iter(()))]:
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health.Check(watched)
        with_token = health.Watch(watched, metadata=bearer)
        next(with_token)
        with_token.cancel()
        with Client(gateway.address, "tenant", token=tokens["tenant"]) as client:
            assert client.tokenize(["text"])


SERVED = """
import resource, sys
from pathlib import Path
from kintsugi.store.protocol.access import TokenFile
from tests.integration.serving.gateways import Setup, running
with running(Setup(gateway={"access": TokenFile(Path(sys.argv[1]))})) as gateway:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(gateway.address, flush=True)
    sys.stdin.readline()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib, flush=True)
"""
STRANGERS, STRANGERS_BYTES = 24, 7 << 20
"""Below what the server receives of those with a token."""


def test_a_strangers_message_is_not_even_received(tmp_path: Path) -> None:
    """Not by the server's memory, and not by any method."""
    path, tokens = token_file(tmp_path, ("tenant", ("tenant",)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SERVED, str(path)]
    bad = (("authorization", "Bearer kg_unknown"),)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with grpc.insecure_channel(address) as channel:
            for name, size in (
                ("Tokenize", STRANGERS_BYTES),
                ("Generate", STRANGERS_BYTES),
                ("PutChunks", 10 << 20),
            ):
                method = channel.unary_unary(f"/kintsugi.rpc.v1.Kintsugi/{name}", None, None)
                calls = [method.future(bytes(size), metadata=bad, timeout=30) for _ in range(STRANGERS)]
                assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
            check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
            assert check(bytes(STRANGERS_BYTES), timeout=30)
        with Client(address, "tenant", token=tokens["tenant"]) as client:
            assert client.tokenize(["text"])
        server.stdin.close()
        grown_mib = int(server.stdout.readline()) >> 10
    assert grown_mib < 48, f"{STRANGERS * STRANGERS_BYTES >> 20} MiB were sent at a time"


def test_a_strangers_message_is_not_parsed(tmp_path: Path) -> None:
    path, _ = token_file(tmp_path, ("tenant", ("tenant",)))
    with (
        running(Setup(gateway={"access": TokenFile(path)})) as gateway,
        grpc.insecure_channel(gateway.address) as channel,
    ):
        for method in (
            "PutChunk",
            "PutChunks",
            "GetChunk",
            "DeleteChunk",
            "ListChunks",
            "Prefetch",
            "Tokenize",
        ):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/kintsugi.rpc.v1.Kintsugi/{method}", None, None)(b"no message")
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def authority_and_server(folder: Path) -> tuple[Path, Path, Path]:
    """PEM files: an authority, and a certificate for localhost with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
    return folder / "cert.pem", folder / "cert.pem", folder / "key.pem"


def test_tls_with_and_without_a_certificate_of_the_client(tmp_path: Path) -> None:
    ca, cert, key = authority_and_server(tmp_path)
    spec = GatewaySpec(host="localhost", grpc_port=0, tls_cert=str(cert), tls_key=str(key))
    trusting = ClientOptions(tls_ca=ca, attempts=1, timeout_s=5.0)
    shown = ClientOptions(tls_ca=ca, tls_cert=cert, tls_key=key, attempts=1, timeout_s=5.0)
    with running(Setup(spec=spec)) as gateway:
        with Client(gateway.address, NAMESPACE, options=trusting) as client:
            assert client.tokenize(["a"])
        plain = ClientOptions(attempts=1, timeout_s=5.0)
        with Client(gateway.address, NAMESPACE, options=plain) as client, pytest.raises(Unavailable):
            client.tokenize(["a"])
    spec = GatewaySpec(
        host="localhost",
        grpc_port=0,
        tls_cert=str(cert),
        tls_key=str(key),
        expert=GatewaySpecExpert(tls_client_ca=str(ca)),
    )
    with running(Setup(spec=spec)) as gateway:
        with Client(gateway.address, NAMESPACE, options=shown) as client:
            assert client.tokenize(["a"])
        with Client(gateway.address, NAMESPACE, options=trusting) as client, pytest.raises(Unavailable):
            client.tokenize(["a"])


def test_a_port_that_is_taken_and_files_that_are_none() -> None:
    assert load_gateway_tls(GatewaySpec()) is None
    with running() as gateway:
        port = int(gateway.address.rsplit(":", 1)[1])
        second = GatewayServer(gateway.gateway, GatewaySpec(grpc_port=port))
        with pytest.raises(Unavailable, match=r"cannot listen on .*; name another gateway\.grpc_port"):
            gateway.run(second.start())
    spec = GatewaySpec(grpc_port=0, tls_cert="/absent.pem", tls_key="/absent.pem")
    with pytest.raises(InvalidField, match="tls-cert"), running(Setup(spec=spec)):
        pass


def test_a_gateway_opens_as_its_spec_says_before_any_engine_is_there(tmp_path: Path) -> None:
    async def restarted() -> None:
        spec = GatewaySpec(expert=GatewaySpecExpert(data_dir=str(tmp_path), fill_on_miss=False))
        backend = StubBackend()
        backend.down = True
        gateway = await Gateway.open(spec, backend, "ram://gateway-open", bundled_checkpoint())
        with pytest.raises(Unavailable):
            await gateway.tokenize(ANYONE, NAMESPACE, ["a"])
        backend.down = False
        (put,) = await gateway.put_chunks(ANYONE, NAMESPACE, [Segment(text=PASSAGES[0])])
        assert gateway.known.knows(NAMESPACE, put.key)
        await gateway.close()
        gateway = await Gateway.open(spec, StubBackend(), "ram://gateway-open", bundled_checkpoint())
        assert gateway.known.knows(NAMESPACE, put.key), "a restart keeps it"
        assert gateway.known.find(NAMESPACE, f"see {PASSAGES[0]}") == [(4, 4 + len(PASSAGES[0]))]
        await gateway.close()

    asyncio.run(restarted())


def test_a_gateway_of_a_new_model_waits_for_its_engines_and_keeps_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its token ids mean something else to the engines of the model that is being replaced."""
    monkeypatch.setattr(gateway_chunks, "INFO_TTL_S", 0.0)

    async def replaced() -> None:
        backend = StubBackend()
        alike, ours = await backend.info(), tokenizer_digest(bundled_checkpoint())
        backend._info = dataclasses.replace(alike, tokenizer="ab" * 32)
        gateway = await Gateway.open(GatewaySpec(), backend, "ram://gateway-model", bundled_checkpoint())
        try:
            with pytest.raises(Unavailable, match="another model"):
                await gateway.tokenize(ANYONE, NAMESPACE, ["a"])
            backend._info = dataclasses.replace(alike, tokenizer=ours)
            await gateway.recent_info.get(0.0)
            space = await gateway.spaces.find(NAMESPACE)
            backend._info = dataclasses.replace(alike, tokenizer="ab" * 32, fingerprint="cd" * 32)
            await gateway.recent_info.get(0.0)
            assert await gateway.spaces.find(NAMESPACE) == space
        finally:
            await gateway.close()

    asyncio.run(replaced())


def test_a_chunk_is_saved_once_however_many_ask() -> None:
    async def ask() -> None:
        backend = StubBackend(StubDelays(save_s=0.02))
        saver = Saver(backend, waiting_tokens_max=10)
        key = ChunkKey(b"k" * 32)
        outcomes = await asyncio.gather(*(saver.save(NAMESPACE, [(key, TokenIds.of([1]))]) for _ in range(5)))
        assert {outcome.is_saved for (outcome,) in outcomes} == {True}
        assert len(backend.seen.saves) == 1
        with pytest.raises(ResourceExhausted, match="at most 10"):
            saver.submit(NAMESPACE, [(key, TokenIds(bytes(44)))])
        backend.down = True
        ((failed,),) = [await saver.save(NAMESPACE, [(key, TokenIds.of([1]))])]
        assert (failed.is_saved, failed.reason) == (False, "the stub is down; send the request again")
        backend.down, backend.delays = False, StubDelays(save_s=60.0)
        (waiting,) = saver.submit(NAMESPACE, [(key, TokenIds.of([1]))])
        await asyncio.sleep(0)
        await saver.close()
        assert not (await waiting).is_saved

    asyncio.run(ask())
