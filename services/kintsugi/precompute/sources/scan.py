"""Reads and chunks files, on Ray Data or in this process; yields documents with the keys of their chunks.

On Ray Data, each task reads one piece lazily and emits blocks of bounded size. Ray Data pauses tasks until
their blocks are consumed, so the driver holds only a few blocks of any corpus.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import blake3
import pyarrow as pa

from kintsugi.core.errors import Unavailable
from kintsugi.core.spaces import ChunkKey, ChunkSpace, token_bytes
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.precompute.ledger import ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import pack_tokens
from kintsugi.precompute.sources.files import FileRange
from kintsugi.precompute.sources.readers import Columns, Document, Failure
from kintsugi.precompute.sources.sandbox import read_confined

BLOCK_DOCUMENTS = 256
BLOCK_TOKENS = 1 << 19
"""A block ends at the first of the two limits, so it has about 2 MiB of token ids."""

_PICKLED = "pickled"
"""The only column of the tasks' input and output tables: a pickled `FileRange` or `Scanned`."""

Scanned = ScannedDocument | Failure


@dataclass(frozen=True)
class ChunkTask:
    """The functions that run in Ray's tasks. All fields are plain values, because Ray pickles them."""

    model: str
    chunking: ChunkingConfig
    space: ChunkSpace
    columns: Columns

    def read_pieces(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Read and chunk pieces."""
        for piece in _unpickle(batch):
            yield from map(_pickle, self.read_blocks(piece))

    def read_blocks(self, piece: FileRange) -> Iterator[list[Scanned]]:
        """Read and chunk one piece."""
        block: list[Scanned] = []
        tokens = 0
        for document in read_confined(piece, self.columns):
            scanned = document if isinstance(document, Failure) else self._chunk(document)
            block.append(scanned)
            if isinstance(scanned, ScannedDocument):
                tokens += sum(chunk.num_tokens for chunk in scanned.chunks)
            if len(block) >= BLOCK_DOCUMENTS or tokens >= BLOCK_TOKENS:
                yield block
                block, tokens = [], 0
        yield block

    def _chunk(self, document: Document) -> ScannedDocument:
        facts = f"{self.chunking.identity}\0{document.markdown}\0{document.text}"
        digest = blake3.blake3(facts.encode()).digest()
        chunks = tuple(
            ScannedChunk(
                ChunkKey.of(self.space, chunk.token_ids).digest,
                pack_tokens(token_bytes(chunk.token_ids)),
                len(chunk.token_ids),
            )
            for chunk in _chunker(self.model, self.chunking).chunks(document.text, document.markdown)
        )
        place, version = (document.url, document.place), document.version or digest.hex()[:16]
        return ScannedDocument(*place, document.document_id, version, digest, len(document.text), chunks)


def _pickle(items: Sequence[FileRange | Scanned]) -> pa.Table:
    return pa.table({_PICKLED: pa.array([pickle.dumps(item) for item in items], pa.binary())})


def _unpickle(table: pa.Table) -> list[Any]:
    return [pickle.loads(item) for item in table.column(_PICKLED).to_pylist()]


@lru_cache(maxsize=4)
def _chunker(model: str, config: ChunkingConfig) -> Chunker:
    return Chunker.of_model(model, config)


def scan(pieces: Sequence[FileRange], task: ChunkTask) -> Iterator[list[Scanned]]:
    """Yield blocks of documents in no particular order, with each document of `pieces` once.

    Ray must be running. Raises `Unavailable` if a task fails.
    """
    import ray
    from ray.exceptions import RayError

    _silence_ray()
    blocks = min(len(pieces), 4_096)
    dataset = ray.data.from_items(_pickle(pieces).to_pylist(), override_num_blocks=blocks)
    dataset = dataset.map_batches(task.read_pieces, batch_size=1, batch_format="pyarrow")
    try:
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            yield _unpickle(batch)
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise Unavailable(f"reading the corpus failed: {type(cause).__name__}: {cause}") from error


def _silence_ray() -> None:
    """Turn off Ray Data's progress output: the command shows its own."""
    from ray.data import DataContext

    DataContext.get_current().enable_progress_bars = False
    for name in ("ray.data", "ray.data._internal.execution.streaming_executor"):
        logging.getLogger(name).setLevel(logging.ERROR)
