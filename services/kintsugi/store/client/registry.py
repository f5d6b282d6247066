"""Opens stores by URL, so that a setting names a store in a string.

`ram://NAME` is this process's store with that name; the connector's scheduler and worker sides share it if
the engine has one worker. `?bytes_per_s=…` limits its read rate to that of a slower tier. `grpc://HOST:PORT`
is a shard. `shards://HOST:PORT` is all shards of the directory there, `shardfile:///PATH` all shards of the
map in a file. These three take options as a query, such as `?ack=durable&tls_ca=…&token_file=…` (see
`options.options_of`)."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

from kintsugi.core.errors import InvalidField
from kintsugi.core.schema import STRICT, load
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import ChunkStore

if TYPE_CHECKING:
    from kintsugi.store.client.directory import ShardDirectory
    from kintsugi.store.client.options import GrpcOptions

SCHEMES = ("grpc", "ram", "shardfile", "shards")
_lock = threading.Lock()
_ram_stores: dict[str, RamStore] = {}


@dataclass(frozen=True)
class _RamQuery:
    __pydantic_config__ = STRICT

    bytes_per_s: float | None = None


def ram_url(name: str, bytes_per_s: float | None = None) -> str:
    """Return the URL of this process's store with that name, with a maximum read rate if one is given."""
    return f"ram://{name}" + ("" if bytes_per_s is None else "?" + urlencode({"bytes_per_s": bytes_per_s}))


def _open_ram(url: str) -> ChunkStore:
    parts = urlsplit(url)
    name = parts.netloc or "default"
    values = dict(parse_qsl(parts.query, keep_blank_values=True))
    rate = load(_RamQuery, values, "store", are_texts=True).bytes_per_s
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidField("store.bytes_per_s", f"{rate} is not a rate above 0")
    with _lock:
        if name not in _ram_stores:
            _ram_stores[name] = RamStore() if rate is None else RamStore(bytes_per_s=rate)
        return _ram_stores[name]


def open_directory(url: str) -> tuple[ShardDirectory, GrpcOptions]:
    """Open the directory that a `shards://` or `shardfile://` URL names, with the options for its shards.

    Raises `InvalidField`.
    """
    from kintsugi.store.client.directory import FileDirectory, GrpcDirectory
    from kintsugi.store.client.options import options_of
    from kintsugi.store.protocol.tls import parse_address

    parts = urlsplit(url)
    options = options_of(parts.query)
    if parts.scheme == "shardfile":
        return FileDirectory(Path(parts.path)), options
    if parts.scheme != "shards" or not parts.netloc:
        raise InvalidField("store", f"{url!r} must name a directory as shards://host:port")
    parse_address("store", parts.netloc)
    return GrpcDirectory(parts.netloc, options.tls), options


def open_store(url: str) -> ChunkStore:
    """Open the store that `url` names. Raises `InvalidField` for an unknown scheme."""
    # gRPC is imported only for the schemes that use it.
    match urlsplit(url).scheme:
        case "ram":
            return _open_ram(url)
        case "grpc":
            from kintsugi.store.client.grpc_store import open_grpc

            return open_grpc(url)
        case "shards" | "shardfile":
            from kintsugi.store.client.sharded import ShardedStore

            return ShardedStore(*open_directory(url))
    schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    raise InvalidField("store", f"{url!r} has no known scheme; use one of {schemes}")


def name_key_of(url: str, namespace: str) -> bytes:
    """Return `ChunkStore.name_key` of the store that `url` names, without connecting to it."""
    if is_process_local(url):
        return b""
    from kintsugi.store.client.options import options_of

    return options_of(urlsplit(url).query).name_key(namespace)


def is_process_local(url: str) -> bool:
    """Return whether only this process can use the store."""
    return urlsplit(url).scheme == "ram"
