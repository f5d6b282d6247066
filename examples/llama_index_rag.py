"""LlamaIndex: a query engine over blended chunks.

    kintsugi serve --model FOLDER
    python examples/llama_index_rag.py --model FOLDER --question "…" document.txt another.txt

`KintsugiNodeParser` cuts the nodes, and `put_chunks` stores their texts. The query engine pastes the texts
into a message, and the gateway recognises them there: `KintsugiPromptHelper` keeps their white space.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from llama_index.core import Document, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import MetadataMode
from llama_index.llms.openai_like import OpenAILike

from kintsugi import Client
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.sdk.llama_index import KintsugiNodeParser, KintsugiPromptHelper

DIMENSIONS = 512
CHUNKS = 6


class WordCounts(BaseEmbedding):
    """Hashed word counts in place of an embedding model."""

    def _get_text_embedding(self, text: str) -> list[float]:
        counts = [0.0] * DIMENSIONS
        for word in text.split():
            counts[zlib.crc32(word.encode()) % DIMENSIONS] += 1.0
        return counts

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def build_query_engine(
    url: str,
    grpc: str,
    namespace: str,
    model_folder: str | Path,
    documents: Sequence[str],
    tokens_max: int = 512,
    max_tokens: int = 64,
) -> Any:
    """Index the documents, store their chunks, and return a query engine."""
    (model,) = httpx.get(f"{url}/models").raise_for_status().json()["data"]
    ours = model["kintsugi"]
    fingerprint = ModelFingerprint(bytes.fromhex(ours["fingerprint"]))
    prefix, context = (tuple(ours[name]) for name in ("prefix_token_ids", "context_token_ids"))
    space = ChunkSpace(fingerprint, namespace, prefix, ours["portable"], context)
    chunker = Chunker.of_model(model_folder, ChunkingConfig(tokens_max))
    nodes = KintsugiNodeParser(chunker, space).get_nodes_from_documents(
        [Document(text=text) for text in documents]
    )
    with Client(grpc, namespace) as client:
        client.put_chunks([node.get_content(MetadataMode.NONE) for node in nodes])
    llm = OpenAILike(
        api_base=url,
        api_key="none",
        model=model["id"],
        is_chat_model=True,
        context_window=model["max_model_len"],
        temperature=0,
        max_tokens=max_tokens,
        should_use_structured_outputs=True,  # as `response_format`, not as a tool, which needs a parser
        default_headers={"X-Kintsugi-Namespace": namespace},
    )
    index = VectorStoreIndex(nodes, embed_model=WordCounts())
    synthesizer = get_response_synthesizer(
        llm=llm, prompt_helper=KintsugiPromptHelper.from_llm_metadata(llm.metadata)
    )
    return index.as_query_engine(llm=llm, similarity_top_k=CHUNKS, response_synthesizer=synthesizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="text files")
    parser.add_argument("--model", required=True, help="folder of the model that is served")
    parser.add_argument("--question", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--grpc", default="127.0.0.1:7500")
    parser.add_argument("--namespace", default="examples")
    arguments = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in arguments.files]
    engine = build_query_engine(arguments.url, arguments.grpc, arguments.namespace, arguments.model, texts)
    response = engine.query(arguments.question)
    print(response)
    for source in response.source_nodes:
        print(f"- {source.node.get_content()[:80]}")


if __name__ == "__main__":
    main()
