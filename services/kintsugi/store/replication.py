"""Keeps the number of copies of each chunk that the shard map requires: shards send each other missing
chunks.

Every shard decides about the chunks that it holds, from the answers of the other owners. No coordination is
needed: the first owner that has a chunk sends it to the owners that lack it. This one mechanism fills a shard
that joined the store, took over from a dead shard, was away while a chunk was put, or dropped a damaged copy.
A receiver evicts nothing for a copy, and rejects a chunk that was deleted recently or erased after its save
was requested. The rate is bounded, because requests share the network and the disks. A shard that is the only
owner of all its chunks calls no other shard.

The first owner of a chunk that is read often sends it to further shards in the same way, every `HEAT_S`
(`store.shard.heat`). These hot copies stay in a bounded share of the receiver's RAM, and do not count as
replicas.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kintsugi.core.errors import Corrupted, KintsugiError, Unavailable
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardDirectory, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol import wire
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.heat import HEAT_S
from kintsugi.store.shard.reading import HeldChunk
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.workers.keeper import Turns


def owners_of(shards: ShardMap, key: ChunkKey) -> list[ShardAddress]:
    """Return the shards that should hold a chunk: its owners now, and its owners as soon as every shard owns
    its full share."""
    return list(dict.fromkeys((*shards.owners(key), *shards.owners(key, in_full=True))))


def receivers_of(
    owners: Sequence[ShardAddress],
    me: str,
    holders: Collection[ShardAddress],
    silent: Collection[ShardAddress],
) -> list[ShardAddress]:
    """Return the owners to which shard `me`, which has the chunk, sends it.

    `holders` are the other owners that have the chunk. `silent` are the owners that did not answer: they
    receive nothing and do not count as the first owner."""
    first = next((owner for owner in owners if owner.shard_id == me or owner in holders), None)
    if first is not None and first.shard_id != me:
        return []
    lacking = [owner for owner in owners if owner.shard_id != me and owner not in holders]
    return [owner for owner in lacking if owner not in silent]


@dataclass(frozen=True)
class _Placed:
    """The shards that a chunk should be in."""

    owners: list[ShardAddress]
    readers: list[ShardAddress]
    """The shards that are to share its reads, in their order; empty: none but its owners."""
    holders: set[ShardAddress] = field(default_factory=set)
    """Other shards that have all that they should have."""
    hot: set[ShardAddress] = field(default_factory=set)
    """Owners that have only a hot copy."""

    @classmethod
    def of(cls, shards: ShardMap, key: ChunkKey, width: int) -> _Placed:
        return cls(owners_of(shards, key), shards.owners(key, width=width)[:width] if width > 1 else [])

    @property
    def shards(self) -> list[ShardAddress]:
        return list(dict.fromkeys((*self.owners, *self.readers)))

    def count_readers(self, me: str) -> int:
        """Return how many of the readers, from the first on, have the chunk. Shard `me` has it."""
        have = [one.shard_id == me or one in self.holders or one in self.hot for one in self.readers]
        return [*have, False].index(False)


log = logging.getLogger(__name__)

TURN_S = 1.0
ROUND_S = 60.0
"""Time from the end of one round over all chunks to the next, while the map stays the same."""
SETTLE_S = 30.0
"""Wait after a change of the shards. A shard that restarts is back within this time, so its chunks are not
copied elsewhere."""
COPY_BYTES_PER_S = 64 << 20


@dataclass
class _Round:
    """One pass over chunks, and when the next begins."""

    period_s: float
    """Time from the end of a pass to the next."""
    due_s: float = math.inf
    budget_bytes: float = 0.0
    steps: Iterator[int] | None = None
    """The rest of the current pass: the bytes that each step sent."""

    def is_due(self, now_s: float) -> bool:
        return self.steps is None and now_s >= self.due_s


class Replicator(Turns):
    """Copies one shard's chunks to other shards, with a turn every `turn_s`."""

    def __init__(
        self,
        shard: Shard,
        directory: ShardDirectory,
        options: GrpcOptions | None = None,
        bytes_per_s: float = COPY_BYTES_PER_S,
        turn_s: float = TURN_S,
        settle_s: float = SETTLE_S,
        round_s: float = ROUND_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes ownership of the directory: `stop` closes it."""
        super().__init__(shard, "kintsugi-copies", turn_s)
        self.sent_chunks = 0
        """Chunks that other shards inserted."""
        self._directory = directory
        self._options = options
        self._bytes_per_turn = bytes_per_s * turn_s
        self._settle_s, self._round_s = settle_s, round_s
        self._clock = clock
        self._peers: dict[ShardAddress, GrpcStore] = {}
        self._members: tuple[tuple[ShardAddress, ...], int] = ((), 0)
        """Shards and number of replicas for which the current rounds run."""
        self._all, self._hot = _Round(round_s), _Round(HEAT_S, due_s=-math.inf)
        """The rounds over all chunks, and over those that are read often. Each has its own budget, so that
        neither keeps the other waiting."""

    def stop(self) -> None:
        """Stops the thread, and ends the copy in progress by closing its connection."""
        self._stop.set()
        self._directory.close()
        for peer in list(self._peers.values()):
            peer.close()
        super().stop()

    def turn(self) -> None:
        """Continue the round, or begin one that is due."""
        try:
            shards = self._directory.current()
        except Unavailable:
            return
        self._schedule(shards)
        if self._all.is_due(self._clock()):
            self._close_peers_except(shards)
            self._all.steps = self._look_through(shards, dict.fromkeys(self._shard.table.entries(), 1))
        if self._hot.is_due(self._clock()):
            self._hot.steps = self._look_through(shards, self._find_hot(shards))
        for each in (self._hot, self._all):
            self._advance(each)

    def _advance(self, current: _Round) -> None:
        """Continue a round within the turn's budget."""
        current.budget_bytes = min(current.budget_bytes + self._bytes_per_turn, self._bytes_per_turn)
        while current.steps is not None and current.budget_bytes > 0 and not self._stop.is_set():
            sent_bytes = next(current.steps, None)
            if sent_bytes is None:
                current.steps, current.due_s = None, self._clock() + current.period_s
            else:
                current.budget_bytes -= sent_bytes

    def _find_hot(self, shards: ShardMap) -> dict[ChunkEntry, int]:
        """Return the chunks that are read often, and how many shards are to share the reads of each."""

        def is_first(key: ChunkKey) -> bool:
            return [one.shard_id for one in shards.owners(key)[:1]] == [self._shard.shard_id]

        return self._shard.heat.review(is_first, len(shards.shards))

    def _schedule(self, shards: ShardMap) -> None:
        """If the shards changed, abandon the rounds, and wait until they settle before the next over all."""
        members = (shards.shards, shards.replicas)
        if members != self._members:
            self._members, self._all.steps, self._hot.steps = members, None, None
            self._all.due_s = self._clock() + self._settle_s

    def _close_peers_except(self, shards: ShardMap) -> None:
        for address in [address for address in self._peers if address not in shards.shards]:
            self._peers.pop(address).close()

    def _peer(self, address: ShardAddress) -> GrpcStore:
        if address not in self._peers:
            self._peers[address] = GrpcStore(address.address, self._options)
        return self._peers[address]

    def _look_through(self, shards: ShardMap, widths: Mapping[ChunkEntry, int]) -> Iterator[int]:
        """Run one round over some chunks. `widths`: how many shards are to share the reads of each. Yields
        the bytes sent after each page and each chunk."""
        me = self._shard.shard_id
        pages: defaultdict[str, list[ChunkEntry]] = defaultdict(list)
        for entry, width in widths.items():
            owners = owners_of(shards, entry.manifest.key)
            if width == 1 and (entry.is_hot or [owner.shard_id for owner in owners] == [me]):
                continue
            page = pages[entry.manifest.namespace]
            page.append(entry)
            if len(page) == wire.LOOKUP_KEYS_BATCH:
                yield from self._send_page(shards, pages.pop(entry.manifest.namespace), widths)
        for page in pages.values():
            yield from self._send_page(shards, page, widths)

    def _send_page(
        self, shards: ShardMap, page: Sequence[ChunkEntry], widths: Mapping[ChunkEntry, int]
    ) -> Iterator[int]:
        """Ask the owners of some chunks of one namespace, and the shards that are to share their reads, which
        of them they lack, and send those."""
        me = self._shard.shard_id
        placed = {entry: _Placed.of(shards, entry.manifest.key, widths[entry]) for entry in page}
        room_bytes = self._find_holders(placed)
        yield 0
        for entry, one in placed.items():
            size = entry.manifest.chunk_bytes
            silent = [shard for shard in one.shards if shard not in room_bytes]
            self._tell_readers(entry, one)
            for receiver in receivers_of(one.shards, me, one.holders, silent):
                has_room = receiver in one.owners and size <= room_bytes[receiver]
                if has_room or (receiver in one.readers and receiver not in one.hot):
                    room_bytes[receiver] -= size if has_room else 0
                    if self._send(entry, receiver, is_hot=not has_room):
                        one.hot.add(receiver)
                        self._tell_readers(entry, one)
                    yield size

    def _tell_readers(self, entry: ChunkEntry, placed: _Placed) -> None:
        """Let lookups tell clients how many shards share a chunk's reads now."""
        if placed.readers:
            self._shard.heat.set_width(entry, placed.count_readers(self._shard.shard_id))

    def _find_holders(self, placed: Mapping[ChunkEntry, _Placed]) -> dict[ShardAddress, int]:
        """Note the holders of some chunks of one namespace, and return the bytes of copies that each shard
        that answered accepts."""
        asked: defaultdict[ShardAddress, list[ChunkEntry]] = defaultdict(list)
        for entry, one in placed.items():
            for shard in one.shards:
                if shard.shard_id != self._shard.shard_id:
                    asked[shard].append(entry)
        room_bytes: dict[ShardAddress, int] = {}
        for shard, entries in asked.items():
            keys = [entry.manifest.key for entry in entries]
            with suppress(KintsugiError):
                peeked = self._peer(shard).peek(entries[0].manifest.namespace, keys)
                room_bytes[shard] = peeked.room_bytes
                for entry, held, is_hot in zip(entries, peeked.held, peeked.is_hot, strict=True):
                    one = placed[entry]
                    if held:
                        (one.hot if is_hot and shard in one.owners else one.holders).add(shard)
        return room_bytes

    def _send(self, entry: ChunkEntry, receiver: ShardAddress, is_hot: bool = False) -> bool:
        """Send the current version of a chunk, unless it was removed, and return whether the receiver
        inserted it. A failure is logged; the next round tries again."""
        seen = self._shard.erasures.seen_of(receiver.shard_id)  # before the chunk is read
        opened = self._shard.table.open_copies(entry.address)
        if opened is None:
            return False
        current, reading = opened
        manifest = current.manifest
        try:
            if (held := next(iter(reading.chunks), None)) is None:
                return False  # its only copy is being moved to another tier
            ttl_s = max(0.001, current.expires_at_s - time.time()) if current.expires_at_s < math.inf else 0.0
            frames = [_frame(held, layer) for layer in manifest.layers]
            peer = self._peer(receiver)
            is_sent = peer.put_copy(manifest, frames, current.recompute_ms, ttl_s, seen, is_hot)
            self.sent_chunks += is_sent
            return is_sent
        except Corrupted as error:
            log.error("chunk %s was not copied to %s: %s", manifest.key, receiver.address, error)
            self._shard.verify(manifest.namespace, [manifest.key])
        except KintsugiError as error:
            log.warning("chunk %s was not copied to %s: %s", manifest.key, receiver.address, error)
        finally:
            self._shard.table.close(reading)
        return False


def _frame(held: HeldChunk, layer: int) -> memoryview:
    return held.frame(layer) if held.in_ram else held.read(layer)
