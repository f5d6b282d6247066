"""Compares the chunk store with its machine: socket, memcpy and disk baselines of the same run.

Usage: python benchmarks/store.py [--quick] [--save] [--only NAME ...] [--folder FOLDER] [--trace FILE]

Digests are verified inside every measured path; `*_unverified` figures are measured without them. Chunks are
512 tokens of an 8-head, 32-layer, bf16 model: frames of 2 MiB, 64 MiB each. A shard runs in its own process,
its CPU time is counted with the client's. Rates are medians of rounds that alternate with their baseline. The
last line is JSON. In full it takes some 17 minutes, ten of them churn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import mmap
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support.figures import Figure, report, spread
from benchmarks.support.memory_samples import MemorySamples
from kintsugi.cli.commands.store import SWITCH_INTERVAL_S
from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, KVLayout, digests_of
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.received import ArenaMap
from kintsugi.store.protocol.interface import LayerFrame
from kintsugi.store.shard.eviction.policy import DEFAULT_POLICY, policy_factory
from kintsugi.store.shard.malloc import keep_large_buffers
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.fakes.cache_replay import TraceAccess, rag_trace, read_trace, replay

LAYOUT = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
TOKENS = 512
SPACE = ChunkSpace(ModelFingerprint.of({"weights": "benchmark"}), "bench")
EVERY_HEAD = HeadRange(0, LAYOUT.num_kv_heads)
GB = 1e9
MIB = 1 << 20
BLOCK = 2 * MIB


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    chunks: int
    rounds: int
    seconds: float
    churn_s: float


FULL = Scale(chunks=16, rounds=7, seconds=10.0, churn_s=600.0)
QUICK = Scale(chunks=8, rounds=3, seconds=3.0, churn_s=15.0)


def make_chunk(index: int, tokens: int = TOKENS) -> tuple[ChunkManifest, list[memoryview]]:
    """A chunk whose frames differ from each other and from every other chunk's."""
    size = LAYOUT.frame_bytes(Codec.RAW, tokens)
    noise = random.Random(index).randbytes(size + LAYOUT.num_layers)
    frames = [memoryview(noise)[layer : layer + size] for layer in range(LAYOUT.num_layers)]
    head = LAYOUT.head_bytes(Codec.RAW, tokens)
    digests = b"".join(digests_of(frame, head) for frame in frames)
    key = ChunkKey.of(SPACE, [index, tokens])
    manifest = ChunkManifest(
        key, SPACE.digest, SPACE.fingerprint, SPACE.namespace, tokens, LAYOUT, Codec.RAW, (), digests
    )
    return manifest, frames


# Baselines


_SENDER = """
import socket, sys
port, blocks, size = map(int, sys.argv[1:])
with socket.create_connection(("127.0.0.1", port)) as sender:
    block = bytes(size)
    for _ in range(blocks):
        sender.sendall(block)
"""


