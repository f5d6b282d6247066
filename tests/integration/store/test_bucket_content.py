"""Chunks that are found by what a prompt says, where only a bucket has them."""

from __future__ import annotations

import pytest

from kintsugi.engine.scheduler.matching import hits_of, match_content
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.shard.shard import Shard
from tests.contracts.store_contract import SPACE
from tests.fakes.s3_server import S3Server
from tests.integration.store import test_bucket
from tests.integration.store.test_bucket import HANGS, A, B, demote, put

pytest.importorskip("obstore", reason="needs the extra s3: make setup")

started, deadline_s, s3, shard, store = (
    test_bucket.started,
    test_bucket.deadline_s,
    test_bucket.s3,
    test_bucket.shard,
    test_bucket.store,
)


@HANGS
def test_content_is_found_where_it_can_be_read_from_and_nowhere_else(
    shard: Shard, store: GrpcStore, s3: S3Server
) -> None:
    far, near = list(range(400)), list(range(1000, 1400))
    put(shard, A)
    demote(shard)
    put(shard, B)
    prompt = [9, *far, 9, *near, 9]
    match = match_content(store, SPACE, prompt)
    hits = hits_of(match, len(prompt), 1)
    assert [(hit.start, hit.source.tier) for hit in hits] == [(1, "bucket"), (402, "ram")]
    assert shard.bucket is not None
    shard.bucket.give_up("as if it had failed")
    s3.hang()
    assert [span.start for span in match_content(store, SPACE, prompt).spans] == [402]
    s3.resume()
