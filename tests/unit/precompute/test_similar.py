"""The most similar chunks of a corpus."""

from __future__ import annotations

from pathlib import Path

from kintsugi.precompute.similar import SimilarChunks

TIDES = list(range(100, 160))
MOON = [*range(100, 120), *range(300, 340)]
"""Shares a third of the tokens of `TIDES`, in runs that are too long to be chance but too few for a copy."""
BREAD = list(range(500, 560))


def scattered(tokens: list[int]) -> list[int]:
    """The tokens without any run of the original order."""
    return tokens[::2] + tokens[1::2]


def test_the_most_similar_comes_first_and_strangers_do_not_come() -> None:
    with SimilarChunks() as index:
        index.add([(1, TIDES), (2, scattered(MOON)), (3, BREAD), (4, scattered(TIDES[:40]))])
        assert index.most_similar(TIDES, 2) == [4, 2]
        assert index.most_similar(BREAD, 2) == []


def test_copies_are_left_out_of_the_chunk_and_of_each_other() -> None:
    near = scattered(TIDES[:40])
    with SimilarChunks() as index:
        index.add([(1, TIDES), (2, [*TIDES[5:], 9]), (3, near), (4, [8, *near])])
        assert index.most_similar(TIDES, 3) == [3]


def test_an_index_in_a_file_gives_the_same(tmp_path: Path) -> None:
    with SimilarChunks(tmp_path / "similar.sqlite") as index:
        index.add([(1, TIDES), (2, scattered(MOON))])
        assert index.most_similar(TIDES, 2) == [2]


def test_a_chunk_without_known_tokens_has_no_similar_one() -> None:
    with SimilarChunks() as index:
        index.add([(1, TIDES)])
        assert index.most_similar([7, 8, 9], 2) == []