def tcp_gb_per_s(total: int) -> float:
    """Raw loopback TCP: another process sends, this one receives into one buffer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        # Not a fork: this process would then fault on every page that it writes to.
        sender = subprocess.Popen([sys.executable, "-c", _SENDER, port, str(total // BLOCK), str(BLOCK)])
        peer, _ = listener.accept()
        with peer:
            buffer = memoryview(bytearray(BLOCK))
            received, began_s = 0, time.perf_counter()
            while count := peer.recv_into(buffer):
                received += count
            elapsed_s = time.perf_counter() - began_s
        sender.wait()
    return received / elapsed_s / GB


def memcpy_gb_per_s(total: int) -> float:
    source, target = memoryview(bytearray(BLOCK * 16)), memoryview(bytearray(BLOCK))
    began_s = time.perf_counter()
    for index in range(total // BLOCK):
        start = index % 16 * BLOCK
        target[:] = source[start : start + BLOCK]
    return total / (time.perf_counter() - began_s) / GB


def disk_gb_per_s(folder: Path, total: int, write: bool) -> float:
    """Sequential O_DIRECT in blocks of 8 MiB, synced; a read needs the write before it."""
    block = memoryview(mmap.mmap(-1, 4 * BLOCK))
    fd = os.open(folder / "baseline", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, total)
        began_s = time.perf_counter()
        for offset in range(0, total, len(block)):
            if write:
                os.pwritev(fd, [block], offset)
            else:
                os.preadv(fd, [block], offset)
        if write:
            os.fdatasync(fd)
        return total / (time.perf_counter() - began_s) / GB
    finally:
        os.close(fd)


# A shard in its own process


@dataclass(frozen=True)
class Server:
    """A shard's process."""

    pid: int
    address: str

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def python_environment() -> dict[str, str]:
    """For a process that needs the imports of this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextlib.contextmanager
def served(
    folder: Path, ram: str, ssd: str = "", policy: str = DEFAULT_POLICY, *more: str
) -> Iterator[Server]:
    command = [sys.executable, "-c", "from kintsugi.cli.commands.store import app; app()", "serve"]
    command += ["--ram", ram, *more]
    command += ["--policy", policy, "--listen", "127.0.0.1:0", "--data-dir", str(folder / "data")]
    command += ["--ssd", f"{folder / 'ssd'}:{ssd}", "--ack", "durable"] if ssd else []
    environment = {**python_environment(), "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield Server(process.pid, process.stdout.readline().split()[-1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def read_chunks(store: GrpcStore, keys: Sequence[ChunkKey]) -> int:
    """Bytes of every layer of the chunks; each must arrive."""
    size = frames = 0
    for item in store.stream("bench", keys, range(LAYOUT.num_layers), EVERY_HEAD, deadline_s=30.0):
        assert isinstance(item, LayerFrame), item
        size += len(item.data)
        frames += 1
    assert frames == len(keys) * LAYOUT.num_layers
    return size


@contextlib.contextmanager
def unverified() -> Iterator[None]:
    """Skip the verification of digests in the block, for the `*_unverified` figures only."""

    def copy(
        arena: ArenaMap, offset: int, into: memoryview, manifest: ChunkManifest, layer: int, heads: HeadRange
    ) -> bool:
        into[:] = arena._view[offset : offset + len(into)]
        return True

    originals = ArenaMap.copy_frame, ChunkManifest.frame_is_intact
    ArenaMap.copy_frame = copy  # type: ignore[method-assign,assignment]
    ChunkManifest.frame_is_intact = lambda *_: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        ArenaMap.copy_frame, ChunkManifest.frame_is_intact = originals  # type: ignore[method-assign]


# Figures


def reading(scale: Scale, folder: Path) -> list[Figure]:
    """Read chunks in RAM over both paths, and measure when their first layer arrives."""
    chunks = [make_chunk(index) for index in range(scale.chunks)]
    keys = [manifest.key for manifest, _ in chunks]
    total = sum(manifest.chunk_bytes for manifest, _ in chunks)
    figures: list[Figure] = []
    with served(folder, f"{2 * total >> 20}MiB") as server:
        stores = {
            "same_host": GrpcStore(server.address),
            "grpc": GrpcStore(server.address, GrpcOptions(same_host=False)),
        }
        for manifest, frames in chunks:
            stores["grpc"].put(manifest, frames)
        for name, bar, cpu_bar in (("same_host", 1.2, 0.35), ("grpc", 0.35, 1.1)):
            rates = _against_tcp(scale, server, stores[name], keys, total)
            with unverified():
                plain = _against_tcp(scale, server, stores[name], keys, total)
            figures += [
                Figure.at_least(f"{name}_read_vs_tcp", rates[0], bar, "ratio"),
                Figure.at_most(f"{name}_cpu_s_per_gb", rates[1], cpu_bar, "s/GB"),
                Figure(f"{name}_read_gb_per_s", rates[2], "GB/s"),
                Figure(f"{name}_read_vs_tcp_unverified", plain[0], "ratio"),
                Figure(f"{name}_cpu_s_per_gb_unverified", plain[1], "s/GB"),
            ]
        first = {name: _first_layer_ms(store, keys[:6]) for name, store in stores.items()}
        figures += [
            Figure.at_most("first_layer_ms_p50", first["same_host"], 3.0, "ms"),
            Figure("first_layer_grpc_ms_p50", first["grpc"], "ms"),
        ]
        for store in stores.values():
            store.close()
    figures.append(Figure("memcpy_gb_per_s", memcpy_gb_per_s(4 * total), "GB/s"))
    return figures


def _against_tcp(
    scale: Scale, server: Server, store: GrpcStore, keys: Sequence[ChunkKey], total: int
) -> tuple[float, float, float]:
    """Median rate ÷ TCP's, median CPU seconds per GB of both ends, median GB/s."""
    read_chunks(store, keys)  # what is touched first is mapped first
    rates, costs, baselines = [], [], []
    for _ in range(scale.rounds):
        baselines.append(tcp_gb_per_s(total))
        cpu_s, began_s = own_cpu_s() + server.cpu_s(), time.perf_counter()
        size = read_chunks(store, keys)
        rates.append(size / (time.perf_counter() - began_s) / GB)
        costs.append((own_cpu_s() + server.cpu_s() - cpu_s) / (size / GB))
    rate = statistics.median(rates)
    return rate / statistics.median(baselines), statistics.median(costs), rate


