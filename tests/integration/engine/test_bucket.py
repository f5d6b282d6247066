"""Answers of an engine whose chunks lie in a bucket alone: one that works, forgets, lies or hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kintsugi.engine.local import Generation, LocalEngine
from kintsugi.store.shard.opening import open_shard
from kintsugi.store.shard.shard import Shard
from tests.fakes.s3_server import S3Server
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask_cold,
    chunks_of,
    max_dlogprob,
    rag,
)
from tests.integration.store.test_bucket import DEADLINE_S, demote, reach_bucket, serve, spec
from tests.waiting import wait_until

pytest.importorskip("obstore", reason="needs the extra s3: make setup")
pytestmark = pytest.mark.engine("tiny-llama-bucket")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        reach_bucket(patch, server, DEADLINE_S)
        yield server
        server.resume()


@pytest.fixture(scope="module")
def shard(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    with closing(open_shard(spec(tmp_path_factory.mktemp("shard")))) as shard:
        yield shard


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, shard: Shard) -> Iterator[LocalEngine]:
    with serve(shard) as server:
        yield engine_slot.get("tiny-llama", {"store": f"grpc://{server.address}"})
        engine_slot.close()


@pytest.fixture
def prompt(engine: LocalEngine, shard: Shard, s3: S3Server, request: pytest.FixtureRequest) -> Rag:
    """Its chunks, three that no other test has, are in the bucket and nowhere else."""
    chunks = chunks_of(100, 257, 64, seed=sum(request.node.name.encode()))
    engine.save(PREFIX, chunks, NAMESPACE)
    demote(shard)
    return rag(*chunks)


def told(answer: Generation) -> dict[str, Any]:
    assert answer.accounting is not None
    return answer.accounting


def check_answer(engine: LocalEngine, prompt: Rag) -> dict[str, Any]:
    """Ask, and compare with a full prefill. Returns the accounting, which names nothing of the bucket."""
    answer = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert max_dlogprob(ask_cold(engine, prompt.token_ids), answer) <= 0.01
    assert "s3:" not in str(told(answer))
    assert "http" not in str(told(answer))
    return told(answer)


def test_chunks_are_blended_from_the_bucket(engine: LocalEngine, prompt: Rag, shard: Shard) -> None:
    accounting = check_answer(engine, prompt)
    assert (accounting["outcome"], accounting["chunks_hit"]) == ("blended", 3)
    assert shard.bucket is not None
    assert shard.bucket.is_in_reach


def test_what_the_bucket_has_forgotten_is_computed(engine: LocalEngine, prompt: Rag, s3: S3Server) -> None:
    s3.forget()
    assert check_answer(engine, prompt)["outcome"] in ("blended", "failed")
    accounting = check_answer(engine, prompt)
    assert accounting["reason"].startswith("no_chunk_cached"), "nobody plans with them again"
    engine.save(PREFIX, [tokens for _, tokens in prompt.pieces], NAMESPACE)
    assert check_answer(engine, prompt)["chunks_hit"] == 3


@pytest.mark.parametrize("lie", ["other", "cut"])
def test_what_the_bucket_has_changed_is_computed(
    engine: LocalEngine, prompt: Rag, s3: S3Server, lie: str
) -> None:
    for name in s3.names():
        body = s3.read(name)
        s3.replace(name, bytes(len(body)) if lie == "other" else body[: len(body) // 2])
    assert check_answer(engine, prompt)["outcome"] in ("blended", "failed")
    assert check_answer(engine, prompt)["reason"].startswith("no_chunk_cached")


def test_answers_go_on_while_the_bucket_hangs(
    engine: LocalEngine, prompt: Rag, shard: Shard, s3: S3Server
) -> None:
    near = rag(*chunks_of(100, 257, 64, seed=7))
    engine.save(PREFIX, [tokens for _, tokens in near.pieces], NAMESPACE)
    bucket = shard.bucket
    assert bucket is not None
    s3.hang()
    while bucket.is_in_reach:
        assert "bucket: it cannot be read" in check_answer(engine, prompt)["reason"]
    assert check_answer(engine, prompt)["outcome"] == "declined", "nobody waits for it any more"
    assert check_answer(engine, near)["chunks_hit"] == 3, "what is in RAM needs no bucket"
    s3.resume()
    wait_until(lambda: bucket.is_in_reach, "the bucket is not asked again", within_s=20.0)
    assert check_answer(engine, prompt)["chunks_hit"] == 3, "nothing was forgotten"
