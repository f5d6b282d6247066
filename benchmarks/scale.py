"""A store of 1,000 shards behind 200 gateways, simulated from measured costs.

    python benchmarks/scale.py [--quick] [--seed N] [--save]

The directory's own code runs on a simulated clock, with every heartbeat of every shard: shards restart, one
rack is lost and comes back empty. The CPU times of a shard are measured on a real one, those of placement on
the client's code. Requests draw Zipf chunks. The store's own code decides, from a cold start on, how many
shards share the reads of a hot chunk; a shard copies one chunk a second. Neither the network nor gRPC headers
are simulated. Figures:

- `directory_bytes_per_watcher_s`, `…_worst_minute`: bytes of shard maps that each shard, gateway and engine
  receives;
- `directory_cores`: CPU of reading, comparing and encoding maps and of heartbeats, without gRPC's and Ray's;
- `erasure_calls_per_shard_s`, `erasure_bytes_per_shard_s`: gateways and engines ask two shards each, and
  other shards a few, once a period for erasures; bytes of the messages alone, without erasures;
- `sharing_bytes_per_shard_s`: first owners ask the shards that share their hot chunks' reads;
- `traffic_per_shard_s`: the three together;
- `shared_chunks`: chunks whose reads are shared;
- `shared_after_s`: from then on, no shard gets more than twice `READS_PER_S_MAX` lookups of one hot chunk;
- `hot_copies_of_a_shard`: the most that one shard holds;
- `cursor_bytes`: the place of a client in the erasures of the shards that it follows;
- `placement_us_per_key`: CPU to name a chunk's owners;
- `ttft_added_ms_p99`: of placement and of the slowest shard that is called; each shard is a queue with one
  server. A request does not wait longer than `LOOKUP_S_MAX` for a shard that is asked more than it can
  answer;
- `busiest_shard`: its load by lookups, in cores;
- `…_unshared`: the same if every chunk is read from its first owner.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.store import make_chunk, served
from benchmarks.support.figures import Figure, report
from kintsugi.core.deploy import RAMP_S
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.erasing import FOLLOW_PERIOD_S
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.serving.catching_up import ASKED_AT_ONCE, PERIOD_S
from kintsugi.serving.directory import HEARTBEAT_S, WATCH_POLL_S, DirectoryService, Membership, pause_after
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.erasures import FOLLOWED_SHARDS, write_cursor
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.sharing import SharedReads, order_owners
from kintsugi.store.replication import COPY_BYTES_PER_S
from kintsugi.store.shard.heat import HEAT_S, READS_PER_S_MAX, WIDTH_MAX, next_width

SHARDS, GATEWAYS, ENGINES, REPLICAS = 1000, 200, 1000, 2
REQUESTS_PER_S = 10_000
CORPUS_CHUNKS = 10**8
CHUNKS_PER_REQUEST = 10
RACK = 40
RACK_LOST_S, RACK_BACK_S, RACK_START_S = 300.0, 900.0, 60.0
"""When a rack is lost and comes back, and how long its shards take to start."""
RESTARTS_PER_SHARD_DAY = 1.0
LOOKUP_S_MAX = 0.5
"""The default of `loadDeadlineMs` for a lookup; then the prompt is prefilled."""
CHUNK_BYTES = 64 << 20
"""512 tokens of a model of 8 billion parameters, in 16 bits."""
HOT_RANKS, HOT_SECONDS = 128, 180.0
"""Ranks of chunks that can be read often enough to be shared, and how long after a cold start they are
simulated."""
NAMESPACE = "bench"
KIB = 1024
TRAFFIC_BAR, TTFT_BAR_MS = 5.0 * KIB, 10.0


@dataclass
class Fleet:
    """Shards and their directory, on a simulated clock."""

    shards: int
    seconds: float
    chance: random.Random
    now_s: float = -2 * RAMP_S
    """The first map and the ramps of a new store are not measured."""
    sent: list[tuple[float, int]] = field(default_factory=list)
    """Time and size of the maps that one watcher was sent."""
    cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self.members = Membership(clock=lambda: self.now_s, ramp_s=RAMP_S, name="gcs:6379", epoch=1)
        self.members.replicas = REPLICAS
        self.directory = DirectoryService(self.members, lambda: self.now_s)
        self.ids = [str(uuid.UUID(int=self.chance.getrandbits(128))) for _ in range(self.shards)]
        self.phases = [self.chance.random() * HEARTBEAT_S for _ in self.ids]
        self.instances = [f"i{index}" for index in range(self.shards)]
        self.down: dict[int, float] = {}
        """When each shard that is down is back."""

    def run(self) -> None:
        """Run the simulation."""
        self._heartbeats(range(self.shards))
        self.directory.read_message()
        next_s = self.now_s = 0.0
        last = b""
        rack = range(self.shards // 2, self.shards // 2 + RACK)
        is_lost = False
        for step in range(int(self.seconds / WATCH_POLL_S)):
            self.now_s = step * WATCH_POLL_S
            if not is_lost and self.now_s >= RACK_LOST_S:
                is_lost = True
                for index in rack:
                    self.down[index] = RACK_BACK_S + self.chance.random() * RACK_START_S
            if self.chance.random() < self.shards * RESTARTS_PER_SHARD_DAY / 86_400 * WATCH_POLL_S:
                self.down.setdefault(self.chance.randrange(self.shards), self.now_s + 30.0)
            for index in [one for one, back_s in self.down.items() if back_s <= self.now_s]:
                del self.down[index]
                self.instances[index] += "+"
            due = [
                index
                for index in range(self.shards)
                if index not in self.down and (self.now_s - self.phases[index]) % HEARTBEAT_S < WATCH_POLL_S
            ]
            began_s = time.process_time()
            self._heartbeats(due, empty=rack)
            message = self.directory.read_message()
            self.cpu_s += time.process_time() - began_s
            if message is not last and self.now_s >= next_s:
                last = message
                self.sent.append((self.now_s, len(message)))
                next_s = self.now_s + WATCH_POLL_S + pause_after(message)

    def _heartbeats(self, shards: range | list[int], empty: range = range(0)) -> None:
        for index in shards:
            address = f"10.{index // 62500}.{index // 250 % 250}.{index % 250}:7400"
            is_empty = index in empty and self.now_s >= RACK_BACK_S
            self.members.record_heartbeat(self.ids[index], address, self.instances[index], is_empty)

    def worst_minute(self) -> float:
        """Bytes per second in the minute with the most traffic."""
        by_minute: Counter[int] = Counter()
        for at_s, size in self.sent:
            by_minute[int(at_s // 60)] += size
        return max(by_minute.values(), default=0) / 60

    def figures(self) -> list[Figure]:
        mean = sum(size for _, size in self.sent) / self.seconds
        detail = f"{len(self.sent)} maps of up to {max((size for _, size in self.sent), default=0)} bytes"
        return [
            Figure("directory_bytes_per_watcher_s", mean, "B/s", detail=detail),
            Figure("directory_bytes_per_watcher_s_worst_minute", self.worst_minute(), "B/s"),
            Figure("directory_cores", self.cpu_s / self.seconds, "cores"),
        ]


def follow_erasures(ids: list[str]) -> list[Figure]:
    """The cost for a shard of requests for erasures from clients and other shards."""
    asked_per_s = (GATEWAYS + ENGINES) * FOLLOWED_SHARDS / FOLLOW_PERIOD_S / len(ids)
    calls_per_s = asked_per_s + ASKED_AT_ONCE / PERIOD_S
    asked = pb.ListErasuresRequest(after=1_000_000, shard_id=ids[0]).ByteSize()
    told = pb.ListErasuresResponse(shard_id=ids[0], next=1_000_000).ByteSize()
    return [
        Figure("erasure_calls_per_shard_s", calls_per_s, "1/s"),
        Figure(
            "erasure_bytes_per_shard_s", calls_per_s * (asked + told), "B/s", detail=f"{asked} + {told} bytes"
        ),
        Figure("cursor_bytes", len(write_cursor(dict.fromkeys(ids[:FOLLOWED_SHARDS], 1_000_000))), "B"),
    ]


def measure_lookup(calls: int) -> tuple[float, float]:
    """CPU seconds that a lookup of one key and one of 64 keys cost a real shard."""
    costs = []
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), "256MiB") as server:
        store, process = GrpcStore(server.address), psutil.Process(server.pid)
        chunks = [make_chunk(index, tokens=16) for index in range(64)]
        for manifest, frames in chunks:
            store.put(manifest, frames)
        for count in (1, 64):
            keys = [manifest.key for manifest, _ in chunks[:count]]
            store.lookup("bench", keys)
            before = process.cpu_times()
            for _ in range(calls):
                store.lookup("bench", keys)
            after = process.cpu_times()
            costs.append((after.user + after.system - before.user - before.system) / calls)
        store.close()
    return costs[0], costs[1]


def zipf_rank(chance: random.Random, ranks: int = CORPUS_CHUNKS) -> int:
    """A chunk's rank: the share of rank r is 1 / r, up to the number of ranks."""
    return int(math.exp(chance.random() * math.log(ranks)))


