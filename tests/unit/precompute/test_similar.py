"""The most similar chunks of a corpus."""

from __future__ import annotations

import random
from pathlib import Path

from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.precompute.ledger_chunks import unpack_tokens
from kintsugi.precompute.similar import CONTEXT_CHUNKS, GROUP_CHUNKS, SimilarChunks

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


SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "acme")


def about_one_topic(count: int) -> list[list[int]]:
    """Chunks that share 40 tokens in another order, and no run of them."""
    chunks = [[*range(100, 140), *range(1_000 + 50 * n, 1_030 + 50 * n)] for n in range(count)]
    for number, chunk in enumerate(chunks):
        random.Random(number).shuffle(chunk)
    return chunks


def test_similar_chunks_share_a_context_and_are_grouped_once() -> None:
    topic = about_one_topic(12)
    chunks = dict(enumerate([*topic, BREAD]))
    keys = {number: ChunkKey.of(SPACE, tokens) for number, tokens in chunks.items()}
    with SimilarChunks() as index:
        index.add(chunks.items())
        index.add_missing(keys.items())
        groups = list(index.take_groups())
    members = [chunk for group in groups for chunk in group]
    assert sorted(chunk.key for chunk in members) == sorted(keys.values())
    assert all(chunk.key == ChunkKey.of(SPACE, chunk.token_ids) for chunk in members)
    first = groups[0]
    assert 1 < len(first) <= GROUP_CHUNKS
    (context,) = {chunk.context for chunk in first}
    texts = [unpack_tokens(passage) for passage in context]
    assert len(texts) == CONTEXT_CHUNKS
    assert all(text in topic for text in texts)
    assert all(chunk.token_ids not in texts for chunk in first)
    alone = next(group for group in groups if group[0].key == keys[12])
    assert [chunk.context for chunk in alone] == [()]


def test_stored_chunks_are_context_but_join_no_group() -> None:
    topic = about_one_topic(4)
    with SimilarChunks() as index:
        index.add(enumerate(topic))
        index.add_missing([(2, ChunkKey.of(SPACE, topic[2]))])
        ((chunk,),) = index.take_groups()
    assert chunk.token_ids == topic[2]
    assert len(chunk.context) == CONTEXT_CHUNKS
