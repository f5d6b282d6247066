"""Which chunks are saved together."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.engine.protocol import JobTokens, SaveJob
from kintsugi.engine.worker.save_batches import num_saves_together, second_items

SPACE = ChunkSpace(ModelFingerprint.of({"model": "toy"}), "acme")


def save(
    num_tokens: int, other_lead: tuple[int, ...] | None = None, num_cached: int = 0, is_audit: bool = False
) -> SaveJob:
    """A save of `num_tokens` behind a prefix, of which `num_cached` tokens are in vLLM's cache."""
    token_ids = list(range(num_tokens))
    tokens = JobTokens("save", token_ids, num_cached, ())
    key = ChunkKey.of(SPACE, token_ids)
    end = num_cached + num_tokens
    return SaveJob(tokens, SPACE, key, None, num_cached, end, "", is_audit, other_lead)


def test_a_batch_is_at_least_one_chunk_and_at_most_one_unit() -> None:
    assert num_saves_together([save(600)], 512) == 1
    assert num_saves_together([save(600), save(10)], 512) == 1
    assert num_saves_together([save(256), save(256), save(1)], 512) == 2
    assert num_saves_together([save(10), save(10)], 512) == 2


def test_saves_and_audits_go_apart() -> None:
    assert num_saves_together([save(10), save(10, is_audit=True)], 512) == 1
    assert num_saves_together([save(10, is_audit=True), save(10, is_audit=True), save(10)], 512) == 2


def test_the_second_prefill_of_a_batch_is_at_most_one_unit_too() -> None:
    """The first prefill finds all of a long prefix cached, the second nothing."""
    prefix = tuple(range(200))
    job = save(50, (*prefix, 1, 2), num_cached=len(prefix))
    assert job.prefill_tokens == 252
    assert num_saves_together([job] * 4, 512) == 2
    assert num_saves_together([save(50, num_cached=len(prefix))] * 4, 512) == 4


def test_the_second_prefill_stays_within_what_the_model_attends_to() -> None:
    """Behind the border of a local chunk, the chunk's tokens would see less than in the first prefill, and
    the prior would measure that."""
    jobs = [save(50, tuple(range(100, 180))), save(50), save(50, (7, 8))]
    items = second_items(jobs, 64)
    assert sorted(items) == [0, 2]
    cut, whole = items[0], items[2]
    assert (len(cut.token_ids), cut.chunk_start, cut.chunk_end) == (64, 14, 64)
    assert cut.token_ids.tolist() == [*range(100, 114), *range(50)]
    assert whole.token_ids.tolist() == [7, 8, *range(50)]
    assert second_items(jobs[:1], 50)[0].token_ids.tolist() == list(range(50))
