"""Which shards there are: the map, and the directories that hand it out.

Clients know only a directory's address; shards come and go without anything being restarted.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import xxhash

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.schema import STRICT, load
from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import directory_pb2 as pb
from kintsugi.store.protocol.grpc_status import CHECK_ADDRESS, error_of_call
from kintsugi.store.protocol.tls import TlsFiles, open_channel
from kintsugi.store.protocol.watched_files import WatchedFiles

log = logging.getLogger(__name__)

DIRECTORY_SERVICE = "kintsugi.rpc.v1.ShardDirectory"
SHARDS_MAX = 1024
_FIRST_MAP_TIMEOUT_S = 10.0
_RECONNECT_S_MAX = 10.0


@dataclass(frozen=True)
class ShardAddress:
    """One shard."""

    __pydantic_config__ = STRICT

    shard_id: str
    """The UUID in its data directory, which places chunks wherever the shard listens."""
    address: str
    """`host:port`."""


@dataclass(frozen=True)
class ShardMap:
    """All shards at one point in time."""

    __pydantic_config__ = STRICT

    version: int
    """Grows with every change."""
    shards: tuple[ShardAddress, ...] = field(default=())
    replicas: int = 1
    """Shards that hold each chunk."""
    shares: tuple[float, ...] = field(default=())
    """For each shard, in the order of `shards`, the share in (0, 1] of its chunks that it is given. A chunk
    that a shard is not yet given stays with the next in rank, which had it before the shard joined. Empty:
    every shard is given all its chunks."""
    directory: str = ""
    """Name of the directory that made the map, which outlives its restarts; empty: it has none."""
    epoch: int = 0
    """Tells the lives of a directory apart: a later one has a larger number."""

    def __post_init__(self) -> None:
        if len({shard.shard_id for shard in self.shards}) != len(self.shards):
            raise InvalidField("shards", "two shards have the same shard_id")
        if len(self.shards) > SHARDS_MAX:
            raise InvalidField("shards", f"{len(self.shards)} shards; at most {SHARDS_MAX} make a map")
        if self.replicas < 1:
            raise InvalidField("replicas", f"{self.replicas} is less than 1")
        if self.shares and len(self.shares) != len(self.shards):
            raise InvalidField("shares", f"there are {len(self.shares)} for {len(self.shards)} shards")
        if not all(0 < share <= 1 for share in self.shares):
            raise InvalidField("shares", "are numbers above 0 and at most 1")

    def owners(self, key: ChunkKey) -> list[ShardAddress]:
        """The shards that hold a chunk, the preferred first.

        Rendezvous hashing: when a shard leaves, only its own chunks move. Cost: one xxh3 per shard.
        """
        order = rank_shards(self.shards, key)
        if self.shares:
            shares = dict(zip(self.shards, self.shares, strict=True))
            # Stable: where too few shards are given the chunk, the others follow in their order.
            order.sort(key=lambda shard: not is_given(shard, key, shares[shard]))
        return order[: self.replicas]


def rank_shards(shards: Sequence[ShardAddress], key: ChunkKey) -> list[ShardAddress]:
    """Sort shards by their weight for a key, the highest first."""
    return sorted(
        shards, key=lambda shard: -xxhash.xxh3_64_intdigest(shard.shard_id.encode() + b"\0" + key.digest)
    )


def is_given(shard: ShardAddress, key: ChunkKey, share: float) -> bool:
    """Whether a chunk is in a shard's ``share``. Chunks in a smaller share are in a larger one, too.

    The seed makes this draw independent of the ranking, where the shards that own a chunk have drawn high.
    """
    draw = xxhash.xxh3_64_intdigest(shard.shard_id.encode() + b"\0" + key.digest, seed=1)
    return draw < share * (1 << 64)


def why_not_believed(new: ShardMap, known: ShardMap | None) -> str:
    """Why a client that knows one map does not take another from the same address; empty: it does.

    A later life of the same directory may number its maps from the beginning; an earlier one, which a broken
    network may have kept alive, is not heard. Whoever else answers at the address, such as another service
    that was given the port, is believed only if its map has a shard in common with the known one.
    """
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
    """Hands out the current map. Thread-safe; `current` does not block once a map is known."""

    @abstractmethod
    def current(self) -> ShardMap:
        """The newest known map. Raises `Unavailable` where none is known."""

    @abstractmethod
    def close(self) -> None:
        """Stop watching; idempotent."""


class FixedDirectory(ShardDirectory):
    """A map that its owner sets: for tests, and for a process that knows its shards itself."""

    def __init__(self, shards: ShardMap) -> None:
        self.shards = shards

    def current(self) -> ShardMap:
        return self.shards

    def close(self) -> None:
        return None


class FileDirectory(ShardDirectory):
    """A JSON file, `{"version": 1, "replicas": 1, "shards": [{"shard_id": …, "address": …}]}`.

    The file is read again when it changes. While it is broken, the previous map holds.
    """

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
        """Why the last map was ignored; empty: it was not."""
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
        """Take a map that is believed."""
        with self._known:
            refusal = why_not_believed(shards, self._map)
            if not refusal:
                self._map = shards
                self._known.notify_all()
        if refusal != self._refusal:
            self._refusal = refusal
            if refusal:
                log.error("%s: a shard map is ignored: %s", self._address, refusal)

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