def _first_layer_ms(store: GrpcStore, keys: Sequence[ChunkKey]) -> float:
    """Median time until layer 0 of every chunk of a request is there, verified."""
    times = []
    for _ in range(30):
        began_s = time.perf_counter()
        stream = store.stream("bench", keys, range(LAYOUT.num_layers), EVERY_HEAD, deadline_s=30.0)
        for _ in keys:
            assert isinstance(next(stream), LayerFrame)
        times.append(1e3 * (time.perf_counter() - began_s))
        stream.close()
    return statistics.median(times)


async def threaded_lookups(store: GrpcStore, keys: Sequence[ChunkKey], calls: int) -> list[float]:
    """Seconds per lookup from an event loop, as a gateway makes them. Closes the store."""
    threaded, times = ThreadedStore(store), []
    for _ in range(calls):
        start_s = time.perf_counter()
        await threaded.run(lambda held: held.lookup("bench", keys))
        times.append(time.perf_counter() - start_s)
    await threaded.close()
    return times


def lookups(scale: Scale, folder: Path) -> list[Figure]:
    """Look up batches of 64 keys, half of which are stored."""
    with served(folder, "512MiB") as server:
        store = GrpcStore(server.address)
        small = [make_chunk(index, tokens=16) for index in range(64)]
        for manifest, frames in small:
            store.put(manifest, frames)
        keys = [manifest.key for manifest, _ in small[:32]] + [ChunkKey.of(SPACE, [i]) for i in range(32)]
        store.lookup("bench", keys)
        times = []
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < scale.seconds:
            start_s = time.perf_counter()
            store.lookup("bench", keys)
            times.append(time.perf_counter() - start_s)
        elapsed_s = time.perf_counter() - began_s
        threaded = asyncio.run(threaded_lookups(store, keys, len(times)))
    return [
        Figure.at_most("lookup64_ms_p50", 1e3 * statistics.median(times), 2.0, "ms"),
        Figure("lookup64_threaded_ms_p50", 1e3 * statistics.median(threaded), "ms"),
        Figure.at_least("lookup_keys_per_s", 64 * len(times) / elapsed_s, 20_000, "keys/s"),
    ]


def durable_puts(scale: Scale, folder: Path) -> list[Figure]:
    """Puts into a shard of this process, acknowledged once on disk: the tier's own cost, no network."""
    chunks = [make_chunk(index) for index in range(scale.chunks)]
    total = sum(manifest.chunk_bytes for manifest, _ in chunks)
    rates, costs, baselines = [], [], []
    ssd = SsdSpec(folder / "ssd", 2 * total)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a shard's own process
    shard = open_shard(ShardSpec(2 * total, folder / "data", (ssd,)))
    for round_ in range(scale.rounds + 1):
        disk = disk_gb_per_s(folder, total, write=True)
        cpu_s, began_s = own_cpu_s(), time.perf_counter()
        _put_all(shard, chunks)
        elapsed_s, cpu_s = time.perf_counter() - began_s, own_cpu_s() - cpu_s
        if round_:  # the first round touches arena and slab for the first time
            baselines.append(disk)
            rates.append(total / elapsed_s / GB)
            costs.append(cpu_s / (total / GB))
        shard.clear("bench")
        for flushed in shard.flush_writers():
            flushed.result(60.0)
    shard.close()
    rate = statistics.median(rates)
    return [
        Figure.at_least("durable_put_vs_disk", rate / statistics.median(baselines), 0.5, "ratio"),
        Figure.at_most("durable_put_cpu_s_per_gb", statistics.median(costs), 0.22, "s/GB"),
        Figure("durable_put_gb_per_s", rate, "GB/s"),
        Figure("disk_write_gb_per_s", statistics.median(baselines), "GB/s"),
    ]


def _put_all(shard: Shard, chunks: Sequence[tuple[ChunkManifest, list[memoryview]]]) -> None:
    """Return once every chunk is on disk."""
    pending = []
    for manifest, frames in chunks:
        put = shard.begin_put(manifest, PutOptions(durable=True), wait_s=60.0)
        assert put is not None
        for layer, frame in enumerate(frames):
            put.write(layer, frame)
        pending.append(shard.commit(put).durable)
    for durable in pending:
        assert durable is not None
        durable.result(60.0)