def key_of(rank: int) -> ChunkKey:
    return ChunkKey(rank.to_bytes(32, "little"))


@dataclass
class Sharing:
    """Which chunks are shared by how many shards, from a cold start on."""

    shards: ShardMap
    chance: random.Random
    widths: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: 1))
    """By a chunk's rank: the shards that hold it, and that its first owner tells."""
    settled_s: float = 0.0

    def __post_init__(self) -> None:
        self.clients = [SharedReads(random.Random(self.chance.random())) for _ in range(ENGINES)]
        keys = [key_of(rank) for rank in range(1, HOT_RANKS)]
        self.owners = dict(enumerate(self.shards.owners_of_each(keys, width=WIDTH_MAX), 1))

    def run(self) -> None:
        # Draws of other ranks change nothing here.
        share = math.log(HOT_RANKS) / math.log(CORPUS_CHUNKS)
        reads = int(share * REQUESTS_PER_S * CHUNKS_PER_REQUEST * HEAT_S)
        for step in range(1, int(HOT_SECONDS / HEAT_S) + 1):
            asked: Counter[tuple[int, int]] = Counter()
            for rank in (zipf_rank(self.chance, HOT_RANKS) for _ in range(reads)):
                asked.update((rank, owner) for owner in self._ask(rank))
            copies: Counter[str] = Counter()
            for rank in range(1, HOT_RANKS):
                width = next_width(self.widths[rank], asked[rank, 0] / HEAT_S, len(self.owners[rank]))
                self._widen(rank, width, copies)
            if max(asked.values()) / HEAT_S > 2 * READS_PER_S_MAX:
                self.settled_s = step * HEAT_S

    def _ask(self, rank: int) -> list[int]:
        """Look a chunk up with one of the clients. Returns the ranks of the owners that are asked."""
        client, key = self.chance.choice(self.clients), key_of(rank)
        asked = client.rank_to_ask(NAMESPACE, key)
        if 0 < asked < self.widths[rank]:
            return [asked]
        client.learn(NAMESPACE, key, self.widths[rank])
        return [asked, 0] if asked else [0]

    def _widen(self, rank: int, width: int, copies: Counter[str]) -> None:
        """Let as many more shards share as are sent the chunk until the next decision. `copies`: what each
        first owner has sent."""
        first = self.owners[rank][0].shard_id
        can_send = int(COPY_BYTES_PER_S * HEAT_S / CHUNK_BYTES) - copies[first]
        held = max(self.widths[rank], REPLICAS)
        copies[first] += min(max(0, width - held), can_send)
        self.widths[rank] = min(width, max(held, held + can_send))

    def figures(self) -> list[Figure]:
        shared = {rank: width for rank, width in self.widths.items() if width > 1}
        held = Counter(
            one.shard_id for rank, width in shared.items() for one in self.owners[rank][REPLICAS:width]
        )
        asked = pb.LookupRequest(namespace=NAMESPACE, keys=[bytes(32)], peek=True).ByteSize()
        told = pb.LookupResponse(found=[pb.Found(tier="ram", is_hot=True)], room_bytes=CHUNK_BYTES).ByteSize()
        calls_per_s = (
            sum(max(REPLICAS, width) - 1 for width in shared.values()) / HEAT_S / len(self.shards.shards)
        )
        detail = f"{asked} + {told} bytes, {calls_per_s:.2f} calls/s"
        return [
            Figure("shared_chunks", len(shared), "chunks", detail=f"{sum(held.values())} hot copies"),
            Figure("shared_after_s", self.settled_s, "s"),
            Figure("hot_copies_of_a_shard", max(held.values(), default=0), "chunks"),
            Figure("sharing_bytes_per_shard_s", calls_per_s * (asked + told), "B/s", detail=detail),
        ]


