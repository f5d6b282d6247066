"""The manifests of chunks that a client saw lately."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kintsugi.core.layout import ChunkManifest
from kintsugi.core.spaces import ChunkKey

MANIFESTS_MAX = 4096
"""Manifests that a client remembers of one shard."""


class RecentManifests:
    """They give a stream its digests; oldest out first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, ChunkKey], ChunkManifest] = OrderedDict()

    def remember(self, manifest: ChunkManifest) -> None:
        with self._lock:
            self._seen[manifest.namespace, manifest.key] = manifest
            self._seen.move_to_end((manifest.namespace, manifest.key))
            while len(self._seen) > MANIFESTS_MAX:
                self._seen.popitem(last=False)

    def get(self, namespace: str, key: ChunkKey) -> ChunkManifest | None:
        with self._lock:
            return self._seen.get((namespace, key))

    def forget(self, manifest: ChunkManifest) -> None:
        with self._lock:
            self._seen.pop((manifest.namespace, manifest.key), None)
