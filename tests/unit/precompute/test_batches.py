"""Which chunks go together, and what is done with those that came back."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.core.spaces import ChunkKey, token_bytes
from kintsugi.precompute.batches import DEATHS_MAX, Batches, ChunkBatch
from kintsugi.precompute.ledger_chunks import PendingChunk, pack_tokens
from kintsugi.precompute.worker import FILLED, PRESENT


def chunk(number: int, size: int = 10) -> PendingChunk:
    return PendingChunk(ChunkKey(number.to_bytes(32, "big")), pack_tokens(token_bytes([number] * size)), size)


@pytest.mark.parametrize(
    ("outcome", "field"),
    [
        (FILLED, "filled"),
        (PRESENT, "present"),
        ("Unavailable: shard: gone", "retried"),
        ("DeadlineExceeded: late", "retried"),
        ("ResourceExhausted: quota", "full"),
        ("ForeignChunkKey: spans[0].key: x", "foreign"),
        ("lora: chunk KV belongs to the base model", "failed"),
        ("", "failed"),
    ],
)
def test_an_outcome_is_judged_by_its_first_word(outcome: str, field: str) -> None:
    settled = Batches(100).settle_batch(ChunkBatch([chunk(1)]), [outcome])
    is_retried = field in ("retried", "full", "foreign")
    assert {name for name, value in vars(settled).items() if value} == {field, *["retried"] * is_retried}


def test_batches_fill_up_to_their_tokens_and_flush_the_rest() -> None:
    batches = Batches(25)
    batches.add([chunk(1), chunk(2)])
    assert batches.take(flush=False) is None
    batches.add([chunk(3), chunk(4, 100)])
    first, second, third = (batches.take(flush=True) for _ in range(3))
    assert first == ChunkBatch([chunk(1), chunk(2)])
    assert second == ChunkBatch([chunk(3)])
    assert third == ChunkBatch([chunk(4, 100)])  # larger than a batch: alone
    assert batches.take(flush=True) is None
    assert batches.num_tokens == 0


def test_what_the_store_did_not_take_waits_again() -> None:
    batches = Batches(100)
    batch = ChunkBatch([chunk(n) for n in range(6)])
    outcomes = [FILLED, PRESENT, "Unavailable: x", "odd", "ResourceExhausted: y", "ForeignChunkKey: z"]
    settled = batches.settle_batch(batch, outcomes)
    assert settled.filled == [chunk(0)]
    assert settled.present == [chunk(1)]
    assert settled.failed == [(chunk(3), "odd")]
    assert (settled.full[:3], settled.foreign[:3], settled.retried) == ("Res", "For", 3)
    assert batches.take(flush=False) == ChunkBatch([chunk(2), chunk(4), chunk(5)])


@pytest.mark.parametrize("seed", range(20))
def test_a_deadly_chunk_is_found_and_costs_only_itself(seed: int) -> None:
    chance = random.Random(seed)
    count, deadly = chance.randrange(1, 40), chance.randrange(40)
    batches = Batches(chance.choice((10, 55, 1000)))
    batches.add([chunk(n) for n in range(count)])
    filled: list[PendingChunk] = []
    given_up: list[PendingChunk] = []
    deaths = 0
    while (batch := batches.take(flush=True)) is not None:
        if chunk(deadly) in batch.chunks:
            deaths += 1
            given_up += [lost for lost, _ in batches.split_after_death(batch)]
        else:
            filled += batches.settle_batch(batch, [FILLED] * len(batch.chunks)).filled
    assert sorted(c.key for c in [*filled, *given_up]) == [chunk(n).key for n in range(count)]
    assert given_up == ([chunk(deadly)] if deadly < count else [])
    assert deaths <= 7 + DEATHS_MAX
    assert batches.num_tokens == 0
