"""`kintsugi store`: run a shard, look into one, simulate eviction."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kintsugi.cli.exits import exit_code_of
from kintsugi.client.admin import ShardAdmin
from kintsugi.client.grpc_store import GrpcOptions, GrpcStore
from kintsugi.client.tls import TlsFiles
from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.admission import ShardConfig
from kintsugi.store.opening import ShardSpec, SsdSpec, open_shard, parsed_size
from kintsugi.store.policies import DEFAULT_POLICY, POLICIES, policy_factory
from kintsugi.store.server import ServerOptions, ShardServer
from kintsugi.store.simulate import Belady, read_trace, replay

app = typer.Typer(help="Shards of the chunk KV-cache store.", no_args_is_help=True)
console = Console()
errors = Console(stderr=True)

Address = Annotated[str, typer.Option(help="Shard, as host:port.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Tenant whose chunks are meant.")]
TlsCa = Annotated[Path | None, typer.Option(help="PEM file of the authority that signs both sides.")]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file of this side's certificate.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file of this side's private key.")]

DEFAULT_ADDRESS = "127.0.0.1:7400"
FAILURE_POLL_S = 0.5
VERIFY_PAGE = 64
SWITCH_INTERVAL_S = 0.0005
"""A tenth of Python's own: a lookup must not wait 5 ms for a thread that reads the disk."""


@contextmanager
def explained() -> Iterator[None]:
    """Errors of the world in one line, without a traceback."""
    try:
        yield
    except KintsugiError as error:
        errors.print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(exit_code_of(error)) from None


def tls_files(ca: Path | None, cert: Path | None, key: Path | None) -> TlsFiles | None:
    """All three, or none. Raises `InvalidField`."""
    if ca is None and cert is None and key is None:
        return None
    if ca is None or cert is None or key is None:
        raise InvalidField("tls", "give --tls-ca, --tls-cert and --tls-key together")
    return TlsFiles(ca, cert, key)


@contextmanager
def admin(address: str, tls: TlsFiles | None) -> Iterator[ShardAdmin]:
    store = GrpcStore(address, GrpcOptions(tls=tls))
    try:
        yield ShardAdmin(store)
    finally:
        store.close()


def parsed_keys(keys: list[str]) -> list[ChunkKey]:
    return [ChunkKey.from_hex(key) for key in keys]


def parsed_quotas(quotas: list[str]) -> dict[str, int]:
    """`NAMESPACE=SIZE` each."""
    parsed = {}
    for quota in quotas:
        namespace, separator, size = quota.rpartition("=")
        if not separator or not namespace:
            raise InvalidField("quota", f"{quota!r} must be NAMESPACE=SIZE, or *=SIZE for everyone else")
        parsed[namespace] = parsed_size(size)
    return parsed


@app.command()
def serve(
    data_dir: Annotated[Path | None, typer.Option(help="Identity and reports of the shard.")] = None,
    ram: Annotated[str, typer.Option(help="Size of the RAM tier.")] = "4GiB",
    ssd: Annotated[list[str] | None, typer.Option(help="FOLDER:SIZE; repeat, fastest first.")] = None,
    listen: Annotated[str, typer.Option(help="host:port to listen on.")] = DEFAULT_ADDRESS,
    ack: Annotated[str, typer.Option(help="When a put that does not say returns: ram or durable.")] = "ram",
    policy: Annotated[str, typer.Option(help=f"Eviction: {', '.join(POLICIES)}.")] = DEFAULT_POLICY,
    quota: Annotated[list[str] | None, typer.Option(help="NAMESPACE=SIZE; repeat.")] = None,
    recompute_ms_per_token: Annotated[
        float, typer.Option(help="Prefill cost of writers that do not say; decides where auto puts a chunk.")
    ] = 0.0,
    scrub: Annotated[str, typer.Option(help="Bytes to verify per second in the background.")] = "0",
    metrics: Annotated[str, typer.Option(help="host:port that answers Prometheus.")] = "",
    share_arena: Annotated[bool, typer.Option(help="Let peers of this host read RAM directly.")] = True,
    socket_folder: Annotated[Path | None, typer.Option(help="Folder that a pod's containers share.")] = None,
    drain_s: Annotated[float, typer.Option(help="How long to write back when told to stop.")] = 30.0,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Annotated[bool, typer.Option(help="Listen beyond loopback without TLS.")] = False,
) -> None:
    """Run a shard until it is told to stop; it drains first."""
    with explained():
        if ack not in ("ram", "durable"):
            raise InvalidField("ack", f"{ack!r} is neither ram nor durable")
        spec = ShardSpec(
            ram_bytes=parsed_size(ram),
            data_dir=data_dir,
            ssds=tuple(SsdSpec.parsed(text) for text in ssd or []),
            policy=policy,
            config=ShardConfig(parsed_quotas(quota or []), recompute_ms_per_token),
        )
        if ack == "durable" and not spec.ssds:
            raise InvalidField("ack", "durable needs an SSD tier; give --ssd")
        options = ServerOptions(
            durable_by_default=ack == "durable",
            share_arena=share_arena,
            socket_folder=socket_folder,
            scrub_bytes_per_s=parsed_size(scrub),
            tls=tls_files(tls_ca, tls_cert, tls_key),
            insecure=insecure,
            metrics_listen=metrics,
        )
        raise typer.Exit(_served(spec, listen, options, drain_s))


