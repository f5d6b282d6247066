"""A small RAG application: a local vector database, and chunks on their way to RAM before the prompt exists.

    kintsugi serve --model FOLDER
    python examples/rag_app.py --model FOLDER --question "…" document.txt another.txt

Documents are cut into chunks and stored once. For each question, sqlite-vec finds the nearest chunks, and
`prefetch` reports them to the gateway at once: the store loads them into RAM while the application writes its
prompt.
"""

from __future__ import annotations

import argparse
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import apsw
import sqlite_vec

from kintsugi import Client, Plain
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.sdk.types import Answer

DIMENSIONS = 512
SCHEMA = f"""
create table if not exists chunks (id integer primary key, document text, text text);
create virtual table if not exists vectors using vec0(vector float[{DIMENSIONS}] distance_metric=cosine);
"""
INSERT_CHUNK = "insert into chunks (document, text) values (?, ?)"
INSERT_VECTOR = "insert into vectors (rowid, vector) values (?, ?)"
NEAREST = """
select chunks.document, chunks.text from vectors join chunks on chunks.id = vectors.rowid
where vectors.vector match ? and k = ? order by vectors.distance
"""


@dataclass(frozen=True)
class Passage:
    """A retrieved chunk."""

    document: str
    text: str


class RagApp:
    """A RAG application. Use it in a `with` statement, or call `close`."""

    def __init__(self, client: Client, chunker: Chunker, database: str | Path = ":memory:") -> None:
        self._client = client
        self._chunker = chunker
        # Python's own sqlite3 is often built without support for extensions. apsw contains its own SQLite.
        self._database = apsw.Connection(str(database))
        self._database.enable_load_extension(True)
        self._database.load_extension(sqlite_vec.loadable_path())
        self._database.enable_load_extension(False)
        self._database.execute(SCHEMA)

    def add(self, name: str, text: str) -> int:
        """Index a document and store its chunks. Returns the number of chunks."""
        pieces = [chunk.text for chunk in self._chunker.chunks(text)]
        with self._database:
            for piece in pieces:
                self._database.execute(INSERT_CHUNK, (name, piece))
                row = self._database.last_insert_rowid()
                self._database.execute(INSERT_VECTOR, (row, embedded(piece)))
        self._client.put_chunks(pieces)
        return len(pieces)

    def retrieve(self, question: str, count: int) -> list[Passage]:
        """Return the nearest chunks, and prefetch them."""
        rows = self._database.execute(NEAREST, (embedded(question), count))
        passages = [Passage(document, text) for document, text in rows]
        self._client.prefetch([passage.text for passage in passages])
        return passages

    def ask(
        self, question: str, instructions: str = "", chunks: int = 6, max_tokens: int = 64
    ) -> tuple[Answer, list[Passage]]:
        """Return the answer and the retrieved chunks."""
        passages = self.retrieve(question, chunks)
        segments: list[str | Plain] = [Plain(instructions)] if instructions else []
        for passage in passages:
            # Segments are joined as they are. A piece keeps its line end, but it may be cut inside a line.
            segments += [passage.text] if passage.text.endswith("\n") else [passage.text, Plain("\n")]
        ending = f"\nQuestion: {question}\nAnswer:"
        return self._client.generate(segments, ending, max_tokens=max_tokens), passages

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> RagApp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def embedded(text: str) -> bytes:
    """Return hashed word counts, in place of an embedding model's vector."""
    counts = array("f", [0.0] * DIMENSIONS)
    for word in text.lower().split():
        counts[zlib.crc32(word.strip(".,:?").encode()) % DIMENSIONS] += 1.0
    return counts.tobytes()


def answered(
    grpc: str, namespace: str, model_folder: str | Path, documents: Sequence[tuple[str, str]], question: str
) -> tuple[Answer, list[Passage]]:
    """Answer one question about documents, with a new database."""
    chunker = Chunker.of_model(model_folder, ChunkingConfig())
    with Client(grpc, namespace) as client, RagApp(client, chunker) as app:
        for name, text in documents:
            app.add(name, text)
        return app.ask(question)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="text files")
    parser.add_argument("--model", required=True, help="folder of the model that is served")
    parser.add_argument("--question", required=True)
    parser.add_argument("--grpc", default="127.0.0.1:7500")
    parser.add_argument("--namespace", default="examples")
    arguments = parser.parse_args()
    documents = [(path.name, path.read_text(encoding="utf-8")) for path in arguments.files]
    answer, passages = answered(
        arguments.grpc, arguments.namespace, arguments.model, documents, arguments.question
    )
    print(answer.text)
    print(f"{answer.outcome}: {answer.usage.cached_tokens} of {answer.usage.prompt_tokens} tokens from cache")
    for passage in passages:
        print(f"- {passage.document}: {passage.text[:80]}")


if __name__ == "__main__":
    main()
