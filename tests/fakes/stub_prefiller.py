"""A prefiller without a model, for tests and benchmarks of what happens around the prefill."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from kintsugi.core.errors import KintsugiError
from kintsugi.core.layout import ChunkManifest, Codec
from kintsugi.core.spaces import anchors_of
from kintsugi.precompute.ledger_chunks import PendingChunk, unpack_tokens
from kintsugi.precompute.worker import FILLED, Prefiller, WorkerSpec, find_copy
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkStore


class StubPrefiller(Prefiller):
    """Runs no model: puts made-up KV of the right shape as an engine would, or nothing with ``put=False``.

    With ``log`` it appends the key of every chunk that it prefills to that file, before it puts the chunk.
    """

    def __init__(self, spec: WorkerSpec, log: str = "", put: bool = True) -> None:
        self._spec = spec
        self._log = log
        self._store: ChunkStore | None = open_store(spec.store) if put else None

    def fill(self, chunks: Sequence[PendingChunk]) -> list[str]:
        return [self._fill_one(chunk) for chunk in chunks]

    def _fill_one(self, chunk: PendingChunk) -> str:
        if self._log:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(descriptor, chunk.key.hex.encode() + b"\n")
            finally:
                os.close(descriptor)
        if self._store is None:
            return FILLED
        layout, ids = self._spec.layout, chunk.token_ids
        size = layout.frame_bytes(Codec.RAW, len(ids))
        frames = [np.random.default_rng(ids[0] + n).bytes(size) for n in range(layout.num_layers)]
        space = find_copy(self._spec.space, chunk)
        anchor = anchors_of(ids, space.name_key)
        context = space.context_keys_of([unpack_tokens(passage) for passage in chunk.context])
        of = (space, chunk.key, anchor, len(ids), layout, Codec.RAW, frames)
        manifest = ChunkManifest.of(*of, context_keys=context)
        try:
            self._store.put(manifest, frames)
        except KintsugiError as error:
            return f"{type(error).__name__}: {error}"
        return FILLED

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
