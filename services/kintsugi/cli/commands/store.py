"""`kintsugi store`: runs and inspects shards."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from kintsugi.cli.options import BucketTier, SsdTiers, TlsCert, TlsKey
from kintsugi.cli.render import format_bytes
from kintsugi.cli.runner import command
from kintsugi.cli.screen import Screen
from kintsugi.core.deploy import DRAIN_S
from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkKey
from kintsugi.serving.catching_up import CatchingUp
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.registry import open_directory, open_store
from kintsugi.store.protocol.tls import TlsFiles
from kintsugi.store.replication import Replicator
from kintsugi.store.shard.eviction.policy import DEFAULT_POLICY, POLICIES
from kintsugi.store.shard.opening import BucketSpec, ShardSpec, SsdSpec, open_shard, parse_size
from kintsugi.store.shard.server import ServerOptions, ShardServer

app = typer.Typer(help="Run and inspect shards of the chunk KV-cache store.", no_args_is_help=True)

Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the chunks.")]
DEFAULT_ADDRESS = "127.0.0.1:7400"
DEFAULT_STORE = f"grpc://{DEFAULT_ADDRESS}"
FAILURE_POLL_S = 0.5
SWITCH_INTERVAL_S = 0.0005
"""Python's interval between thread switches, a tenth of its default: a lookup must not wait 5 ms for a
thread that reads the disk."""


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The files of mutual TLS."""

    tls_ca: Annotated[Path | None, typer.Option(help="PEM file of the authority of both certificates.")] = (
        None
    )
    tls_cert: TlsCert = None
    tls_key: TlsKey = None

    def files(self) -> TlsFiles | None:
        """Return the three files; None if no file is given. Raises `InvalidField` if only some are given."""
        ca, cert, key = self.tls_ca, self.tls_cert, self.tls_key
        if ca is not None and cert is not None and key is not None:
            return TlsFiles(ca, cert, key)
        if ca is None and cert is None and key is None:
            return None
        raise InvalidField("tls", "give --tls-ca, --tls-cert and --tls-key together")


@dataclass(frozen=True, kw_only=True)
class ShardLink:
    """Connection to a shard."""

    store: Annotated[
        str,
        typer.Option(help="URL of the shard, such as grpc://HOST:PORT?token_file=FILE&tls_ca=FILE."),
    ] = DEFAULT_STORE

    @contextmanager
    def connect(self) -> Iterator[GrpcStore]:
        """Connect to the shard. Raises `InvalidField` if the URL does not name one shard."""
        with closing(open_store(self.store)) as store:
            if not isinstance(store, GrpcStore):
                raise InvalidField("store", f"{self.store!r} does not name one shard; use grpc://HOST:PORT")
            yield store


def parse_keys(keys: list[str]) -> list[ChunkKey]:
    """Parse chunk keys in hexadecimal. Raises `InvalidField`."""
    return [ChunkKey.from_hex(key) for key in keys]


@command(app)
def serve(
    screen: Screen,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for the shard's identity and reports.")
    ] = None,
    ram: Annotated[str, typer.Option(help="Size of the RAM tier.")] = "4GiB",
    ssd: SsdTiers = None,
    bucket: BucketTier = None,
    listen: Annotated[str, typer.Option(help="Address to listen on, as host:port.")] = DEFAULT_ADDRESS,
    ack: Annotated[
        str, typer.Option(help="When puts return: once a chunk is in RAM (ram), or on disk (durable).")
    ] = "ram",
    policy: Annotated[
        str, typer.Option(help=f"Eviction policy: {', '.join(POLICIES)}, or that of a plugin.")
    ] = DEFAULT_POLICY,
    peers: Annotated[
        str,
        typer.Option(
            help="URL of the whole store (shards://, shardfile://): replicate chunks to its other shards, "
            "and apply their erasures."
        ),
    ] = "",
    metrics: Annotated[str, typer.Option(help="Address for Prometheus metrics, as host:port.")] = "",
    share_arena: Annotated[
        bool, typer.Option(help="Let engines on this host read the RAM tier through shared memory.")
    ] = True,
    *,
    tls: TlsOptions,
    insecure: Annotated[bool, typer.Option(help="Listen beyond loopback without TLS.")] = False,
    tokens_file: Annotated[
        Path | None, typer.Option(help="File of hashed tokens and permissions. Default: no tokens needed.")
    ] = None,
    audit_dir: Annotated[Path | None, typer.Option(help="Folder of the audit log.")] = None,
    protect_metrics: Annotated[
        bool, typer.Option(help="Serve metrics only to tokens with the verb admin for every namespace.")
    ] = False,
) -> int:
    """Run a shard until interrupted. Before it stops, it writes back what only RAM holds."""
    if ack not in ("ram", "durable"):
        raise InvalidField("ack", f"{ack!r} must be ram or durable")
    spec = ShardSpec(
        ram_bytes=parse_size(ram),
        data_dir=data_dir,
        ssds=tuple(SsdSpec.from_text(text) for text in ssd or []),
        policy=policy,
        bucket=None if bucket is None else BucketSpec.from_text(bucket),
    )
    if ack == "durable" and not spec.ssds:
        raise InvalidField("ack", "durable needs an SSD tier; give --ssd")
    options = ServerOptions(
        durable_by_default=ack == "durable",
        share_arena=share_arena,
        tls=tls.files(),
        insecure=insecure,
        metrics_listen=metrics,
        protect_metrics=protect_metrics,
        tokens_file=tokens_file,
        audit_dir=audit_dir,
    )
    return _serve_shard(screen, spec, listen, options, peers)


