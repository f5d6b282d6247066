"""Stores by URL, so that a config names one in a string.

`ram://NAME` is this process's store of that name: the connector's scheduler and worker sides, which
share a process where the engine has one worker, meet there; with `?bytes_per_s=…` it is read no faster
than that, as a slower tier would be. `grpc://HOST:PORT` is a shard.
`shards://HOST:PORT` is all shards of the directory there, `shardfile:///PATH` all shards of a map in a file.
These three take options as a query: `?ack=durable&tls_ca=…` (see `grpc_store.options_of`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.throttled import ThrottledStore
from kintsugi.store.protocol.interface import AsyncChunkStore, ChunkStore

if TYPE_CHECKING:
    from kintsugi.store.client.directory import ShardDirectory
    from kintsugi.store.client.grpc_store import GrpcOptions

_lock = threading.Lock()
_ram_stores: dict[str, RamStore] = {}


def _open_ram(url: str) -> ChunkStore:
    parts = urlsplit(url)
    name, options = parts.netloc or "default", parse_qs(parts.query, keep_blank_values=True)
    if unknown := set(options) - {"bytes_per_s"}:
        raise UnknownField(f"store.{min(unknown)}", ["bytes_per_s"])
    with _lock:
        if name not in _ram_stores:
            _ram_stores[name] = _ram_store(options.get("bytes_per_s", [""])[-1]) if options else RamStore()
        return _ram_stores[name]


def _ram_store(bytes_per_s: str) -> RamStore:
    try:
        rate = float(bytes_per_s)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise InvalidField("store.bytes_per_s", f"{bytes_per_s!r} is no rate above 0")
    return ThrottledStore(rate)


def _open_grpc(url: str) -> ChunkStore:
    from kintsugi.store.client.grpc_store import open_grpc  # gRPC is only loaded by who uses it

    return open_grpc(url)


def _directory(url: str) -> tuple[ShardDirectory, GrpcOptions]:
    """Who knows the shards of `url`, and how to talk to them."""
    from kintsugi.store.client.directory import FileDirectory, GrpcDirectory
    from kintsugi.store.client.grpc_store import options_of
    from kintsugi.store.protocol.tls import parse_address

    parts = urlsplit(url)
    options = options_of(parts.query)
    if parts.scheme == "shardfile":
        return FileDirectory(Path(parts.path)), options
    if not parts.netloc:
        raise InvalidField("store", f"{url!r} must name a directory as shards://host:port")
    parse_address("store", parts.netloc)
    return GrpcDirectory(parts.netloc, options.tls), options


def _open_shards(url: str) -> ChunkStore:
    from kintsugi.store.client.sharded import ShardedStore

    return ShardedStore(*_directory(url))


def _open_ram_async(url: str) -> AsyncChunkStore:
    from kintsugi.store.client.in_process import InProcessStore

    return InProcessStore(_open_ram(url))


def _open_grpc_async(url: str) -> AsyncChunkStore:
    from kintsugi.store.client.grpc_store import AsyncGrpcStore, shard_of

    return AsyncGrpcStore(*shard_of(url))


def _open_shards_async(url: str) -> AsyncChunkStore:
    from kintsugi.store.client.sharded import AsyncShardedStore

    return AsyncShardedStore(*_directory(url))


_Opener = tuple[Callable[[str], ChunkStore], Callable[[str], AsyncChunkStore]]
_OPENERS: dict[str, _Opener] = {
    "ram": (_open_ram, _open_ram_async),
    "grpc": (_open_grpc, _open_grpc_async),
    "shards": (_open_shards, _open_shards_async),
    "shardfile": (_open_shards, _open_shards_async),
}


def _opener(url: str) -> _Opener:
    opener = _OPENERS.get(urlsplit(url).scheme)
    if opener is None:
        schemes = ", ".join(f"{name}://" for name in sorted(_OPENERS))
        raise InvalidField("store", f"{url!r} has no known scheme; use one of {schemes}")
    return opener


def open_store(url: str) -> ChunkStore:
    """The store that `url` names. Raises `InvalidField` for a scheme that no store has."""
    return _opener(url)[0](url)


def open_async_store(url: str) -> AsyncChunkStore:
    """The same for the running event loop."""
    return _opener(url)[1](url)


def is_process_local(url: str) -> bool:
    """Whether the store cannot be reached from another process."""
    return urlsplit(url).scheme == "ram"
