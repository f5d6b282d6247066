"""Stores by URL, so that a config names one in a string.

`ram://NAME` is this process's store of that name: the connector's scheduler and worker sides, which
share a process where the engine has one worker, meet there. `grpc://HOST:PORT` is a shard.
`shards://HOST:PORT` is all shards of the directory there, `shardfile:///PATH` all shards of a map in a file.
These three take options as a query: `?ack=durable&tls_ca=…` (see `grpc_store.options_of`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from kintsugi.client.interface import ChunkStore
from kintsugi.client.ram import RamStore
from kintsugi.core.errors import InvalidField

_lock = threading.Lock()
_ram_stores: dict[str, RamStore] = {}


def _open_ram(url: str) -> ChunkStore:
    name = urlsplit(url).netloc or "default"
    with _lock:
        return _ram_stores.setdefault(name, RamStore())


def _open_grpc(url: str) -> ChunkStore:
    from kintsugi.client.grpc_store import open_grpc  # gRPC is only loaded by who uses it

    return open_grpc(url)


def _open_shards(url: str) -> ChunkStore:
    from kintsugi.client.directory import FileDirectory, GrpcDirectory
    from kintsugi.client.grpc_store import options_of
    from kintsugi.client.sharded import ShardedStore

    parts = urlsplit(url)
    options = options_of(parts.query)
    if parts.scheme == "shardfile":
        return ShardedStore(FileDirectory(Path(parts.path)), options)
    if not parts.netloc:
        raise InvalidField("store", f"{url!r} must name a directory as shards://host:port")
    return ShardedStore(GrpcDirectory(parts.netloc, options.tls), options)


_OPENERS: dict[str, Callable[[str], ChunkStore]] = {
    "ram": _open_ram,
    "grpc": _open_grpc,
    "shards": _open_shards,
    "shardfile": _open_shards,
}


def open_store(url: str) -> ChunkStore:
    """The store that `url` names. Raises `InvalidField` for a scheme that no store has."""
    scheme = urlsplit(url).scheme
    opener = _OPENERS.get(scheme)
    if opener is None:
        schemes = ", ".join(f"{name}://" for name in sorted(_OPENERS))
        raise InvalidField("store", f"{url!r} has no known scheme; use one of {schemes}")
    return opener(url)


def is_process_local(url: str) -> bool:
    """Whether the store cannot be reached from another process."""
    return urlsplit(url).scheme == "ram"