def cold_reads(scale: Scale, folder: Path) -> list[Figure]:
    """Chunks that only the disk has, and lookups beside them.

    RAM holds half of the chunks and forgets the least recently used, so that reading all of them in turns
    finds none there.
    """
    manifests = []
    total = 64 * MIB * 2 * scale.chunks
    with served(folder, f"{scale.chunks * 64}MiB", f"{total // MIB + 64}MiB", policy="lru") as server:
        store = GrpcStore(server.address)
        for index in range(2 * scale.chunks):
            manifest, frames = make_chunk(index)
            store.put(manifest, frames)
            manifests.append(manifest)
        keys = [manifest.key for manifest in manifests]
        disk_gb_per_s(folder, total // 4, write=True)
        rates, baselines = [], []
        for round_ in range(scale.rounds + 1):
            disk = disk_gb_per_s(folder, total // 4, write=False)
            began_s = time.perf_counter()
            size = sum(read_chunks(store, keys[start : start + 4]) for start in range(0, len(keys), 4))
            if round_:  # the first round maps the arena's pages
                baselines.append(disk)
                rates.append(size / (time.perf_counter() - began_s) / GB)
        store.close()
        alone_ms, beside_ms = _lookup_p99_ms(server, keys, scale.seconds)
    rate = statistics.median(rates)
    return [
        Figure.at_least("cold_read_vs_disk", rate / statistics.median(baselines), 0.7, "ratio"),
        Figure("cold_read_gb_per_s", rate, "GB/s"),
        Figure("disk_read_gb_per_s", statistics.median(baselines), "GB/s"),
        Figure.at_most("p99_ms_beside_cold_reads", beside_ms, 10.0, "ms"),
        Figure("p99_ms_alone", alone_ms, "ms"),
    ]


def _lookup_p99_ms(server: Server, keys: list[ChunkKey], seconds: float) -> tuple[float, float]:
    """p99 of lookups, alone and while another process reads chunks in turns that RAM cannot hold."""
    store = GrpcStore(server.address)
    alone_ms = _lookup_times_p99_ms(store, keys, seconds)
    command = [sys.executable, __file__, "--read-cold", server.address, *(key.hex for key in keys)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, env=python_environment())
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline()  # it has read something
        beside_ms = _lookup_times_p99_ms(store, keys, seconds)
    finally:
        reader.kill()
        reader.communicate()
        store.close()
    return alone_ms, beside_ms


def _lookup_times_p99_ms(store: GrpcStore, keys: list[ChunkKey], seconds: float) -> float:
    times = []
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        start_s = time.perf_counter()
        store.lookup("bench", keys[:8])
        times.append(time.perf_counter() - start_s)
        time.sleep(0.002)
    return 1e3 * statistics.quantiles(times, n=100)[98]


def read_cold(address: str, keys: list[ChunkKey]) -> None:
    """The other client, which reads until it is ended."""
    store = GrpcStore(address)
    while True:
        for start in range(0, len(keys), 4):
            read_chunks(store, keys[start : start + 4])
            print("read", flush=True)


def churn(scale: Scale, folder: Path) -> list[Figure]:
    """Mixed chunk sizes against a shard that is 95 % full, compared with the same puts into an empty one.

    An empty one fills within seconds, so it is emptied and filled again; the first round maps its pages.
    """
    sizes = [make_chunk(1000 + tokens, tokens) for tokens in (32, 96, 128, 256, 512, 640)]
    chance = random.Random(7)
    rates = []
    with served(folder, "512MiB", "2GiB") as server:
        store = GrpcStore(server.address, GrpcOptions(ack="ram"))
        counter = iter(range(1 << 40))
        for _ in range(scale.rounds + 1):
            rates.append(_put_rate(store, sizes, chance, counter, lambda _: _fill(store) >= 0.6))
            store.clear("bench")
        _put_rate(store, sizes, chance, counter, lambda _: _fill(store) >= 0.95)
        _put_rate(
            store, sizes, chance, counter, _after_s(scale.churn_s / 4)
        )  # gRPC's buffers find their size
        files, memory = server.open_files(), MemorySamples(server.memory_bytes)
        full = _put_rate(store, sizes, chance, counter, _after_s(scale.churn_s, memory.watch))
        more_files = server.open_files() - files
        store.close()
    empty = statistics.median(rates[1:])
    detail = f"{full:.3f} GB/s ÷ {spread(rates[1:], 'GB/s')}"
    return [
        Figure.at_most("churn_drop", max(0.0, 1 - full / empty), 0.2, "ratio", detail),
        Figure.at_most("churn_memory_growth_mib", memory.growth_bytes / MIB, 32.0, "MiB"),
        Figure.at_most("churn_open_files_growth", more_files, 0, "files"),
        Figure("churn_put_gb_per_s", full, "GB/s"),
    ]


def _after_s(limit_s: float, watch: Callable[[float], None] = lambda _: None) -> Callable[[float], bool]:
    """True after this time; reports every minute that the run continues."""
    said = [60.0]

    def done(elapsed_s: float) -> bool:
        watch(elapsed_s)
        if elapsed_s > said[0]:
            print(f"churn: {elapsed_s:.0f} of {limit_s:.0f} s", file=sys.stderr, flush=True)
            said[0] += 60.0
        return elapsed_s > limit_s

    return done


def _fill(store: GrpcStore) -> float:
    last = store.counters().tiers[-1]
    return float(last.bytes_used / last.bytes_capacity)


def _put_rate(
    store: GrpcStore,
    sizes: Sequence[tuple[ChunkManifest, list[memoryview]]],
    chance: random.Random,
    counter: Iterator[int],
    done: Callable[[float], bool],
) -> float:
    """GB/s of new chunks until `done(seconds)`; a put that fails ends the benchmark."""
    total, began_s = 0, time.perf_counter()
    while not done(time.perf_counter() - began_s):
        manifest, frames = chance.choice(sizes)
        fresh = dataclasses.replace(manifest, key=ChunkKey.of(SPACE, [next(counter), 1]))
        assert store.put(fresh, frames)
        total += fresh.chunk_bytes
    return total / (time.perf_counter() - began_s) / GB


def eviction(trace: Path) -> list[Figure]:
    """Hit ratios ÷ LRU's. The policy's parameters were chosen on the first half of the trace."""
    figures: list[Figure] = []
    if trace.exists():
        accesses = read_trace(trace)
        distinct = len({access.key for access in accesses})
        second = accesses[len(accesses) // 2 :]
        for share, bar in ((1, 1.15), (5, 1.0), (20, 0.97)):
            figures.append(
                Figure.at_least(
                    f"mooncake_vs_lru_{share}", _vs_lru(second, distinct * share // 100), bar, "ratio"
                )
            )
    else:
        print(f"{trace} is missing: mooncake_vs_lru_* are left out")
    generated = rag_trace(documents=5000, requests=5000, seed=1)
    distinct = sum({access.key: access.size_bytes for access in generated}.values())
    figures += [
        Figure(f"rag_vs_lru_{share}", _vs_lru(generated, distinct * share // 100), "ratio")
        for share in (1, 5, 20)
    ]
    return figures


def _vs_lru(accesses: list[TraceAccess], capacity: int) -> float:
    ratios = [
        replay(accesses, policy_factory(name)(capacity), capacity).hit_ratio
        for name in (DEFAULT_POLICY, "lru")
    ]
    return ratios[0] / ratios[1]


SECTIONS: dict[str, Callable[[Scale, Path], list[Figure]]] = {
    "reading": reading,
    "lookups": lookups,
    "durable_puts": durable_puts,
    "cold_reads": cold_reads,
    "churn": churn,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, 15 s of churn instead of 10 minutes"
    )
    names = [*SECTIONS, "eviction"]
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the system's temporary folder")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/data/mooncake_conversation_trace.jsonl")
    )
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    keep_large_buffers()
    config: dict[str, Any] = {
        "quick": arguments.quick,
        **dataclasses.asdict(scale),
        "sections": list(arguments.only),
        "frame_bytes": LAYOUT.frame_bytes(Codec.RAW, TOKENS),
        "policy": DEFAULT_POLICY,
        "load_before": round(os.getloadavg()[0], 2),
    }
    figures: list[Figure] = []
    for name in arguments.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp(prefix="kintsugi-bench-", dir=arguments.folder))
        try:
            figures += eviction(arguments.trace) if name == "eviction" else SECTIONS[name](scale, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    part = "" if list(arguments.only) == names else "-" + "-".join(arguments.only)
    report("store", config, figures, save_as=f"store{part}" if arguments.save else None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read-cold"]:
        read_cold(sys.argv[2], [ChunkKey.from_hex(key) for key in sys.argv[3:]])
    main()
