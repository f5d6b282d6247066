"""The shard map, and the directories that provide it.

Clients know only a directory's address, so shards join and leave without a restart of any client."""

from __future__ import annotations

import json
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import xxhash

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.schema import STRICT, load
from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import directory_pb2 as pb
from kintsugi.store.protocol.grpc_status import CHECK_ADDRESS, error_of_call
from kintsugi.store.protocol.tls import TlsFiles, open_channel
from kintsugi.store.protocol.watched_files import WatchedFiles

log = logging.getLogger(__name__)

SEE_SHARDS = "see which shards answer: kintsugi status --url URL"

DIRECTORY_SERVICE = "kintsugi.rpc.v1.ShardDirectory"
SHARDS_MAX = 1024
_FIRST_MAP_TIMEOUT_S = 10.0
_RECONNECT_S_MAX = 10.0


@dataclass(frozen=True)
class ShardAddress:
    """One shard."""

    __pydantic_config__ = STRICT

    shard_id: str
    """The UUID in the shard's data directory. It decides which chunks the shard owns, whatever its
    address."""
    address: str
    """`host:port`."""


@dataclass(frozen=True)
class ShardMap:
    """The shards of a store at one point in time."""

    __pydantic_config__ = STRICT

    version: int
    """Increases with every change."""
    shards: tuple[ShardAddress, ...] = field(default=())
    replicas: int = 1
    """Number of shards that hold each chunk."""
    shares: tuple[float, ...] = field(default=())
    """For each shard, in the order of `shards`, the share in (0, 1] of its chunks that it already owns. A
    joining shard starts with a small share; the shard that is next in rank keeps the rest. Empty: every shard
    owns all its chunks."""
    directory: str = ""
    """Name of the directory that made the map, the same after a restart; empty: the directory has no name."""
    epoch: int = 0
    """Number of the directory's start; it is larger after each restart."""

    def __post_init__(self) -> None:
        if len({shard.shard_id for shard in self.shards}) != len(self.shards):
            raise InvalidField("shards", "two shards have the same shard_id")
        if len(self.shards) > SHARDS_MAX:
            raise InvalidField("shards", f"has {len(self.shards)} shards; the maximum is {SHARDS_MAX}")
        if self.replicas < 1:
            raise InvalidField("replicas", f"{self.replicas} is less than 1")
        if self.shares and len(self.shares) != len(self.shards):
            raise InvalidField("shares", f"has {len(self.shares)} values for {len(self.shards)} shards")
        if not all(0 < share <= 1 for share in self.shares):
            raise InvalidField("shares", "must be above 0 and at most 1")

    @cached_property
    def _hashes(self) -> npt.NDArray[np.uint64]:
        """A hash of each shard's id, in the order of `shards`."""
        return np.array([xxhash.xxh3_64_intdigest(one.shard_id.encode()) for one in self.shards], np.uint64)

    def owners(self, key: ChunkKey, in_full: bool = False, width: int = 0) -> list[ShardAddress]:
        """Return the shards that own a chunk, the preferred one first. ``in_full``: as if every shard owned
        its full share. ``width``: as if each chunk had so many owners, if these are more."""
        return self.owners_of_each([key], in_full, width)[0]

    def owners_of_each(
        self, keys: Sequence[ChunkKey], in_full: bool = False, width: int = 0
    ) -> list[list[ShardAddress]]:
        """Return the owners of each chunk. Rendezvous hashing: when a shard leaves, only its own chunks move.

        Ids and keys are hashed once each, and numpy combines them: clients ask for every chunk of every
        prompt, and a store may have `SHARDS_MAX` shards.
        """
        if len(self.shards) <= 1:
            return [list(self.shards) for _ in keys]
        ranks = _mix(self._hashes, keys, 0) >> np.uint64(1)
        if self.shares and not in_full:
            # A larger share includes the chunks of a smaller one. The draw has its own seed, so it is
            # independent of the ranks. Shards outside their share rank after all others.
            shares = np.array(self.shares)
            is_given = (_mix(self._hashes, keys, 1) * 2.0**-64 < shares) | (shares == 1)
            ranks |= (~is_given).astype(np.uint64) << np.uint64(63)
        count = min(max(self.replicas, width), len(self.shards))
        first = np.argpartition(ranks, count - 1)[:, :count]  # not yet in order
        order = np.argsort(np.take_along_axis(ranks, first, 1))
        rows = np.take_along_axis(first, order, 1).tolist()
        return [[self.shards[index] for index in row] for row in rows]


