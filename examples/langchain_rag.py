"""LangChain: an unmodified retrieval chain that stuffs documents into a prompt, over blended chunks.

    kintsugi serve --model FOLDER
    python examples/langchain_rag.py --model FOLDER --question "…" document.txt another.txt

Only two steps are specific to Kintsugi: `KintsugiTextSplitter` cuts the documents, and `put_chunks` stores
the pieces. The chain pastes their texts into a message, and the gateway recognises them there. The message
goes on after them, because many chat templates remove white space at the end of a message.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI

from kintsugi import Client
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.sdk.langchain import KintsugiTextSplitter

DIMENSIONS = 512
CHUNKS = 6
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "{context}\n\nAnswer from the passages above."), ("human", "{input}")]
)


class WordCounts(Embeddings):
    """Hashed word counts in place of an embedding model."""

    def embed_query(self, text: str) -> list[float]:
        counts = [0.0] * DIMENSIONS
        for word in text.split():
            counts[zlib.crc32(word.encode()) % DIMENSIONS] += 1.0
        return counts

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


def served(url: str, namespace: str) -> tuple[str, ChunkSpace]:
    """Return the name of the served model, and the chunk space of a namespace."""
    (model,) = httpx.get(f"{url}/models").raise_for_status().json()["data"]
    ours = model["kintsugi"]
    fingerprint = ModelFingerprint(bytes.fromhex(ours["fingerprint"]))
    prefix, context = (tuple(ours[name]) for name in ("prefix_token_ids", "context_token_ids"))
    return model["id"], ChunkSpace(fingerprint, namespace, prefix, ours["portable"], context)


def build_chain(
    url: str,
    grpc: str,
    namespace: str,
    model_folder: str | Path,
    documents: Sequence[str],
    tokens_max: int = 512,
    max_tokens: int = 64,
) -> Any:
    """Index the documents, store their chunks, and return a chain that answers `{"input": question}`."""
    model, space = served(url, namespace)
    chunker = Chunker.of_model(model_folder, ChunkingConfig(tokens_max))
    splitter = KintsugiTextSplitter(chunker, space)
    pieces = splitter.split_documents([Document(page_content=text) for text in documents])
    with Client(grpc, namespace) as client:
        client.put_chunks([piece.page_content for piece in pieces])
    retriever = InMemoryVectorStore.from_documents(pieces, WordCounts()).as_retriever(
        search_kwargs={"k": CHUNKS}
    )
    llm = ChatOpenAI(
        base_url=url,
        api_key="none",
        model=model,
        temperature=0,
        max_tokens=max_tokens,
        default_headers={"X-Kintsugi-Namespace": namespace},
    )
    return create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))


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
    chain = build_chain(arguments.url, arguments.grpc, arguments.namespace, arguments.model, texts)
    result = chain.invoke({"input": arguments.question})
    print(result["answer"])
    for document in result["context"]:
        print(f"- {document.page_content[:80]}")


if __name__ == "__main__":
    main()
