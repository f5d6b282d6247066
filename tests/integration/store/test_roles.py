"""What each verb opens on a shard, for tokens and for client certificates, and what the audit log says."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from typer.testing import CliRunner

from kintsugi.cli.commands import store as store_command
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.core.errors import InvalidField, KintsugiError, PermissionDenied, Unauthenticated
from kintsugi.gateway.access import add_grant, new_token, revoke_grant
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.registry import open_store
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.protocol import watched_files, wire
from kintsugi.store.protocol.access import Verb
from kintsugi.store.protocol.guard import NEEDS
from kintsugi.store.protocol.interface import ChunkStore
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.audit_lines import read_audit
from tests.authority import Authority
from tests.contracts.store_contract import StoreContract, make_chunk, make_report, read_all
from tests.fakes.fixed_directory import FixedDirectory

MANIFEST, FRAMES = make_chunk(range(40))
NAMESPACE, KEY = MANIFEST.namespace, MANIFEST.key
SERVICE = pb.DESCRIPTOR.services_by_name["ChunkStore"]
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class Keys:
    """A tokens file, and a file with the token of each caller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "tokens.json"

    def add(self, name: str, namespaces: list[str], verbs: list[Verb] | None = None) -> Path:
        token, grant = new_token(name, namespaces, verbs)
        add_grant(self.file, grant)
        path = self.folder / name
        path.write_text(token + "\n")
        return path


@contextmanager
def shard(tokens_file: Path | None, **options: Any) -> Iterator[ShardServer]:
    with ShardServer(
        Shard(RamTier(8 << 20)), "127.0.0.1:0", ServerOptions(tokens_file=tokens_file, **options)
    ) as server:
        yield server


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)
    keys = Keys(tmp_path)
    keys.add("everything", ["*"], list(Verb))
    return keys


@pytest.fixture
def store(keys: Keys) -> Iterator[ChunkStore]:
    """A client with a token that may do everything."""
    with (
        shard(keys.file) as server,
        closing(open_store(f"grpc://{server.address}?token_file={keys.folder / 'everything'}")) as store,
    ):
        yield store


class TestStoreWithTokens(StoreContract):
    """Who may do everything finds a store like any other."""


def test_who_may_use_every_namespace_reads_the_shards_memory(store: ChunkStore) -> None:
    store.put(MANIFEST, FRAMES)
    assert len(read_all(store, [KEY])) == len(FRAMES)
    assert store.stats().transport == "shared-memory"


def build_messages() -> dict[str, list[bytes]]:
    """Every RPC's messages, of which the first is enough to refuse the call."""
    found: dict[str, Any] = {
        "Lookup": pb.LookupRequest(namespace=NAMESPACE, keys=[KEY.digest]),
        "LookupAnchors": pb.LookupAnchorsRequest(namespace=NAMESPACE, space_digest=bytes(32), anchors=[1]),
        "PutChunkKV": pb.PutChunkKVRequest(header=pb.PutHeader(manifest=wire.manifest_to_wire(MANIFEST))),
        "StreamLayers": pb.StreamLayersRequest(
            namespace=NAMESPACE, keys=[KEY.digest], layer_stop=1, head_stop=1, deadline_ms=1000
        ),
        "Prefetch": pb.PrefetchRequest(namespace=NAMESPACE, keys=[KEY.digest]),
        "Retain": pb.RetainRequest(namespace=NAMESPACE, keys=[KEY.digest]),
        "Pin": pb.PinRequest(namespace=NAMESPACE, keys=[KEY.digest], lease_s=1),
        "Unpin": pb.UnpinRequest(lease_id="00"),
        "Delete": pb.DeleteRequest(namespace=NAMESPACE, keys=[KEY.digest]),
        "List": pb.ListRequest(namespace=NAMESPACE),
        "Clear": pb.ClearRequest(namespace=NAMESPACE),
        "PutReport": pb.PutReportRequest(fingerprint=bytes(32), name="calibration", document=b"{}"),
        "GetReport": pb.GetReportRequest(fingerprint=bytes(32), name="calibration"),
        "Stats": pb.StatsRequest(),
        "Verify": pb.VerifyRequest(namespace=NAMESPACE, keys=[KEY.digest]),
        "Drain": pb.DrainRequest(timeout_s=0),
        "OpenArena": pb.OpenArenaRequest(),
        "ListErasures": pb.ListErasuresRequest(),
    }
    found["LeaseLayers"] = pb.LeaseLayersRequest(request=found["StreamLayers"])
    return {name: [message.SerializeToString()] for name, message in found.items()}


