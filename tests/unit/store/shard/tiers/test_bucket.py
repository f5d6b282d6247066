"""What a bucket is called, what its objects are called, and what is said of its failures."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkSpace
from kintsugi.store.protocol.breaker import FAILURES_MAX
from kintsugi.store.shard.opening import BucketSpec, ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.tiers.bucket import BucketError, BucketUrl, S3Bucket, object_name, reason_of
from tests.contracts.store_contract import FINGERPRINT, make_chunk, make_encrypted_chunk

DENIED = (
    "Generic S3 error: Error performing PUT http://s3/chunks/a in 1ms - Server returned non-2xx status code: "
    '403 Forbidden: <?xml version="1.0"?>\n<Error><Code>SignatureDoesNotMatch</Code>'
    "<AWSAccessKeyId>AKIAHUSH</AWSAccessKeyId><SignatureProvided>hush</SignatureProvided></Error>\n"
    "Debug source: hush"
)


def test_an_url_names_bucket_and_prefix() -> None:
    assert BucketUrl.from_text("s3://chunks") == BucketUrl("chunks")
    assert BucketUrl.from_text("s3://chunks/a/b-1") == BucketUrl("chunks", "a/b-1")
    assert str(BucketUrl("chunks", "a")) == "s3://chunks/a"
    assert str(BucketUrl("chunks")) == "s3://chunks"


@pytest.mark.parametrize(
    "text",
    ["", "chunks", "s3://", "s3://A", "s3://a b/c", "s3://chunks//a", "s3://chunks/../a", "http://chunks/a"],
)
def test_a_malformed_url_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match=r"is not s3://BUCKET"):
        BucketUrl.from_text(text)


def test_a_specification_names_a_size() -> None:
    assert BucketSpec.from_text("s3://chunks/a:1TiB") == BucketSpec(BucketUrl("chunks", "a"), 1 << 40)
    for text in ("s3://chunks/a", "chunks:1GiB"):
        with pytest.raises(InvalidField, match="must name a bucket and a size"):
            BucketSpec.from_text(text)
    with pytest.raises(InvalidField, match="less than one block of 4096 bytes"):
        BucketSpec.from_text("s3://chunks/a:0")


def test_a_bucket_needs_a_disk(tmp_path: Path) -> None:
    spec = ShardSpec(1 << 20, tmp_path, bucket=BucketSpec(BucketUrl("chunks"), 1 << 20))
    with pytest.raises(InvalidField, match="pass --ssd"):
        open_shard(spec)


def test_without_obstore_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    spec = ShardSpec(
        1 << 20,
        tmp_path / "data",
        (SsdSpec(tmp_path / "disk", 1 << 20),),
        bucket=BucketSpec(BucketUrl("chunks"), 1 << 20),
    )
    with pytest.raises(InvalidField, match=r"pip install 'kintsugi-kv\[s3\]'"):
        open_shard(spec)
    open_shard(dataclasses.replace(spec, bucket=None)).close()


def test_each_content_has_a_name_that_tells_nothing() -> None:
    plain, encrypted = make_chunk(range(8))[0], make_encrypted_chunk(range(8))[0]
    elsewhere = make_chunk(range(8), ChunkSpace(FINGERPRINT, "other"))[0]
    other = dataclasses.replace(plain, digests=bytes(len(plain.digests)))
    resealed = dataclasses.replace(encrypted, salt=bytes(16))
    names = {object_name(one) for one in (plain, encrypted, elsewhere, other, resealed)}
    assert len(names) == 5
    assert object_name(plain) == object_name(make_chunk(range(8))[0])
    assert all(len(name) == 64 and plain.key.hex not in name for name in names)


def test_a_reason_is_one_line_without_the_answers_body() -> None:
    reason = reason_of(OSError(DENIED))
    assert "403 Forbidden (SignatureDoesNotMatch)" in reason
    assert "hush" not in reason.lower()
    assert "\n" not in reason


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("endpoint", ["no url", "ftp://s3", "http://", "http://s3 x"])
def test_an_endpoint_that_is_none_is_refused(
    name: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="needs the extra s3: make setup")
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(InvalidField, match="AWS_ENDPOINT_URL: is not a URL"):
        S3Bucket(BucketUrl("chunks"), "shard")


def test_a_defect_of_the_client_is_a_failure_of_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="needs the extra s3: make setup")

    class PanicException(BaseException):
        """As PyO3 raises it."""

    def panic(*_: object, **__: object) -> None:
        raise PanicException("called `unwrap()`")

    bucket = S3Bucket(BucketUrl("chunks"), "shard")
    monkeypatch.setattr("obstore.put", panic)
    for _ in range(FAILURES_MAX):
        assert bucket.is_in_reach
        with pytest.raises(BucketError, match="the client failed"):
            bucket.put("name", memoryview(b"body"))
    assert not bucket.is_in_reach