def _served(spec: ShardSpec, listen: str, options: ServerOptions, drain_s: float) -> int:
    """Serve until a signal or a failure; the exit status."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    shard = open_shard(spec)
    try:
        with ShardServer(shard, listen, options) as server:
            console.print(
                f"shard {shard.shard_id} serves {len(shard)} chunks on {server.address}", highlight=False
            )
            while shard.failure is None and not stop.wait(FAILURE_POLL_S):
                pass
            left = shard.drain(drain_s) if shard.failure is None else 0
    finally:
        shard.close()
    if shard.failure is not None:
        errors.print(f"[red]the shard failed:[/red] {shard.failure!r}", highlight=False)
        return 1
    if left:
        errors.print(f"{left} bytes were not written back within {drain_s:.0f} s", highlight=False)
        return 1
    return 0


@app.command()
def status(
    address: Address = DEFAULT_ADDRESS, tls_ca: TlsCa = None, tls_cert: TlsCert = None, tls_key: TlsKey = None
) -> None:
    """What a shard holds and how it does."""
    with explained(), admin(address, tls_files(tls_ca, tls_cert, tls_key)) as shard:
        stats = shard.stats()
    asked = stats.hits + stats.misses
    ratio = f" ({stats.hits / asked:.1%} hit)" if asked else ""
    console.print(f"shard {stats.shard_id}{' · draining' if stats.draining else ''}", highlight=False)
    console.print(f"{stats.chunks} chunks · {asked} keys looked up{ratio} · {stats.quarantined} quarantined")
    table = Table("tier", "chunks", "used", "capacity", "evictions", "waiting")
    for tier in stats.tiers:
        sizes = [human(size) for size in (tier.bytes_used, tier.bytes_capacity)]
        table.add_row(tier.name, str(tier.chunks), *sizes, str(tier.evictions), human(tier.queue_bytes))
    console.print(table)
    for path, size in sorted(stats.bytes_read.items()):
        console.print(f"read over {path}: {human(size)}", highlight=False)


def human(size: float) -> str:
    """A size with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


