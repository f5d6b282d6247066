"""Which chunks are saved together."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.engine.protocol import JobTokens, SaveJob
from kintsugi.engine.worker.saves import num_saves_together

SPACE = ChunkSpace(ModelFingerprint.of({"model": "toy"}), "acme")


def save(num_tokens: int, is_audit: bool = False) -> SaveJob:
    token_ids = list(range(num_tokens))
    tokens = JobTokens("save", token_ids, 0, ())
    return SaveJob(tokens, SPACE, ChunkKey.of(SPACE, token_ids), (), 0, num_tokens, is_audit)


def test_a_batch_is_at_least_one_chunk_and_at_most_one_unit() -> None:
    assert num_saves_together([save(600)], 512) == 1
    assert num_saves_together([save(600), save(10)], 512) == 1
    assert num_saves_together([save(256), save(256), save(1)], 512) == 2
    assert num_saves_together([save(10), save(10)], 512) == 2


def test_saves_and_audits_go_apart() -> None:
    assert num_saves_together([save(10), save(10, is_audit=True)], 512) == 1
    assert num_saves_together([save(10, is_audit=True), save(10, is_audit=True), save(10)], 512) == 2
