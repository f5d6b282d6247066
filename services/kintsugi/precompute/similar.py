"""Finds the chunks of a corpus that are most similar to one, by BM25 over token ids (SQLite's FTS5)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

TERMS_MAX = 64
"""Rarest distinct tokens of a chunk that are searched for. The others hardly change the order, and take most
of the time."""
CANDIDATES = 8
"""Matches that are examined beyond the number asked for, because copies are left out."""
RUN_TOKENS = 10
OVERLAP_MAX = 0.1
"""Highest share of a chunk's runs of `RUN_TOKENS` tokens that a similar one may hold: a chunk after its own
copy is prepared worse than after other text."""

_SCHEMA = """
CREATE VIRTUAL TABLE chunk USING fts5(tokens);
CREATE VIRTUAL TABLE term USING fts5vocab(chunk, 'row');
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
        """Return the numbers of the `count` most similar chunks, the best first, without those that repeat
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

    def _rarest(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens that the fewest chunks have, apart from this one alone."""
        counts = {
            str(token): self._database.execute("SELECT doc FROM term WHERE term=?", (str(token),)).fetchone()
            for token in set(token_ids)
        }
        shared = sorted((row[0], token) for token, row in counts.items() if row is not None and row[0] > 1)
        return [token for _, token in shared[:TERMS_MAX]] or ["none"]


def runs_of(token_ids: Sequence[int]) -> set[tuple[int, ...]]:
    """Return all runs of `RUN_TOKENS` tokens."""
    return {tuple(token_ids[at : at + RUN_TOKENS]) for at in range(len(token_ids) - RUN_TOKENS + 1)}


def is_copy(runs: set[tuple[int, ...]], known: set[tuple[int, ...]]) -> bool:
    """Return whether a chunk with these runs repeats what is known."""
    return len(runs & known) > OVERLAP_MAX * len(runs)