def ask(
    sharing: Sharing, requests: int, chance: random.Random, costs: tuple[float, float], is_shared: bool
) -> list[Figure]:
    """Requests whose chunks are looked up at the shards that clients choose."""
    shards, suffix = sharing.shards, "" if is_shared else "_unshared"
    per_key_s = (costs[1] - costs[0]) / 63
    drawn = [{zipf_rank(chance) for _ in range(CHUNKS_PER_REQUEST)} for _ in range(requests)]
    asked: list[Counter[str]] = []
    began_s = time.process_time()
    for ranks in drawn:
        client, keys = chance.choice(sharing.clients), [key_of(rank) for rank in ranks]
        chosen = [client.rank_to_ask(NAMESPACE, key) if is_shared else 0 for key in keys]
        asked.append(Counter(first.shard_id for first, *_ in order_owners(shards, keys, chosen)))
        for rank, key, at in zip(ranks, keys, chosen, strict=True):
            if is_shared and not at and rank in sharing.widths:
                client.learn(NAMESPACE, key, sharing.widths[rank])
    placement_s = (time.process_time() - began_s) / requests
    load: dict[str, float] = defaultdict(float)
    for parts in asked:
        for shard, keys_asked in parts.items():
            load[shard] += (costs[0] + (keys_asked - 1) * per_key_s) * REQUESTS_PER_S / requests
    added = []
    for parts in asked:
        waits = []
        for shard, keys_asked in parts.items():
            own_s, busy = costs[0] + (keys_asked - 1) * per_key_s, load[shard]
            # An M/M/1 queue: the time there is exponential.
            mean_s = own_s / (1 - busy) if busy < 1 else math.inf
            waits.append(-math.log(1 - chance.random()) * mean_s)
        added.append(placement_s + min(LOOKUP_S_MAX, max(waits)))
    added.sort()
    p99_ms, mean = 1e3 * added[int(0.99 * len(added))], sum(load.values()) / len(shards.shards)
    p99 = Figure.at_most("ttft_added_ms_p99", p99_ms, TTFT_BAR_MS, "ms")
    return [
        Figure(f"placement_us_per_key{suffix}", 1e6 * placement_s / CHUNKS_PER_REQUEST, "µs"),
        Figure(f"busiest_shard{suffix}", max(load.values()), "cores", detail=f"mean {mean:.3f}"),
        Figure(f"ttft_added_ms_p50{suffix}", 1e3 * added[len(added) // 2], "ms"),
        p99 if is_shared else Figure("ttft_added_ms_p99_unshared", p99_ms, "ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 shards, fewer requests")
    parser.add_argument("--seconds", type=float, default=1800.0, help="simulated time of the directory")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    arguments = parser.parse_args()
    shards, requests = (100, 500) if arguments.quick else (SHARDS, 10_000)
    print(f"seed {arguments.seed}", file=sys.stderr)
    chance = random.Random(arguments.seed)
    fleet = Fleet(shards, arguments.seconds, chance)
    fleet.run()
    sharing = Sharing(ShardMap(1, tuple(ShardAddress(one, "h:1") for one in fleet.ids), REPLICAS), chance)
    sharing.run()
    figures = [*fleet.figures(), *follow_erasures(fleet.ids), *sharing.figures()]
    values = {one.name: one.value or 0.0 for one in figures}
    parts = ("directory_bytes_per_watcher_s", "erasure_bytes_per_shard_s", "sharing_bytes_per_shard_s")
    traffic = sum(values[part] for part in parts)
    figures.append(Figure.at_most("traffic_per_shard_s", traffic, TRAFFIC_BAR, "B/s"))
    costs = measure_lookup(200 if arguments.quick else 2000)
    figures.append(
        Figure("lookup_cpu_ms", 1e3 * costs[0], "ms", detail=f"of 64 keys {1e3 * costs[1]:.2f} ms")
    )
    for is_shared in (False, True):
        figures += ask(sharing, requests, chance, costs, is_shared)
    config = {"seed": arguments.seed, "quick": arguments.quick, "shards": shards, "gateways": GATEWAYS}
    config |= {"engines": ENGINES, "requests_per_s": REQUESTS_PER_S, "seconds": arguments.seconds}
    report("scale", config, figures, "scale" if arguments.save else None)


if __name__ == "__main__":
    main()
