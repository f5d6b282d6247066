"""LlamaIndex's `NodeParser` over our chunker: every node's metadata carries its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.node_parser import NodeParser
from llama_index.core.node_parser.node_utils import build_nodes_from_splits
from llama_index.core.schema import BaseNode, MetadataMode
from pydantic import PrivateAttr

from kintsugi.core.spaces import ChunkSpace
from kintsugi.precompute.chunking import Chunker


class KintsugiNodeParser(NodeParser):  # type: ignore[misc]
    """Use it where the index is built: what is retrieved is then what is cached.

    Our keys are left out of what LlamaIndex embeds and sends to the model: in the prompt they would be
    tokens that the stored chunk does not have.
    """

    _chunker: Chunker = PrivateAttr()
    _space: ChunkSpace = PrivateAttr()
    _markdown: bool = PrivateAttr()

    def __init__(self, chunker: Chunker, space: ChunkSpace, markdown: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._chunker, self._space, self._markdown = chunker, space, markdown

    @classmethod
    def class_name(cls) -> str:
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