@app.command("ls")
def list_chunks(
    namespace: Namespace,
    address: Address = DEFAULT_ADDRESS,
    limit: Annotated[int, typer.Option(help="Most chunks to show.", min=1, max=10_000)] = 100,
    after: Annotated[str | None, typer.Option(help="Key to go on behind.")] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Chunks of a namespace in key order."""
    with explained(), admin(address, tls_files(tls_ca, tls_cert, tls_key)) as shard:
        chunks = shard.list(namespace, limit, ChunkKey.from_hex(after) if after else None)
    for chunk in chunks:
        manifest = chunk.manifest
        console.print(
            f"{manifest.key.hex}  {manifest.num_tokens:>6} tokens  {human(manifest.chunk_bytes):>10}  "
            f"{chunk.tier:<5}  model {manifest.fingerprint}",
            highlight=False,
            soft_wrap=True,
        )


@app.command("rm")
def remove(
    namespace: Namespace,
    keys: Annotated[list[str] | None, typer.Argument(help="Chunk keys, hexadecimal.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every chunk of the namespace.")] = False,
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Forget chunks."""
    with explained():
        if everything == bool(keys):
            raise InvalidField("keys", "name chunk keys, or say --all")
        tls = tls_files(tls_ca, tls_cert, tls_key)
        store = GrpcStore(address, GrpcOptions(tls=tls))
        try:
            deleted = (
                ShardAdmin(store).clear(namespace)
                if everything
                else store.delete(namespace, parsed_keys(keys or []))
            )
        finally:
            store.close()
    console.print(f"{deleted} chunks forgotten")


@app.command()
def pin(
    namespace: Namespace,
    keys: Annotated[list[str], typer.Argument(help="Chunk keys, hexadecimal.")],
    lease_s: Annotated[float, typer.Option(help="Seconds until the pin ends by itself.")] = 3600.0,
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Keep chunks from being evicted."""
    with explained(), admin(address, tls_files(tls_ca, tls_cert, tls_key)) as shard:
        pinned = shard.store.pin(namespace, parsed_keys(keys), lease_s)
    console.print(f"{pinned.chunks} of {len(keys)} chunks pinned by lease {pinned.lease_id}", highlight=False)


@app.command()
def verify(
    namespace: Namespace,
    keys: Annotated[list[str] | None, typer.Argument(help="Chunk keys; all where none is named.")] = None,
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Read chunks from every tier; damaged ones are quarantined, and the exit status is 1."""
    intact = absent = 0
    damaged: list[ChunkKey] = []
    with explained(), admin(address, tls_files(tls_ca, tls_cert, tls_key)) as shard:
        for page in _pages(shard, namespace, keys):
            verified = shard.verify(namespace, page)
            intact += verified.intact
            absent += verified.absent
            damaged += verified.quarantined
    for key in damaged:
        console.print(f"quarantined {key.hex}", highlight=False)
    console.print(f"{intact} intact, {absent} absent, {len(damaged)} quarantined")
    raise typer.Exit(1 if damaged else 0)


def _pages(shard: ShardAdmin, namespace: str, keys: list[str] | None) -> Iterator[list[ChunkKey]]:
    if keys:
        yield parsed_keys(keys)
        return
    after: ChunkKey | None = None
    while page := shard.list(namespace, VERIFY_PAGE, after):
        after = page[-1].manifest.key
        yield [chunk.manifest.key for chunk in page]


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="JSON lines: key and size, or Mooncake's hash_ids.")],
    policy: Annotated[list[str] | None, typer.Option(help="Repeat; all where none is named.")] = None,
    capacity: Annotated[
        str, typer.Option(help="A size, or a share of all distinct bytes, such as 5%.")
    ] = "5%",
) -> None:
    """Replay a trace against eviction policies, beside Belady's optimum."""
    with explained():
        accesses = read_trace(trace)
        capacity_bytes = _capacity(capacity, sum({a.key: a.size_bytes for a in accesses}.values()))
        policies = {name: policy_factory(name)(capacity_bytes) for name in policy or POLICIES}
        table = Table("policy", "hit ratio", "byte hit ratio", "of optimum")
        optimum = replay(accesses, Belady(accesses), capacity_bytes)
        rows = [(name, replay(accesses, each, capacity_bytes)) for name, each in policies.items()]
        for name, result in [*rows, ("belady", optimum)]:
            share = result.hit_ratio / optimum.hit_ratio if optimum.hits else 1.0
            table.add_row(name, f"{result.hit_ratio:.4f}", f"{result.byte_hit_ratio:.4f}", f"{share:.3f}")
    console.print(f"{len(accesses)} accesses, capacity {capacity_bytes}")
    console.print(table)


def _capacity(text: str, distinct_bytes: int) -> int:
    if not text.endswith("%"):
        return parsed_size(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        raise InvalidField("capacity", f"{text!r} is neither a size nor a percentage") from None
    if not 0 < share <= 1:
        raise InvalidField("capacity", f"{text} is outside (0 %, 100 %]")
    return max(1, int(share * distinct_bytes))
