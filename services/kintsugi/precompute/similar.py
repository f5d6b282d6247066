"""Finds the chunks of a corpus that are most similar to one, by BM25 over token ids (SQLite's FTS5).

Precompute jobs prefill chunks after similar ones, because a retriever puts similar chunks into one prompt
(docs/adr/0010).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from kintsugi.core.spaces import ChunkKey, token_bytes
from kintsugi.precompute.ledger_chunks import PendingChunk, pack_tokens

TERMS_MAX = 64
"""Number of a chunk's rarest distinct tokens that are searched for. The other tokens hardly change the order,
and take most of the time."""
CANDIDATES = 32
"""Number of matches that are examined beyond the requested number, because copies are left out."""
RUN_TOKENS = 10
OVERLAP_MAX = 0.1
"""Highest share of a chunk's runs of `RUN_TOKENS` tokens that a similar one may hold: a chunk after its own
copy is prepared worse than after other text."""

CONTEXT_CHUNKS = 2
"""Number of chunks in a context. In measurements, more gained nothing, and a single one gained less."""
GROUP_CHUNKS = 8
"""Maximum number of chunks that share a context, which is computed once for all of them: a context for each
chunk would take three times the compute of the chunks."""

_SCHEMA = """
CREATE VIRTUAL TABLE chunk USING fts5(tokens);
CREATE VIRTUAL TABLE term USING fts5vocab(chunk, 'row');
CREATE TABLE missing (number INTEGER PRIMARY KEY, key BLOB NOT NULL);
"""


class SimilarChunks:
    """An index of chunks by their numbers. A context manager, for one thread."""

    def __init__(self, path: Path | None = None) -> None:
        """Create the index in a file that does not exist yet, or in memory."""
        self._database = sqlite3.connect(path or ":memory:", isolation_level=None)
        self._database.executescript(_SCHEMA)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, chunks: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Index chunks, each a number and its token ids."""
        rows = ((number, " ".join(map(str, tokens))) for number, tokens in chunks)
        self._database.execute("BEGIN")
        self._database.executemany("INSERT INTO chunk (rowid, tokens) VALUES (?, ?)", rows)
        self._database.execute("COMMIT")

    def most_similar(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the numbers of the `count` most similar chunks, the best first, without chunks that repeat
        these tokens or a better match; fewer if there are no more."""
        found = self._database.execute(
            "SELECT rowid, tokens FROM chunk WHERE chunk MATCH ? ORDER BY rank LIMIT ?",
            (" OR ".join(self._rarest(token_ids)), count + CANDIDATES),
        )
        known, similar = runs_of(token_ids), list[int]()
        for number, text in found:
            runs = runs_of([int(token) for token in text.split()])
            if len(similar) < count and not is_copy(runs, known):
                known |= runs
                similar.append(number)
        return similar

    def add_missing(self, chunks: Iterable[tuple[int, ChunkKey]]) -> None:
        """Note chunks, each an indexed number and a key, that `take_groups` returns."""
        rows = ((number, key.digest) for number, key in chunks)
        self._database.executemany("INSERT INTO missing VALUES (?, ?)", rows)

    def take_groups(self) -> Iterator[list[PendingChunk]]:
        """Yield the noted chunks in groups that share a context: the chunks that are most similar to the
        group's first one, the most similar last. Chunks that resemble no other have none."""
        query = "SELECT number, key FROM missing ORDER BY number LIMIT 1"
        while (first := self._database.execute(query).fetchone()) is not None:
            tokens = self._tokens(first[0])
            near = self.most_similar(tokens, CONTEXT_CHUNKS + GROUP_CHUNKS - 1)
            context = tuple(map(_pack, map(self._tokens, reversed(near[:CONTEXT_CHUNKS]))))
            group = [first]
            for number in near[CONTEXT_CHUNKS:]:
                group += self._database.execute("SELECT number, key FROM missing WHERE number=?", (number,))
            self._database.executemany("DELETE FROM missing WHERE number=?", [row[:1] for row in group])
            members = ((key, self._tokens(number)) for number, key in group)
            yield [PendingChunk(ChunkKey(key), _pack(ids), len(ids), context) for key, ids in members]

    def _tokens(self, number: int) -> list[int]:
        (text,) = self._database.execute("SELECT tokens FROM chunk WHERE rowid=?", (number,)).fetchone()
        return [int(token) for token in text.split()]

    def _rarest(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens that the fewest other chunks have, without those that only this chunk has."""
        counts = {
            str(token): self._database.execute("SELECT doc FROM term WHERE term=?", (str(token),)).fetchone()
            for token in set(token_ids)
        }
        shared = sorted((row[0], token) for token, row in counts.items() if row is not None and row[0] > 1)
        return [token for _, token in shared[:TERMS_MAX]] or ["none"]


def _pack(token_ids: Sequence[int]) -> bytes:
    return pack_tokens(token_bytes(token_ids))


def runs_of(token_ids: Sequence[int]) -> set[tuple[int, ...]]:
    """Return all runs of `RUN_TOKENS` tokens."""
    return {tuple(token_ids[at : at + RUN_TOKENS]) for at in range(len(token_ids) - RUN_TOKENS + 1)}


def is_copy(runs: set[tuple[int, ...]], known: set[tuple[int, ...]]) -> bool:
    """Return whether a chunk with these runs repeats the known ones."""
    return len(runs & known) > OVERLAP_MAX * len(runs)