MESSAGES = build_messages()


def handler_of(rpc: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", rpc).lower()


def code_of(channel: grpc.Channel, rpc: str, token: str = "") -> Any:
    """How a call ends, or `OK` once its first answer is there."""
    call = channel.stream_stream(f"/{wire.SERVICE}/{rpc}")(
        iter(MESSAGES[rpc]),
        metadata=(("authorization", f"Bearer {token}"),) if token else (),
        timeout=10,
    )
    with suppress(grpc.RpcError, StopIteration):
        next(call)
        call.cancel()
        return grpc.StatusCode.OK
    return call.code()


def test_every_rpc_has_its_need() -> None:
    names = {rpc.name for rpc in SERVICE.methods}
    assert names == MESSAGES.keys()
    assert {handler_of(name) for name in names} == NEEDS.keys()
    assert handler_of("PutChunkKV") == "put_chunk_kv"


def test_a_local_client_without_a_token_may_do_nothing(keys: Keys) -> None:
    with shard(keys.file) as server, grpc.insecure_channel(server.address) as channel:
        for rpc in MESSAGES:
            assert code_of(channel, rpc) is grpc.StatusCode.UNAUTHENTICATED, rpc
            assert code_of(channel, rpc, "kg_wrong") is grpc.StatusCode.UNAUTHENTICATED, rpc
        with (
            closing(GrpcStore(server.address)) as store,
            pytest.raises(Unauthenticated, match="authorization: Bearer"),
        ):
            store.lookup(NAMESPACE, [KEY])


ANYTHING, NOBODY = set(Verb), set[Verb]()
OPENED: dict[str, set[Verb]] = {
    "Lookup": ANYTHING,
    "LookupAnchors": {Verb.GENERATE},
    "PutChunkKV": {Verb.PUT},
    "StreamLayers": {Verb.GENERATE},
    "LeaseLayers": {Verb.GENERATE},
    "Prefetch": {Verb.GENERATE},
    "Retain": {Verb.PUT},
    "Pin": {Verb.PUT},
    "Unpin": {Verb.PUT},
    "Delete": {Verb.DELETE},
    "List": {Verb.LIST},
    "Clear": {Verb.ADMIN},
    "PutReport": {Verb.REPORT},
    "GetReport": ANYTHING,
    "Stats": ANYTHING,
    "Verify": {Verb.GENERATE},
    "Drain": NOBODY,
    "OpenArena": NOBODY,
    "ListErasures": NOBODY,
}
"""Which one verb opens an RPC to a caller of one namespace."""


def test_every_rpc_needs_its_verb_and_the_namespace(keys: Keys) -> None:
    own = {verb: keys.add(verb.value, [NAMESPACE], [verb]).read_text().strip() for verb in Verb}
    foreign = keys.add("foreign", ["another"], list(Verb)).read_text().strip()
    widely = {verb: keys.add(f"{verb}-everywhere", ["*"], [verb]).read_text().strip() for verb in Verb}
    with shard(keys.file) as server, grpc.insecure_channel(server.address) as channel:
        for rpc, verbs in OPENED.items():
            for verb, token in own.items():
                is_refused = code_of(channel, rpc, token) in REFUSED
                assert is_refused == (verb not in verbs), f"{rpc} by {verb}"
            free = rpc in ("GetReport", "Stats", "PutReport", "Unpin")
            assert (code_of(channel, rpc, foreign) in REFUSED) != free, f"{rpc} by another tenant"
        for rpc, needed in (
            ("OpenArena", Verb.GENERATE),
            ("ListErasures", Verb.GENERATE),
            ("Drain", Verb.ADMIN),
        ):
            for verb, token in widely.items():
                assert (code_of(channel, rpc, token) in REFUSED) == (verb is not needed), f"{rpc} by {verb}"


def test_who_reports_a_wrong_tag_may_delete(keys: Keys) -> None:
    """Every copy of the chunk goes."""
    own = {verb: keys.add(verb.value, [NAMESPACE], [verb]).read_text().strip() for verb in Verb}
    both = keys.add("both", [NAMESPACE], [Verb.GENERATE, Verb.DELETE]).read_text().strip()
    request = pb.VerifyRequest(namespace=NAMESPACE, keys=[KEY.digest], failed_salts=[bytes(16)])
    with shard(keys.file) as server, grpc.insecure_channel(server.address) as channel:
        verify = channel.unary_unary(f"/{wire.SERVICE}/Verify", pb.VerifyRequest.SerializeToString)
        verify(request, metadata=(("authorization", f"Bearer {both}"),))
        for verb in (Verb.GENERATE, Verb.DELETE):
            with pytest.raises(grpc.RpcError) as refused:
                verify(request, metadata=(("authorization", f"Bearer {own[verb]}"),))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_who_may_use_one_namespace_reads_over_grpc(keys: Keys) -> None:
    """The shard's memory holds the chunks of all."""
    tenant = keys.add("tenant", [NAMESPACE])
    with shard(keys.file) as server:
        with closing(GrpcStore(server.address, GrpcOptions(token_file=tenant))) as store:
            assert store.put(MANIFEST, FRAMES)
            assert len(read_all(store, [KEY])) == len(FRAMES)
            assert store.transport == "grpc"
            with pytest.raises(PermissionDenied, match="namespace 'another'"):
                store.put(dataclasses.replace(MANIFEST, namespace="another"), FRAMES)
            with pytest.raises(PermissionDenied, match="lacks the verb 'admin'"):
                store.clear(NAMESPACE)
        assert len(server.shard) == 1


CERTIFICATES = [
    {"name": "corpus", "subject": "CN=corpus-worker", "namespaces": ["*"], "verbs": ["put"]},
    {"name": "engine", "subject": "CN=engine", "namespaces": ["*"], "verbs": ["generate", "put", "report"]},
]


def test_a_corpus_workers_certificate_opens_what_a_corpus_needs(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"tokens": [], "certificates": CERTIFICATES}))
    file.chmod(0o600)
    report = make_report("2026-01-01T00:00:00.000Z")

    def client(name: str) -> Any:
        return closing(GrpcStore(server.address, GrpcOptions(tls=authority.issue(name))))

    def publish(store: ChunkStore) -> None:
        store.put_report(report.binding.model, report.binding.report_name, report.to_bytes())

    with shard(file, tls=authority.issue("shard")) as server:
        with client("corpus-worker") as worker:
            assert worker.put(MANIFEST, FRAMES)
            refused: list[Callable[[], Any]] = [
                lambda: worker.delete(NAMESPACE, [KEY]),
                lambda: worker.clear(NAMESPACE),
                lambda: worker.call("Drain", pb.DrainRequest(timeout_s=0), pb.DrainResponse),
                lambda: publish(worker),
                lambda: read_all(worker, [KEY]),
            ]
            for call in refused:
                with pytest.raises(PermissionDenied, match="'corpus' lacks the verb"):
                    call()
        with client("engine") as engine:
            assert len(read_all(engine, [KEY])) == len(FRAMES)
            publish(engine)
        with client("other") as other, pytest.raises(Unauthenticated, match="CN=other"):
            other.lookup(NAMESPACE, [KEY])


