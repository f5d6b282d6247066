"""A LangChain `TextSplitter` that uses our chunker, and a retriever that prefetches another retriever's
documents.

The metadata of every chunk has its key.
"""

from __future__ import annotations

import copy
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_text_splitters import TextSplitter
from pydantic import PrivateAttr

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkSpace
from kintsugi.precompute.chunking import Chunker
from kintsugi.sdk.client import Client
from kintsugi.sdk.prefetching import Prefetcher


class KintsugiTextSplitter(TextSplitter):  # type: ignore[misc]
    """Splits texts into chunks. Fill the vector store with it, so that retrieved texts equal cached chunks.

    The chunks keep their white space, so `strip_whitespace` of LangChain's own splitters has no counterpart.
    """

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
        """Return a document for each chunk, with the source's metadata, `start_index` and
        `Chunk.metadata`."""
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


class KintsugiRetriever(BaseRetriever):  # type: ignore[misc]
    """Wraps a retriever, and prefetches its documents while the chain writes the prompt.

        retriever = KintsugiRetriever(retriever=store.as_retriever(), client=kintsugi.Client(…))

    Documents are returned unchanged. If the gateway does not answer, only the prefetch is lost.
    """

    retriever: BaseRetriever
    client: Any
    """A `kintsugi.Client` for the namespace of the prompts."""
    put: bool = False
    """Also store chunks that are not stored, in the background."""
    ttl_s: float | None = None
    """Maximum lifetime in seconds of chunks stored because of `put`; None: until the store needs their
    space."""
    _prefetcher: Prefetcher = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if not isinstance(self.client, Client):
            raise InvalidField("client", f"is a {type(self.client).__name__}; give a kintsugi.Client")
        self._prefetcher = Prefetcher(self.client, self.put, self.ttl_s)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        documents: list[Document] = self.retriever.invoke(query, {"callbacks": run_manager.get_child()})
        self._prefetch(documents)
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        config = {"callbacks": run_manager.get_child()}
        documents: list[Document] = await self.retriever.ainvoke(query, config)
        self._prefetch(documents)
        return documents

    def _prefetch(self, documents: list[Document]) -> None:
        self._prefetcher.prefetch([document.page_content for document in documents])