def _serve_shard(screen: Screen, spec: ShardSpec, listen: str, options: ServerOptions, peers: str) -> int:
    """Serve until a signal or a failure. Returns the exit code."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with screen.step("Opening the shard"):
        shard = open_shard(spec)
    try:
        with ExitStack() as stack:
            if peers:  # apply the peers' erasures before serving clients
                catching_up = CatchingUp(shard, *open_directory(peers))
                stack.callback(catching_up.close)
                catching_up.start()
            server = stack.enter_context(ShardServer(shard, listen, options))
            if peers:
                replicator = Replicator(shard, *open_directory(peers))
                replicator.start()
                stack.callback(replicator.stop)
            banner = f"shard {shard.shard_id} serves {len(shard)} chunks on {server.address}"
            document = {"shard_id": shard.shard_id, "chunks": len(shard), "address": server.address}
            screen.show(document, banner)
            sys.stdout.flush()
            while shard.failure is None and not stop.wait(FAILURE_POLL_S):
                pass
            left = shard.drain(DRAIN_S) if shard.failure is None else 0
    finally:
        shard.close()
    if shard.failure is not None:
        screen.note(f"the shard failed: {shard.failure!r}")
        return 1
    if left:
        screen.note(f"{left} bytes were not written back within {DRAIN_S:.0f} s")
        return 1
    return 0


@command(app)
def status(screen: Screen, shard: ShardLink) -> None:
    """Print the state of a shard: chunks, tiers and counters."""
    with shard.connect() as store:
        stats = store.counters()
    document = MessageToDict(
        stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    screen.show(_numbers(document), lambda console: _print_status(console, stats))


def _numbers(document: Any) -> Any:
    """Convert strings of digits to numbers: Protobuf's JSON form quotes 64-bit integers."""
    if isinstance(document, dict):
        return {key: _numbers(value) for key, value in document.items()}
    if isinstance(document, list):
        return [_numbers(value) for value in document]
    return int(document) if isinstance(document, str) and document.isdecimal() else document


def _print_status(console: Console, stats: Any) -> None:
    asked = stats.hits + stats.misses
    ratio = f" ({stats.hits / asked:.1%} hit)" if asked else ""
    console.print(f"shard {stats.shard_id}{' · draining' if stats.draining else ''}")
    console.print(f"{stats.chunks} chunks · {asked} keys looked up{ratio} · {stats.quarantined} quarantined")
    table = Table("tier", "chunks", "used", "capacity", "evictions", "waiting")
    for tier in stats.tiers:
        sizes = [format_bytes(size) for size in (tier.bytes_used, tier.bytes_capacity)]
        table.add_row(
            tier.name, str(tier.chunks), *sizes, str(tier.evictions), format_bytes(tier.queue_bytes)
        )
    console.print(table)
    for tier in stats.tiers:
        if tier.failure:
            console.print(f"{tier.name} failed: {tier.failure}", soft_wrap=True)
    for path, size in sorted(stats.bytes_read.items()):
        console.print(f"read over {path}: {format_bytes(size)}")


@command(app, "ls")
def list_chunks(
    screen: Screen,
    namespace: Namespace,
    *,
    shard: ShardLink,
    limit: Annotated[int, typer.Option(help="Maximum number of chunks to list.", min=1, max=10_000)] = 100,
) -> None:
    """List chunks of a namespace in key order."""
    with shard.connect() as store:
        chunks = store.list_found(namespace, limit)
    rows: list[dict[str, Any]] = [
        {
            "key": chunk.manifest.key.hex,
            "tokens": chunk.manifest.num_tokens,
            "bytes": chunk.manifest.chunk_bytes,
            "tier": chunk.source.tier,
            "model": str(chunk.manifest.fingerprint),
        }
        for chunk in chunks
    ]
    lines = [
        f"{row['key']}  {row['tokens']:>6} tokens  {format_bytes(row['bytes']):>10}  "
        f"{row['tier']:<5}  model {row['model']}"
        for row in rows
    ]
    screen.show({"chunks": rows}, "\n".join(lines))


@command(app, "rm")
def remove(
    screen: Screen,
    namespace: Namespace,
    keys: Annotated[list[str] | None, typer.Argument(help="Chunk keys in hexadecimal.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete every chunk of the namespace.")] = False,
    erase: Annotated[
        bool, typer.Option("--erase", help="Also overwrite or destroy the data in memory, files and caches.")
    ] = False,
    *,
    shard: ShardLink,
) -> None:
    """Delete chunks."""
    if everything == bool(keys):
        raise InvalidField("keys", "give either chunk keys or --all")
    with shard.connect() as store:
        if erase:
            _erase(screen, store, namespace, None if everything else parse_keys(keys or []))
            return
        deleted = store.clear(namespace) if everything else store.delete(namespace, parse_keys(keys or []))
    screen.show({"deleted": deleted}, f"{deleted} chunks deleted")


def _erase(screen: Screen, store: GrpcStore, namespace: str, keys: list[ChunkKey] | None) -> None:
    """Erase the chunks, or the whole namespace if ``keys`` is None, and print the receipt."""
    with screen.step("Erasing"):
        places = store.erase(namespace, keys, time.time())
    lines = [f"{one.place}: {one.items} chunks, {format_bytes(one.size_bytes)}, erased" for one in places]
    screen.show({"places": [asdict(place) for place in places]}, "\n".join(lines))
