"""What each verb opens on a gateway's gRPC port, for tokens and for client certificates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kintsugi.core.deploy import GatewaySpec, GatewaySpecExpert
from kintsugi.core.errors import PermissionDenied, Unauthenticated
from kintsugi.gateway import erasing
from kintsugi.gateway.access import add_grant, new_token, revoke_grant
from kintsugi.gateway.chunks import ToSave
from kintsugi.gateway.fill import FillConfig
from kintsugi.gateway.requests import METHOD_VERBS
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.sdk.client import Client
from kintsugi.sdk.transport import ClientOptions
from kintsugi.store.protocol import watched_files
from kintsugi.store.protocol.access import TokenFile, Verb
from kintsugi.store.protocol.audit import AuditLog
from tests.audit_lines import read_audit
from tests.authority import Authority
from tests.integration.serving.gateways import Running, Setup, running

CHUNK = pb.Content(text="a chunk")
SEGMENTS = [pb.Segment(text="a chunk")]
CALLS: dict[str, tuple[Verb | None, Any]] = {
    "PutChunk": (Verb.PUT, pb.PutChunkRequest(namespace="docs", chunk=CHUNK, wait=True)),
    "PutChunks": (Verb.PUT, pb.PutChunksRequest(namespace="docs", chunks=[CHUNK], wait=True)),
    "GetChunk": (Verb.LIST, pb.GetChunkRequest(namespace="docs", key="0" * 64)),
    "ListChunks": (Verb.LIST, pb.ListChunksRequest(namespace="docs")),
    "DeleteChunk": (Verb.DELETE, pb.DeleteChunkRequest(namespace="docs", key="0" * 64)),
    "DeleteDocument": (
        Verb.DELETE,
        pb.DeleteDocumentRequest(namespace="docs", corpus="tea", document_id="green"),
    ),
    "EraseNamespace": (Verb.ADMIN, pb.EraseNamespaceRequest(namespace="docs")),
    "Prefetch": (Verb.GENERATE, pb.PrefetchChunksRequest(namespace="docs", segments=SEGMENTS)),
    "Generate": (Verb.GENERATE, pb.GenerateRequest(namespace="docs", segments=SEGMENTS, question=CHUNK)),
    "Tokenize": (None, pb.TokenizeRequest(namespace="docs", texts=["a chunk"])),
    "ListModels": (None, pb.ListModelsRequest()),
}
ALLOWED = {grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND}
"""What a call that is let through ends with here."""


@dataclass(frozen=True)
class Served:
    gateway: Running
    file: Path
    tokens: dict[str, str]

    def client(self, name: str) -> Client:
        return Client(self.gateway.address, "docs", token=self.tokens[name])


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A token for each verb, under its name."""
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)
    file, tokens = tmp_path / "tokens.json", {}
    for verb in Verb:
        tokens[verb.value], grant = new_token(verb.value, ["docs"], [verb])
        add_grant(file, grant)
    with running(Setup(gateway={"access": TokenFile(file)})) as gateway:
        yield Served(gateway, file, tokens)


def test_every_rpc_needs_its_verb(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasing, "FOLLOWED_S", 0.0)
    assert CALLS.keys() == {rpc.name for rpc in pb.DESCRIPTOR.services_by_name["Kintsugi"].methods}
    with grpc.insecure_channel(served.gateway.address) as channel:
        for name, (wanted, request) in CALLS.items():
            method = channel.unary_stream(
                f"/kintsugi.rpc.v1.Kintsugi/{name}", type(request).SerializeToString
            )
            for verb in Verb:
                call = method(request, metadata=(("authorization", f"Bearer {served.tokens[verb]}"),))
                with suppress(grpc.RpcError):
                    list(call)
                expected = ALLOWED if wanted in (verb, None) else {grpc.StatusCode.PERMISSION_DENIED}
                assert call.code() in expected, f"{name} by {verb}: {call.details()}"


def test_only_who_may_list_learns_what_was_stored(served: Served) -> None:
    both, grant = new_token("both", ["docs"], [Verb.GENERATE, Verb.LIST])
    add_grant(served.file, grant)
    served.tokens["both"] = both
    with served.client("put") as client:
        client.put_chunks(["a chunk"])
    with served.client("both") as client:
        told = client.generate(["a chunk"], "why?")
        assert told.accounting
        assert client.prefetch(["a chunk"])
    with served.client("generate") as client:
        silent = client.generate(["a chunk"], "why?")
        assert (silent.text, silent.accounting, silent.usage.cached_tokens) == (told.text, {}, 0)
        with pytest.raises(PermissionDenied, match="lacks the verb 'list'"):
            client.generate(["a chunk"], "why?", explain=True)


