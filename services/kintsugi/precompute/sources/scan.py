"""Reads and chunks files, or any Ray dataset, on Ray Data: yields documents with their chunks' keys.

Each task reads one piece lazily and emits blocks of bounded size. Ray Data pauses tasks while nobody takes
their blocks, so the driver's memory is a few blocks for any corpus.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import blake3
import pyarrow as pa

from kintsugi.core.errors import Unavailable
from kintsugi.core.spaces import ChunkKey, ChunkSpace, token_bytes
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.precompute.ledger import ScannedChunk, ScannedDocument, pack_tokens
from kintsugi.precompute.sources.files import FileRange, Format
from kintsugi.precompute.sources.readers import Columns, Document, Failure, read, row_to_document

BLOCK_DOCUMENTS = 256
BLOCK_TOKENS = 1 << 19
"""A block ends at either limit, so it has at most 2 MiB of token ids."""

_SCHEMA = pa.schema(
    [
        ("url", pa.string()),
        ("place", pa.int64()),
        ("document_id", pa.string()),
        ("version", pa.string()),
        ("digest", pa.binary()),
        ("metadata", pa.string()),
        ("failure", pa.string()),
        ("keys", pa.list_(pa.binary())),
        ("tokens", pa.list_(pa.binary())),
        ("sizes", pa.list_(pa.int64())),
        ("starts", pa.list_(pa.int64())),
        ("stops", pa.list_(pa.int64())),
    ]
)

Scanned = ScannedDocument | Failure


class ChunkTask:
    """The functions that run in Ray's tasks. Holds plain values only, because Ray pickles it."""

    def __init__(self, model: str, chunking: ChunkingConfig, space: ChunkSpace, columns: Columns) -> None:
        self.model, self.chunking, self.space, self.columns = model, chunking, space, columns

    def read_pieces(self, batch: dict[str, Any]) -> Iterator[pa.Table]:
        """Read and chunk pieces, given as JSON."""
        for text in batch["piece"]:
            values = json.loads(str(text))
            piece = FileRange(**{**values, "format": Format(values["format"])})
            yield from self._tables(read(piece, self.columns))

    def read_rows(self, batch: pa.Table, name: str) -> Iterator[pa.Table]:
        """Chunk a dataset's rows. Rows have no place, so a document without an id is named after its text."""
        piece = FileRange(f"dataset://{name}", name, Format.PARQUET, "")
        documents = []
        for row in batch.to_pylist():
            digest = blake3.blake3(str(row.get(self.columns.text)).encode(errors="replace")).hexdigest()
            if row.get(self.columns.id) is None:
                row[self.columns.id] = f"{name}@{digest[:32]}"
            documents.append(row_to_document(row, piece, int(digest[:15], 16), self.columns))
        yield from self._tables(iter(documents))

    def _tables(self, documents: Iterator[Document | Failure]) -> Iterator[pa.Table]:
        rows: list[dict[str, Any]] = []
        tokens = 0
        for document in documents:
            row = self._row(document)
            tokens += sum(row.get("sizes", ()))
            rows.append(row)
            if len(rows) >= BLOCK_DOCUMENTS or tokens >= BLOCK_TOKENS:
                yield pa.Table.from_pylist(rows, schema=_SCHEMA)
                rows, tokens = [], 0
        yield pa.Table.from_pylist(rows, schema=_SCHEMA)

    def _row(self, document: Document | Failure) -> dict[str, Any]:
        if isinstance(document, Failure):
            place = {"url": document.url, "place": document.place, "document_id": document.document_id}
            return {**place, "failure": document.reason}
        chunks = list(_chunker(self.model, self.chunking).chunks(document.text, document.markdown))
        facts = f"{self.chunking.identity}\0{document.markdown}\0{document.text}"
        digest = blake3.blake3(facts.encode()).digest()
        return {
            "url": document.url,
            "place": document.place,
            "document_id": document.document_id,
            "version": document.version or digest.hex()[:16],
            "digest": digest,
            "metadata": document.metadata,
            "failure": None,
            "keys": [ChunkKey.of(self.space, chunk.token_ids).digest for chunk in chunks],
            "tokens": [pack_tokens(token_bytes(chunk.token_ids)) for chunk in chunks],
            "sizes": [len(chunk.token_ids) for chunk in chunks],
            "starts": [chunk.start for chunk in chunks],
            "stops": [chunk.end for chunk in chunks],
        }


@lru_cache(maxsize=4)
def _chunker(model: str, config: ChunkingConfig) -> Chunker:
    return Chunker.of_model(model, config)


def scan(
    source: Sequence[FileRange] | Any, task: ChunkTask, name: str = "dataset"
) -> Iterator[list[Scanned]]:
    """Yield blocks of documents in no particular order, every document of the source once. Ray must be
    running.

    ``source``: pieces of files, or a `ray.data.Dataset` with the columns of `task`. Raises `Unavailable`.
    """
    import ray
    from ray.exceptions import RayError

    _silence_ray()
    if isinstance(source, Sequence):
        items = [{"piece": json.dumps(asdict(piece))} for piece in source]
        blocks = min(len(items), 4_096)
        dataset = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
            task.read_pieces, batch_size=1
        )
    else:
        dataset = source.map_batches(
            task.read_rows, batch_size=BLOCK_DOCUMENTS, batch_format="pyarrow", fn_kwargs={"name": name}
        )
    try:
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            yield [_row_to_scanned(row) for row in batch.to_pylist()]
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise Unavailable(f"reading the corpus failed: {type(cause).__name__}: {cause}") from error


def _row_to_scanned(row: dict[str, Any]) -> Scanned:
    if row["failure"] is not None:
        return Failure(row["url"], row["place"], row["failure"], row["document_id"])
    columns = (row["keys"], row["tokens"], row["sizes"], row["starts"], row["stops"])
    chunks = tuple(ScannedChunk(*values) for values in zip(*columns, strict=True))
    fields = (row["url"], row["place"], row["document_id"], row["version"], row["digest"], row["metadata"])
    return ScannedDocument(*fields, chunks)


def _silence_ray() -> None:
    """Turn off Ray Data's progress output, because we show our own."""
    from ray.data import DataContext

    DataContext.get_current().enable_progress_bars = False
    for name in ("ray.data", "ray.data._internal.execution.streaming_executor"):
        logging.getLogger(name).setLevel(logging.ERROR)
