"""A LlamaIndex `NodeParser` that uses our chunker, a `PromptHelper` that keeps its chunks' white space, and a
postprocessor that prefetches nodes.

The metadata of every node has its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.node_parser import NodeParser
from llama_index.core.node_parser.node_utils import build_nodes_from_splits
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from pydantic import PrivateAttr

from kintsugi.core.spaces import ChunkSpace
from kintsugi.precompute.chunking import Chunker
from kintsugi.sdk.client import Client
from kintsugi.sdk.prefetching import Prefetcher


class KintsugiNodeParser(NodeParser):  # type: ignore[misc]
    """Splits documents into chunks. Build the index with it, so that retrieved texts equal cached chunks.

    The chunk keys in the metadata are excluded from embeddings and prompts: in a prompt they would be tokens
    that the stored chunk does not have.
    """

    _chunker: Chunker = PrivateAttr()
    _space: ChunkSpace = PrivateAttr()
    _markdown: bool = PrivateAttr()

    def __init__(self, chunker: Chunker, space: ChunkSpace, markdown: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._chunker, self._space, self._markdown = chunker, space, markdown

    @classmethod
    def class_name(cls) -> str:
        """Return the name for LlamaIndex's serialisation."""
        return "KintsugiNodeParser"

    def _parse_nodes(
        self, nodes: Sequence[BaseNode], show_progress: bool = False, **kwargs: Any
    ) -> list[BaseNode]:
        parsed: list[BaseNode] = []
        for node in nodes:
            text = node.get_content(MetadataMode.NONE)
            chunks = list(self._chunker.chunks(text, self._markdown))
            built = build_nodes_from_splits([chunk.text for chunk in chunks], node, id_func=self.id_func)
            for one, chunk in zip(built, chunks, strict=True):
                ours = chunk.metadata(self._space)
                one.metadata = {**one.metadata, **ours}
                one.excluded_embed_metadata_keys = [*one.excluded_embed_metadata_keys, *ours]
                one.excluded_llm_metadata_keys = [*one.excluded_llm_metadata_keys, *ours]
                one.start_char_idx, one.end_char_idx = chunk.start, chunk.end
            parsed += built
        return parsed


class KintsugiPromptHelper(PromptHelper):  # type: ignore[misc]
    """Joins the texts of nodes with blank lines. LlamaIndex's own helper removes the white space at their
    ends, so stored chunks that begin with a space or an indentation would not be found.

        get_response_synthesizer(prompt_helper=KintsugiPromptHelper.from_llm_metadata(llm.metadata), …)
    """

    def repack(self, prompt: Any, text_chunks: Sequence[str], *args: Any, **kwargs: Any) -> list[str]:
        """Return one text if it fits into the context window; otherwise the result of LlamaIndex's helper."""
        text = "\n\n".join(text_chunks)
        splitter = self.get_text_splitter_given_prompt(prompt, 1, *args, **kwargs)
        packed: list[str] = splitter.split_text(text)
        return [text] if len(packed) == 1 else packed


class KintsugiPrefetch(BaseNodePostprocessor):  # type: ignore[misc]
    """Prefetches the nodes of a query while the prompt is written. As the last postprocessor, it prefetches
    exactly the nodes of the prompt.

        index.as_query_engine(node_postprocessors=[reranker, KintsugiPrefetch(kintsugi.Client(…))])

    Nodes are returned unchanged. If the gateway does not answer, only the prefetch is lost.
    """

    _prefetcher: Prefetcher = PrivateAttr()

    def __init__(self, client: Client, put: bool = False, ttl_s: float | None = None, **kwargs: Any) -> None:
        """``put``: also store chunks that are not stored, in the background. ``ttl_s``: their maximum
        lifetime in seconds; None: until the store needs their space."""
        super().__init__(**kwargs)
        self._prefetcher = Prefetcher(client, put, ttl_s)

    @classmethod
    def class_name(cls) -> str:
        return "KintsugiPrefetch"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._prefetcher.prefetch(_texts_of(nodes))
        return nodes


def _texts_of(nodes: Sequence[NodeWithScore]) -> list[str]:
    """Return the texts of nodes as they were put, without the metadata that a template adds."""
    return [found.node.get_content(MetadataMode.NONE) for found in nodes]