def _mix(hashes: npt.NDArray[np.uint64], keys: Sequence[ChunkKey], seed: int) -> npt.NDArray[np.uint64]:
    """Combine the hash of each key (row) with each shard's (column): the finalizer of SplitMix64."""
    drawn = np.array([xxhash.xxh3_64_intdigest(key.digest, seed) for key in keys], np.uint64)
    mixed = drawn[:, None] ^ hashes
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def why_not_believed(new: ShardMap, known: ShardMap | None) -> str:
    """Return why a client rejects a new map from the directory's address; empty: the client accepts it.

    After a restart, a directory may count versions from the beginning again, with a higher epoch. Maps of an
    earlier epoch are rejected: that process may still run behind a network partition. Another directory at
    the address, such as one of another service that reuses the port, is accepted only if its map shares a
    shard with the known map."""
    if known is None or not known.shards:
        return ""
    if new.directory == known.directory:
        if (new.epoch, new.version) >= (known.epoch, known.version) or not new.directory:
            return ""
        return f"the map of epoch {new.epoch}, version {new.version}, is older than the known one"
    ids = {shard.shard_id for shard in known.shards}
    if any(shard.shard_id in ids for shard in new.shards):
        return ""
    return (
        f"directory {new.directory or 'without a name'} is not {known.directory or 'the known one'} and has "
        "none of its shards; if the store was set up anew, restart this process"
    )


class ShardDirectory(ABC):
    """Provides the current map. Thread-safe; `current` does not block as soon as a map is known."""

    @abstractmethod
    def current(self) -> ShardMap:
        """Return the newest known map. Raises `Unavailable` if no map is known."""

    @abstractmethod
    def close(self) -> None:
        """Stop watching. Idempotent."""


class FileDirectory(ShardDirectory):
    """A shard map in a JSON file, `{"version": 1, "replicas": 1, "shards": [{"shard_id": …, "address": …}]}`.

    The file is read again when it changes. While it is invalid, the previous map stays in use."""

    def __init__(self, path: Path) -> None:
        """Raises `InvalidField` for a file that is not a shard map."""
        self._file = WatchedFiles("shard map", (path,), partial(_read_map, path))

    def current(self) -> ShardMap:
        return self._file.current()

    def close(self) -> None:
        return None


def _read_map(path: Path) -> ShardMap:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidField("shards", f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidField("shards", f"{path} is not JSON ({error})") from error
    return load(ShardMap, values, where=str(path))


class GrpcDirectory(ShardDirectory):
    """The `ShardDirectory` service at an address, watched by one thread."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        self._address = address
        self._channel = open_channel(address, tls)
        self._watch: Any = self._channel.unary_stream(
            f"/{DIRECTORY_SERVICE}/WatchShardMap",
            pb.WatchShardMapRequest.SerializeToString,
            pb.ShardMap.FromString,
        )
        self._known = threading.Condition()
        self._map: ShardMap | None = None
        self._failure = f"{address} has not answered yet"
        self._refusal = ""
        """Why the last map was rejected; empty: it was accepted."""
        self._closed = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="kintsugi-directory", daemon=True)
        self._thread.start()

    def current(self) -> ShardMap:
        with self._known:
            self._known.wait_for(lambda: self._map is not None or self._closed.is_set(), _FIRST_MAP_TIMEOUT_S)
            if self._map is None:
                hint = "" if CHECK_ADDRESS in self._failure else f"; {CHECK_ADDRESS}"
                raise Unavailable(f"no shard map: {self._failure}{hint}")
            return self._map

    def _run(self) -> None:
        wait_s = 0.1
        while not self._closed.is_set():
            try:
                self._call = self._watch(pb.WatchShardMapRequest())
                if self._closed.is_set():  # `close` may have cancelled the call before this one
                    self._call.cancel()
                for message in self._call:
                    self._learn(map_from_wire(message))
                    wait_s = 0.1
            except grpc.RpcError as failure:
                self._failure = str(error_of_call(failure, self._address))
            except InvalidField as error:
                self._failure = f"{self._address} sent an invalid map: {error}"
            self._closed.wait(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, _RECONNECT_S_MAX)

    def _learn(self, shards: ShardMap) -> None:
        """Store a map unless `why_not_believed` rejects it."""
        with self._known:
            refusal = why_not_believed(shards, self._map)
            if not refusal:
                self._map = shards
                self._known.notify_all()
        if refusal != self._refusal:
            self._refusal = refusal
            if refusal:
                log.error("%s: a shard map was rejected: %s", self._address, refusal)

    def close(self) -> None:
        self._closed.set()
        with self._known:
            self._known.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._thread.join()
        self._channel.close()


def map_to_wire(shards: ShardMap) -> pb.ShardMap:
    return pb.ShardMap(
        version=shards.version,
        shards=[pb.ShardAddress(shard_id=s.shard_id, address=s.address) for s in shards.shards],
        replicas=shards.replicas,
        shares=shards.shares,
        directory=shards.directory,
        epoch=shards.epoch,
    )


def map_from_wire(wire: pb.ShardMap) -> ShardMap:
    """Raises `InvalidField`."""
    shards = tuple(ShardAddress(shard.shard_id, shard.address) for shard in wire.shards)
    return ShardMap(wire.version, shards, wire.replicas, tuple(wire.shares), wire.directory, wire.epoch)