def test_a_token_is_replaced_and_revoked_without_a_restart(keys: Keys) -> None:
    tenant = keys.add("old", [NAMESPACE])
    with (
        shard(keys.file) as server,
        closing(GrpcStore(server.address, GrpcOptions(token_file=tenant))) as store,
    ):
        assert store.put(MANIFEST, FRAMES)
        revoke_grant(keys.file, "old")
        with pytest.raises(Unauthenticated, match="revoked"):
            store.lookup(NAMESPACE, [KEY])
        tenant.write_text(keys.add("new", [NAMESPACE]).read_text())
        assert store.lookup(NAMESPACE, [KEY]) == [MANIFEST]


@pytest.mark.parametrize("text", [None, "", "two\nlines", "\xe9"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidField, match="token_file"):
        open_store(f"grpc://127.0.0.1:1?token_file={path}")


def test_who_may_not_write_reports_reads_them_where_copies_differ(keys: Keys) -> None:
    """Reading repairs older copies, for those who may."""
    reader = keys.add("reader", [NAMESPACE])
    report = make_report("2026-01-01T00:00:00.000Z")
    address = (report.binding.model, report.binding.report_name)
    with shard(keys.file) as first, shard(keys.file) as second:
        with closing(GrpcStore(first.address, GrpcOptions(token_file=keys.folder / "everything"))) as store:
            store.put_report(*address, report.to_bytes())
        shards = tuple(ShardAddress(one.shard.shard_id, one.address) for one in (first, second))
        directory = FixedDirectory(ShardMap(1, shards))
        with closing(ShardedStore(directory, GrpcOptions(token_file=reader))) as store:
            assert store.get_report(*address) == report.to_bytes()
        with closing(ShardedStore(directory, GrpcOptions(token_file=keys.folder / "everything"))) as store:
            assert store.get_report(*address) == report.to_bytes()
        assert second.shard.reports.get(*address) == report.to_bytes()


def test_a_shard_does_not_start_with_a_tokens_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text("{")
    file.chmod(0o600)
    with pytest.raises(InvalidField, match="is not JSON"), shard(file):
        pass
    with pytest.raises(InvalidField, match="audit_dir"), shard(None, audit_dir=file):
        pass


def test_metrics_are_shown_to_operators_alone_where_they_are_protected(keys: Keys) -> None:
    tokens = {
        "tenant": keys.add("tenant", [NAMESPACE], list(Verb)),
        "reader": keys.add("reader", ["*"], [Verb.GENERATE]),
        "prometheus": keys.add("prometheus", ["*"], [Verb.ADMIN]),
    }
    headers = {name: {"authorization": f"Bearer {path.read_text().strip()}"} for name, path in tokens.items()}
    asked: list[dict[str, str]] = [{}, {"authorization": "Bearer made-up"}, *headers.values()]

    def answers(server: ShardServer) -> list[int]:
        urls = [f"http://{server.metrics_address}{path}" for path in ("/metrics", "/")]
        return [httpx.get(url, headers=one).status_code for url in urls for one in asked]

    with shard(keys.file, metrics_listen="127.0.0.1:0") as server:
        assert answers(server) == [200] * 10, "the default"
    with shard(keys.file, metrics_listen="127.0.0.1:0", protect_metrics=True) as server:
        assert answers(server) == [401, 401, 403, 403, 200] * 2
        assert httpx.get(f"http://{server.metrics_address}/readyz").status_code == 200, "probes have no token"
    with pytest.raises(InvalidField, match="tokens file"), shard(None, protect_metrics=True):
        pass


def test_commands_show_the_token_of_a_file(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    with shard(keys.file) as server:
        status = ["store", "status", "--store", f"grpc://{server.address}"]
        refused = CliRunner().invoke(app, status)
        assert refused.exit_code == ExitCode.BAD_INPUT
        assert "authorization: Bearer" in refused.stderr
        shown = CliRunner().invoke(
            app, [*status[:-1], f"{status[-1]}?token_file={keys.folder / 'everything'}"]
        )
        assert shown.exit_code == ExitCode.OK
    served: list[ServerOptions] = []

    def serve(screen: Any, spec: Any, listen: str, options: ServerOptions, peers: str) -> int:
        served.append(options)
        return 0

    monkeypatch.setattr(store_command, "_serve_shard", serve)
    asked = ["--tokens-file", str(keys.file), "--audit-dir", str(keys.folder), "--protect-metrics"]
    assert CliRunner().invoke(app, ["store", "serve", *asked]).exit_code == ExitCode.OK
    assert (served[0].tokens_file, served[0].audit_dir) == (keys.file, keys.folder)
    assert served[0].protect_metrics


def test_the_audit_log_says_who_did_what(keys: Keys) -> None:
    tenant = keys.add("tenant", [NAMESPACE])
    folder = keys.folder / "audit"
    with shard(keys.file, audit_dir=folder) as server:
        with closing(GrpcStore(server.address, GrpcOptions(token_file=tenant))) as store:
            store.put(MANIFEST, FRAMES)
            store.lookup(NAMESPACE, [KEY])
            read_all(store, [KEY])
            store.delete(NAMESPACE, [KEY])
            with pytest.raises(PermissionDenied):
                store.clear("another")
        with closing(GrpcStore(server.address)) as store, pytest.raises(KintsugiError):
            store.lookup(NAMESPACE, [KEY])
        shard_id = server.shard.shard_id
    entries = read_audit(folder)
    assert {path.name for path in folder.iterdir()} == {
        f"shard-{shard_id}.jsonl",
        f"shard-{shard_id}.tenant.jsonl",
    }
    told = [
        (entry["caller"], entry["verb"], entry["method"], entry["namespace"], entry["keys"], entry["result"])
        for entry in entries
    ]
    assert told == [
        ("tenant", "put", "put_chunk_kv", NAMESPACE, [KEY.hex], "OK"),
        ("tenant", "generate", "open_arena", "", [], "PERMISSION_DENIED"),
        ("tenant", "generate", "stream_layers", NAMESPACE, [KEY.hex], "OK"),
        ("tenant", "delete", "delete", NAMESPACE, [KEY.hex], "OK"),
        ("tenant", "admin", "clear", "another", [], "PERMISSION_DENIED"),
        ("", None, "lookup", "", [], "UNAUTHENTICATED"),
    ]
