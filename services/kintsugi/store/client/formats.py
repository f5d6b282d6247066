"""Which formats of chunks a shard stores, and what becomes of a chunk that it cannot store.

Shards of an earlier version store older formats alone, and would refuse a newer chunk after its bytes were
sent. The version before formats had numbers of their own announces none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kintsugi.core.errors import VersionMismatch
from kintsugi.core.layout import PLAIN_FORMAT, ChunkManifest
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol.interface import Buffer

FORMATS_AGE_S_MAX = 60.0
"""A shard that lacked a format is asked again after this long: it may have been upgraded."""


class FormatNotStored(VersionMismatch):
    """The shard is of an earlier version and cannot hold the chunk. It serves older ones as before."""


class StoredFormats:
    """What one shard stores, asked for when it is first needed. Thread-safe."""

    def __init__(
        self, ask: Callable[[], pb.StatsResponse], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._formats = frozenset({PLAIN_FORMAT})
        self._ask_again_at_s = -float("inf")

    def holds(self, version: int) -> bool:
        """Whether chunks of this format can be put. No call for the plain format, which every shard stores;
        for others, what `ask` raises."""
        with self._lock:
            if version in self._formats:
                return True
            if self._clock() < self._ask_again_at_s:
                return False
        stats = self._ask()
        with self._lock:
            self._formats = frozenset({PLAIN_FORMAT, stats.format_version, *stats.formats})
            self._ask_again_at_s = self._clock() + FORMATS_AGE_S_MAX
            return version in self._formats

    def fit(
        self, address: str, manifest: ChunkManifest, frames: Sequence[Buffer]
    ) -> tuple[ChunkManifest, Sequence[Buffer]]:
        """The chunk as the shard can store it: without its priors, where they are all that it cannot hold.
        Raises `FormatNotStored` where more would be lost."""
        if self.holds(manifest.format):
            return manifest, frames
        plain = manifest.as_plain()
        if plain is None:
            raise FormatNotStored(
                f"{address} stores no chunks of format {manifest.format}; upgrade the shard"
            )
        return plain, frames[bool(manifest.priors) :]
