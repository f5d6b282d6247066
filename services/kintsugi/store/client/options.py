"""Options of a client for the shards that it calls, and how a store's URL sets them."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from kintsugi.core.errors import InvalidField
from kintsugi.core.schema import STRICT, load
from kintsugi.store.client.key_file import KeyFile
from kintsugi.store.protocol.interface import DATA_KEYS, KEPT_KEYS, ErasedPlace
from kintsugi.store.protocol.keys import KeySource, NamespaceKeys
from kintsugi.store.protocol.tls import TlsFiles


@dataclass(frozen=True)
class UrlOptions:
    """Options of a client that the query of a store's URL may set."""

    __pydantic_config__ = STRICT

    ack: Literal["ram", "durable", ""] = ""
    """When a put returns: as soon as the chunk is in RAM, or on disk. Empty: the shard's default."""
    same_host: bool = True
    """Read from the shard's memory if it runs on this host and shares its memory."""
    ttl_s: float = 0.0
    """Lifetime of every chunk put; 0: chunks do not expire."""
    token_file: Path | None = None
    """File with the bearer token that the shard requires; read again when it changes."""


@dataclass(frozen=True)
class GrpcOptions(UrlOptions):
    """Options of a client for one shard."""

    call_timeout_s: float = 10.0
    """Deadline of calls without bulk bytes."""
    put_timeout_s: float = 120.0
    tls: TlsFiles | None = None
    """None: connections without TLS, which a shard accepts only on loopback or with `--insecure`."""
    keys: KeySource | None = None
    """Source of the keys of encrypted namespaces. None: no namespace is encrypted."""

    def find_keys(self, namespace: str) -> NamespaceKeys | None:
        """Return the namespace's keys; None if it is not encrypted. Raises as `KeySource.find` does."""
        return None if self.keys is None else self.keys.find(namespace)

    def name_key(self, namespace: str) -> bytes:
        """Return the name key, as `ChunkStore.name_key` does."""
        found = self.find_keys(namespace)
        return b"" if found is None else found.name_key

    def destroy_keys(self, namespace: str) -> list[ErasedPlace]:
        """Destroy the data keys, as `ChunkStore.destroy_keys` does."""
        if self.keys is None:
            return []
        try:
            destroyed = self.keys.replace(namespace)
        except InvalidField:
            return [ErasedPlace(KEPT_KEYS, 0, 0, time.time())]
        return [ErasedPlace(DATA_KEYS, destroyed, 0, time.time())] if destroyed else []


@dataclass(frozen=True)
class UrlQuery(UrlOptions):
    """All options in a URL's query."""

    tls_ca: Path | None = None
    """PEM file of the authority that signed the shards' certificates."""
    tls_cert: Path | None = None
    """PEM file of the client's certificate."""
    tls_key: Path | None = None
    """PEM file of that certificate's private key."""
    tls_name: str = ""
    """The name in the shards' certificates; empty: the address of each shard."""
    keys: Path | None = None
    """File with the keys of encrypted namespaces, which `kintsugi keys` writes."""

    @property
    def tls(self) -> TlsFiles | None:
        """Raises `InvalidField` if some of the files are missing."""
        if not (self.tls_ca or self.tls_cert or self.tls_key):
            return None
        if not (self.tls_ca and self.tls_cert and self.tls_key):
            raise InvalidField("store", "tls_ca, tls_cert and tls_key belong together")
        return TlsFiles(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)


def options_of(query: str) -> GrpcOptions:
    """Return the options in a URL's query, such as `ack=durable&tls_ca=…&tls_cert=…&tls_key=…`.

    Raises `InvalidField` and `UnknownField`.
    """
    values = _read_query(query)
    given = {one.name: getattr(values, one.name) for one in fields(UrlOptions)}
    return GrpcOptions(**given, tls=values.tls, keys=None if values.keys is None else KeyFile(values.keys))


def tls_files_of(query: str) -> TlsFiles | None:
    """Return the TLS files in a URL's query, without reading keys. Raises as `options_of` does."""
    return _read_query(query).tls


def _read_query(query: str) -> UrlQuery:
    return load(UrlQuery, dict(parse_qsl(query, keep_blank_values=True)), "store", are_texts=True)
