"""A bucket whose answers do harm: they never end, repeat the request, or keep what is erased."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kintsugi.store.shard.tiers.bucket import BucketError, BucketUrl, ObjectMissing, S3Bucket, VersionsKept

pytest.importorskip("obstore", reason="needs the extra s3: make setup")

Answer = Callable[[str, bytes], bytes]
"""An answer to a request's head and body."""
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAHUSH",
    "AWS_SECRET_ACCESS_KEY": "hush-secret",
    "AWS_SESSION_TOKEN": "hush-token",
}
DEADLINE_S = 0.5


class Hostile:
    """A server on a port of its own. Closed by `close`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._streams: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    def close(self) -> None:
        for one in (self._listener, *self._streams):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                self._streams.append(stream)
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        with suppress(OSError), stream.makefile("rb") as requests:
            while head := "".join(iter(lambda: requests.readline().decode().strip("\r\n") + "\n", "\n")):
                found = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                body = requests.read(int(found[1])) if found else b""
                stream.sendall(self.answer(head, body))


def reply(status: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def listing(*names: str, more: bool) -> bytes:
    found = "".join(
        f"<Contents><Key>{name}</Key><LastModified>2020-01-01T00:00:00Z</LastModified><Size>1</Size></Contents>"
        for name in names
    )
    more_of_it = (
        "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>" if more else ""
    )
    return reply("200 OK", f"<ListBucketResult>{found}{more_of_it}</ListBucketResult>".encode())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    server = Hostile(lambda head, body: reply("500 Internal Server Error"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def bucket(server: Hostile) -> S3Bucket:
    return S3Bucket(BucketUrl("chunks"), "shard", read_s_max=DEADLINE_S, write_s_max=DEADLINE_S)


def read(bucket: S3Bucket) -> None:
    bucket.read_into("name", 0, [memoryview(bytearray(10))])


@pytest.mark.parametrize("separator", [" | ", "\x1b[31m"])
def test_an_answer_that_repeats_the_request_shows_no_credentials(
    server: Hostile, bucket: S3Bucket, separator: str
) -> None:
    server.answer = lambda head, body: reply(
        "403 Forbidden", f"got {head.replace(chr(10), separator)}".encode()
    )
    for call in (lambda: read(bucket), lambda: bucket.put("name", memoryview(b"body"))):
        with pytest.raises(BucketError, match=r"403 Forbidden$") as refused:
            call()
        assert str(refused.value).isprintable()


def test_a_message_of_a_deletion_shows_no_credentials(server: Hostile, bucket: S3Bucket) -> None:
    server.answer = lambda head, body: reply(
        "200 OK",
        b"<DeleteResult><Error><Key>shard/name</Key><Code>hush-token</Code>"
        b"<Message>hush-secret</Message></Error></DeleteResult>",
    )
    with pytest.raises(BucketError, match=r"request failed for key shard/name$"):
        bucket.delete(["name"])


def test_a_header_that_repeats_a_credential_does_not_show_it(server: Hostile, bucket: S3Bucket) -> None:
    server.answer = lambda head, body: reply(
        "206 Partial", bytes(10), ETag="a", Last_Modified="hush-token", Content_Range="bytes 0-9/10"
    )
    with pytest.raises(BucketError, match=r"Invalid last modified '\.\.\.'"):
        read(bucket)


def test_a_bucket_that_is_deleted_is_a_failure_in_one_line(server: Hostile, bucket: S3Bucket) -> None:
    server.answer = lambda head, body: reply("404 Not Found", b"<Error><Code>NoSuchBucket</Code></Error>")
    for call in (lambda: bucket.delete(["name"]), lambda: [*bucket.list_names()], lambda: read(bucket)):
        with pytest.raises(BucketError, match=r"404 Not Found \(NoSuchBucket\)$"):
            call()
    assert not bucket.is_in_reach


def test_a_listing_without_end_ends(server: Hostile, bucket: S3Bucket) -> None:
    server.answer = lambda head, body: listing(more=True)
    began_s = time.monotonic()
    with pytest.raises(BucketError, match=r"no page of a listing within 0\.5 s"):
        list(bucket.list_names())
    assert time.monotonic() - began_s < 20 * DEADLINE_S


def test_a_bucket_is_not_called_once_it_is_closed(server: Hostile, bucket: S3Bucket) -> None:
    server.answer = lambda head, body: listing(*["shard/name"] * 1000, more=True)
    names = bucket.list_names()
    assert next(names) == "name"
    bucket.close()
    with pytest.raises(BucketError, match="the shard is ending"):
        list(names)


def test_only_a_probe_closes_the_circuit(server: Hostile, bucket: S3Bucket) -> None:
    now_s = [0.0]
    bucket = S3Bucket(BucketUrl("chunks"), "shard", DEADLINE_S, DEADLINE_S, clock=lambda: now_s[0])
    server.answer = lambda head, body: reply("404 Not Found")
    bucket.leave_alone()
    now_s[0] += 3600.0
    with pytest.raises(BucketError, match="gets no calls for a while"):
        read(bucket)
    assert not bucket.is_in_reach
    with pytest.raises(BucketError):
        bucket.probe()


def test_a_call_that_ends_late_does_not_close_the_circuit(server: Hostile, bucket: S3Bucket) -> None:
    def answer(head: str, body: bytes) -> bytes:
        bucket.leave_alone()
        return reply("404 Not Found")

    server.answer = answer
    with pytest.raises(ObjectMissing):
        read(bucket)
    assert not bucket.is_in_reach


def test_a_bucket_that_keeps_versions_gets_no_more_calls(server: Hostile, bucket: S3Bucket) -> None:
    server.answer = lambda head, body: reply("200 OK", ETag='"a"', x_amz_version_id="v1")
    with pytest.raises(VersionsKept, match="keeps versions of deleted objects"):
        bucket.put("name", memoryview(b"body"))
    assert not bucket.is_in_reach


def test_a_probe_of_a_bucket_that_keeps_versions_stores_little(server: Hostile, bucket: S3Bucket) -> None:
    stored: list[int] = []

    def answer(head: str, body: bytes) -> bytes:
        stored.append(len(body))
        return reply("200 OK", ETag='"a"', x_amz_version_id="v1")

    server.answer = answer
    with pytest.raises(VersionsKept):
        bucket.probe()
    assert sum(stored) < 1024
