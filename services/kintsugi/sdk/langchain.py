"""LangChain's `TextSplitter` over our chunker: every chunk's metadata carries its key."""

from __future__ import annotations

import copy
from typing import Any

from langchain_core.documents import Document
from langchain_text_splitters import TextSplitter

from kintsugi.core.spaces import ChunkSpace
from kintsugi.precompute.chunking import Chunker


class KintsugiTextSplitter(TextSplitter):  # type: ignore[misc]
    """Use it where the vector store is filled: what is retrieved is then what is cached."""

    def __init__(self, chunker: Chunker, space: ChunkSpace, markdown: bool = False) -> None:
        super().__init__(
            chunk_size=chunker.config.tokens_max,
            chunk_overlap=chunker.config.overlap_tokens,
            length_function=lambda text: len(chunker.token_ids(text)),
        )
        self._chunker = chunker
        self._space = space
        self._markdown = markdown

    def split_text(self, text: str) -> list[str]:
        return [chunk.text for chunk in self._chunker.chunks(text, self._markdown)]

    def create_documents(
        self, texts: list[str], metadatas: list[dict[Any, Any]] | None = None
    ) -> list[Document]:
        """One document per chunk: the source's metadata, `start_index` and `Chunk.metadata`."""
        return [
            Document(
                page_content=chunk.text,
                metadata={
                    **copy.deepcopy(metadata),
                    "start_index": chunk.start,
                    **chunk.metadata(self._space),
                },
            )
            for text, metadata in zip(texts, metadatas or [{} for _ in texts], strict=True)
            for chunk in self._chunker.chunks(text, self._markdown)
        ]
