"""Interface that finds chunks by document: it maps (document id, version, index) to token ids.

A retriever knows documents; the cache knows token ids. A gateway uses a `DocumentIndex`, such as precompute's
ledger, for segments that name a document.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkKey

DOCUMENT_ID_BYTES_MAX = 1024

NameKey = Callable[[str], bytes]


def no_name_key(namespace: str) -> bytes:
    """Return the empty name key, which a namespace without encryption has."""
    return b""


@dataclass(frozen=True)
class DocumentRef:
    """A reference to one chunk of one document."""

    document_id: str
    index: int
    version: str | None = None
    """None means the current version. Only the current version is found."""

    def __post_init__(self) -> None:
        check_document_id(self.document_id)
        if self.index < 0:
            raise InvalidField("index", f"{self.index} is negative; chunks count from 0")


@dataclass(frozen=True)
class KnownChunk:
    """The chunk that a reference names."""

    ref: DocumentRef
    version: str
    """The document's current version."""
    key: ChunkKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class IndexedChunk:
    """A chunk of any corpus."""

    number: int
    """Increases with every chunk that is added."""
    namespace: str
    key: ChunkKey
    token_ids: tuple[int, ...]


class DocumentIndex(ABC):
    """Knows which chunks each document has. Thread-safe."""

    @abstractmethod
    def resolve(
        self, corpus: str, refs: Sequence[DocumentRef], name_key: NameKey = no_name_key
    ) -> list[KnownChunk | None]:
        """Resolve references within one corpus, in order; None for a document, version or index that does not
        exist. ``name_key``: `ChunkStore.name_key`."""

    @abstractmethod
    def chunks(self, fingerprint: str, after: int, limit: int) -> list[IndexedChunk]:
        """Up to `limit` chunks made for a model (its fingerprint in hexadecimal) with numbers above `after`,
        in order."""

    def erase_chunks(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Delete the tokens of chunks. Documents that refer to these chunks no longer find them. Return the
        number of deleted chunks. Nothing of them is left in files."""
        return 0

    def erase_document(
        self,
        namespace: str,
        corpus: str,
        document_id: str,
        erase: Callable[[Sequence[ChunkKey]], None],
        name_key: bytes = b"",
    ) -> bool:
        """Delete a document of a corpus of the namespace, and the chunks that no other document has.

        ``erase`` is called with the keys of these chunks before they are deleted. ``name_key`` is the name
        key of the namespace. Return whether the document existed. Nothing of it is left in files. If a call
        fails, the next call continues."""
        return False

    def erase_namespace(self, namespace: str) -> int:
        """Delete every corpus of the namespace and of its parts. Return the number of deleted chunks. Nothing
        of them is left in files."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


def check_document_id(document_id: str) -> None:
    """Raise `InvalidField` if the id is empty or too long."""
    if not document_id or len(document_id.encode(errors="replace")) > DOCUMENT_ID_BYTES_MAX:
        raise InvalidField("document_id", f"must have between 1 and {DOCUMENT_ID_BYTES_MAX} bytes")
