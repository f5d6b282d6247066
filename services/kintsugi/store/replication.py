"""Keeps the number of copies of each chunk that the shard map requires: shards send each other missing
chunks.

Every shard decides about the chunks that it holds, from the answers of the other owners. No coordination is
needed: the first owner that has a chunk sends it to the owners that lack it. This one mechanism fills a shard
that joined the store, took over from a dead shard, was away while a chunk was put, or dropped a damaged copy.
A receiver evicts nothing for a copy, and rejects a chunk that was deleted recently or erased after its save
was requested. The rate is bounded, because requests share the network and the disks. A shard that is the only
owner of all its chunks calls no other shard.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

from kintsugi.core.errors import Corrupted, KintsugiError, Unavailable
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardDirectory, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol import wire
from kintsugi.store.shard.entry import ChunkEntry
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


log = logging.getLogger(__name__)

TURN_S = 1.0
ROUND_S = 60.0
"""Time from the end of one round over all chunks to the next, while the map stays the same."""
SETTLE_S = 30.0
"""Wait after a change of the shards. A shard that restarts is back within this time, so its chunks are not
copied elsewhere."""
COPY_BYTES_PER_S = 64 << 20


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
        self._budget_bytes = 0.0
        self._peers: dict[ShardAddress, GrpcStore] = {}
        self._members: tuple[tuple[ShardAddress, ...], int] = ((), 0)
        """Shards and number of replicas for which the current round runs."""
        self._due_s = math.inf
        """When the next round begins."""
        self._round: Iterator[None] | None = None

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
        if self._round is None and self._clock() >= self._due_s:
            self._close_peers_except(shards)
            self._round = self._look_through(shards)
        self._budget_bytes = min(self._budget_bytes + self._bytes_per_turn, self._bytes_per_turn)
        while self._round is not None and self._budget_bytes > 0 and not self._stop.is_set():
            if next(self._round, self) is self:
                self._round = None
                self._due_s = self._clock() + self._round_s

    def _schedule(self, shards: ShardMap) -> None:
        """If the shards changed, abandon the round and wait until they settle."""
        members = (shards.shards, shards.replicas)
        if members != self._members:
            self._members, self._round = members, None
            self._due_s = self._clock() + self._settle_s

    def _close_peers_except(self, shards: ShardMap) -> None:
        for address in [address for address in self._peers if address not in shards.shards]:
            self._peers.pop(address).close()

    def _peer(self, address: ShardAddress) -> GrpcStore:
        if address not in self._peers:
            self._peers[address] = GrpcStore(address.address, self._options)
        return self._peers[address]

    def _look_through(self, shards: ShardMap) -> Iterator[None]:
        """Run one round over all chunks; yields after each page and after each chunk sent."""
        me = self._shard.shard_id
        pages: defaultdict[str, list[ChunkEntry]] = defaultdict(list)
        for entry in self._shard.table.entries():
            owners = owners_of(shards, entry.manifest.key)
            if [owner.shard_id for owner in owners] == [me]:
                continue
            page = pages[entry.manifest.namespace]
            page.append(entry)
            if len(page) == wire.LOOKUP_KEYS_BATCH:
                yield from self._send_page(shards, pages.pop(entry.manifest.namespace))
        for page in pages.values():
            yield from self._send_page(shards, page)

    def _send_page(self, shards: ShardMap, page: Sequence[ChunkEntry]) -> Iterator[None]:
        """Ask the owners of some chunks of one namespace which of them they lack, and send those."""
        asked: defaultdict[ShardAddress, list[ChunkKey]] = defaultdict(list)
        owners = {entry.manifest.key: owners_of(shards, entry.manifest.key) for entry in page}
        for key, ranked in owners.items():
            for owner in ranked:
                if owner.shard_id != self._shard.shard_id:
                    asked[owner].append(key)
        holders: defaultdict[ChunkKey, set[ShardAddress]] = defaultdict(set)
        room_bytes: dict[ShardAddress, int] = {}
        for owner, keys in asked.items():
            with suppress(KintsugiError):
                peeked = self._peer(owner).peek(page[0].manifest.namespace, keys)
                room_bytes[owner] = peeked.room_bytes
                for key, held in zip(keys, peeked.held, strict=True):
                    if held:
                        holders[key].add(owner)
        yield
        silent = asked.keys() - room_bytes.keys()
        for entry in page:
            key, size = entry.manifest.key, entry.manifest.chunk_bytes
            for receiver in receivers_of(owners[key], self._shard.shard_id, holders[key], silent):
                if size <= room_bytes[receiver]:
                    room_bytes[receiver] -= size
                    self._budget_bytes -= size
                    self._send(entry, receiver)
                    yield

    def _send(self, entry: ChunkEntry, receiver: ShardAddress) -> None:
        """Send the current version of a chunk, unless it was removed. A failure is logged; the next round
        tries again."""
        seen = self._shard.erasures.seen_of(receiver.shard_id)  # before the chunk is read
        opened = self._shard.table.open_copies(entry.address)
        if opened is None:
            return
        current, reading = opened
        manifest = current.manifest
        try:
            if (held := next(iter(reading.chunks), None)) is None:
                return  # its only copy is being moved to another tier
            ttl_s = max(0.001, current.expires_at_s - time.time()) if current.expires_at_s < math.inf else 0.0
            frames = [_frame(held, layer) for layer in manifest.layers]
            peer = self._peer(receiver)
            self.sent_chunks += peer.put_copy(manifest, frames, current.recompute_ms, ttl_s, seen)
        except Corrupted as error:
            log.error("chunk %s was not copied to %s: %s", manifest.key, receiver.address, error)
            self._shard.verify(manifest.namespace, [manifest.key])
        except KintsugiError as error:
            log.warning("chunk %s was not copied to %s: %s", manifest.key, receiver.address, error)
        finally:
            self._shard.table.close(reading)


def _frame(held: HeldChunk, layer: int) -> memoryview:
    return held.frame(layer) if held.in_ram else held.read(layer)