def test_misses_are_filled_for_who_may_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tokens = tmp_path / "tokens.json", {}
    for name, verbs in (("reader", [Verb.GENERATE]), ("writer", [Verb.GENERATE, Verb.PUT])):
        tokens[name], grant = new_token(name, ["docs"], verbs)
        add_grant(file, grant)
    with running(Setup(gateway={"access": TokenFile(file), "fill": FillConfig()})) as served:
        missed: list[int] = []
        filler = served.gateway._filler

        async def suspect(namespace: str, chunks: Sequence[ToSave], ttl_s: float | None) -> None:
            missed.append(len(chunks))

        monkeypatch.setattr(filler, "suspect", suspect)
        for count, name in enumerate(("reader", "writer"), 1):
            with Client(served.address, "docs", token=tokens[name]) as client:
                client.generate(["a chunk"], "why?")
            assert served.eventually(lambda: len(missed) == count)  # noqa: B023
        assert missed == [0, 1]


def test_a_revoked_token_is_refused_without_a_restart(served: Served) -> None:
    with served.client("put") as client:
        client.put_chunks(["a chunk"])
        revoke_grant(served.file, "put")
        with pytest.raises(Unauthenticated, match="revoked"):
            client.put_chunks(["another chunk"])


def test_the_audit_log_says_who_did_what(tmp_path: Path) -> None:
    assert {name: verb for name, (verb, _) in CALLS.items()}.items() <= METHOD_VERBS.items()
    file = tmp_path / "tokens.json"
    token, grant = new_token("search", ["docs"], [Verb.PUT, Verb.GENERATE])
    add_grant(file, grant)
    more = {"access": TokenFile(file), "audit": AuditLog(tmp_path / "audit", "gateway")}
    with running(Setup(gateway=more)) as gateway:
        with Client(gateway.address, "docs", token=token) as client:
            (put,) = client.put_chunks(["a chunk"])
            answer = client.generate(["a chunk"], "why?")
            with pytest.raises(PermissionDenied):
                client.delete_chunk(put.key)
        with Client(gateway.address, "docs") as client, pytest.raises(Unauthenticated):
            client.tokenize(["a chunk"])
    lines = read_audit(tmp_path / "audit")
    told = [
        (line["caller"], line["verb"], line["method"], line["namespace"], line["keys"], line["result"])
        for line in lines
    ]
    assert told == [
        ("search", "put", "PutChunks", "docs", [put.key], "OK"),
        ("search", "generate", "Generate", "docs", [put.key], "OK"),
        ("search", "delete", "DeleteChunk", "docs", [put.key], "PERMISSION_DENIED"),
        ("", None, "Tokenize", "", [], "UNAUTHENTICATED"),
    ]
    assert lines[1]["request_id"] == answer.request_id
    assert "lacks the verb 'delete'" in lines[2]["error"]
    assert not any("a chunk" in json.dumps(line) or "why?" in json.dumps(line) for line in lines)


def test_a_client_certificate_stands_for_its_caller(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    own = authority.issue("gateway")
    worker = authority.issue("worker", x509.UniformResourceIdentifier("spiffe://acme/worker"))
    file = tmp_path / "tokens.json"
    entry = {
        "name": "worker",
        "subject": "URI:spiffe://acme/worker",
        "namespaces": ["docs"],
        "verbs": ["put"],
    }
    file.write_text(json.dumps({"tokens": [], "certificates": [entry]}))
    file.chmod(0o600)
    token, grant = new_token("lister", ["docs"], [Verb.LIST])
    add_grant(file, grant)
    spec = GatewaySpec(
        grpc_port=0,
        tls_cert=str(own.cert),
        tls_key=str(own.key),
        expert=GatewaySpecExpert(tls_client_ca=str(authority.ca)),
    )

    def options(files: Any) -> ClientOptions:
        return ClientOptions(tls_ca=authority.ca, tls_cert=files.cert, tls_key=files.key, attempts=1)

    with running(Setup(spec=spec, gateway={"access": TokenFile(file)})) as gateway:
        with Client(gateway.address, "docs", options=options(worker)) as client:
            client.put_chunks(["a chunk"])
            with pytest.raises(PermissionDenied, match="'worker' lacks the verb 'list'"):
                list(client.list_chunks())
        with Client(gateway.address, "docs", token=token, options=options(worker)) as client:
            assert len(list(client.list_chunks())) == 1, "a token goes before the certificate"
        with (
            Client(gateway.address, "docs", options=options(own)) as client,
            pytest.raises(Unauthenticated, match="no entry is for the certificate CN=gateway"),
        ):
            client.put_chunks(["a chunk"])
        credentials = grpc.ssl_channel_credentials(
            *(path.read_bytes() for path in (authority.ca, worker.key, worker.cert))
        )
        with grpc.secure_channel(gateway.address, credentials) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
