"""The objects of one shard in an S3-compatible bucket: put, read, delete and list, each with a deadline.

The bucket is not trusted. A call that exceeds its deadline fails. After `FAILURES_MAX` failures in a row
(`CircuitBreaker`), no call is made until a probe passes; a bucket that keeps versions never passes. A read
fills the caller's memory and never exceeds it, whatever the bucket sends. The caller verifies the bytes: only
it has the digests.

Objects lie below `PREFIX/SHARD_ID/`, so shards that share a bucket never see each other's. An object's name
is a digest of namespace, chunk key, salt and content: it reveals none of them, and changes with the content.
Endpoint, region and credentials come from the environment variables of the AWS tools (`AWS_ENDPOINT_URL`,
`AWS_REGION`, `AWS_ACCESS_KEY_ID` …) and are never logged.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import blake3

from kintsugi.core.deploy import BUCKET_URL
from kintsugi.core.errors import Corrupted, InvalidField
from kintsugi.core.layout import ChunkManifest
from kintsugi.store.protocol.breaker import CircuitBreaker

CONNECT_S_MAX = 2.0
READ_S_MAX = 5.0
"""Deadline of a read, a deletion and a page of a listing."""
WRITE_S_MAX = 30.0
"""Deadline of an upload: 64 MiB at 2 MiB/s."""
PART_BYTES_MIN = 256 << 10
"""Approximate size of the parts in which a body is copied."""
DELETED_AT_ONCE = 1000
"""Maximum number of objects that S3 deletes in one call."""
PROBE_NAME = "probe"
PROBE_BYTES = 4 << 20
VERSIONS_NAME = "versions"
"""An object whose version shows whether the bucket keeps versions."""
REASON_CHARS_MAX = 400

_URL = re.compile(BUCKET_URL)
_PANIC = "PanicException"
"""Raised by defects of obstore. It is not an `Exception`, and must not end the shard's threads."""
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+(?:/[\x21-\x7e]*)?")
_NO_BUCKET = "<Code>NoSuchBucket</Code>"
_STATUS = re.compile(r"status code: \d{3}[A-Za-z' -]*|request failed for key [^:]*")
"""The text that precedes the bucket's own message in an error."""
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")


class BucketError(OSError):
    """The bucket did not answer in time or refused a call, or the circuit is open."""


class BucketLeftAlone(BucketError):
    """The circuit is open: no call was made."""


class VersionsKept(BucketError):
    """The bucket keeps versions of deleted objects."""


class ObjectMissing(Corrupted):
    """The bucket no longer has an object."""


@dataclass(frozen=True)
class BucketUrl:
    """A bucket and the prefix of all objects in it."""

    bucket: str
    prefix: str = ""
    """Without slashes at either end; may be empty."""

    @staticmethod
    def from_text(text: str) -> BucketUrl:
        """Parse `s3://BUCKET` or `s3://BUCKET/PREFIX`. Raises `InvalidField`."""
        bucket, _, prefix = text.removeprefix("s3://").partition("/")
        if not text or _URL.fullmatch(text) is None or {".", ".."} & set(prefix.split("/")):
            raise InvalidField("bucket", f"{text[:100]!r} is not s3://BUCKET or s3://BUCKET/PREFIX")
        return BucketUrl(bucket, prefix)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def object_name(manifest: ChunkManifest) -> str:
    """Return the name of a chunk's object: 64 hexadecimal digits."""
    parts = (manifest.namespace.encode(), manifest.key.digest, manifest.salt, manifest.digests)
    name = blake3.blake3()
    for part in parts:
        name.update(len(part).to_bytes(8, "little") + part)
    return name.hexdigest()


class S3Bucket:
    """A shard's objects. Thread-safe. Calls block at most until their deadline and raise `BucketError`."""

    def __init__(
        self,
        url: BucketUrl,
        shard_id: str,
        read_s_max: float = READ_S_MAX,
        write_s_max: float = WRITE_S_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes no call. Raises `InvalidField` if obstore is not installed or the environment is invalid."""
        self.url = url
        self.breaker = CircuitBreaker(clock, backs_off=True)
        self._left_alone = False
        self._closed = False
        self._read_s_max = read_s_max
        self._shard_id = shard_id
        self._obstore = _import_obstore()
        self._reading = self._open(read_s_max)
        self._writing = self._open(write_s_max)

    def _open(self, timeout_s: float) -> Any:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        prefix = "/".join(part for part in (self.url.prefix, self._shard_id) if part)
        options = {"endpoint": endpoint} if endpoint else {}
        if endpoint and not _ENDPOINT.fullmatch(endpoint):
            raise InvalidField("AWS_ENDPOINT_URL", "is not a URL, such as https://s3.example.com")
        try:
            return self._obstore.store.S3Store(
                self.url.bucket,
                prefix=prefix,
                client_options={
                    "timeout": timedelta(seconds=timeout_s),
                    "connect_timeout": timedelta(seconds=min(CONNECT_S_MAX, timeout_s)),
                    "allow_http": endpoint.startswith("http://"),
                },
                # The circuit decides about retries; the client's own would hide how long a call takes.
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
                **options,
            )
        except (self._obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise InvalidField("bucket", f"{self.url}: {reason_of(error)}; see the AWS_ variables") from None

    @property
    def is_in_reach(self) -> bool:
        """Whether calls other than probes are made."""
        return self.breaker.is_closed and not self._left_alone

    def leave_alone(self) -> None:
        """Make no calls until a probe passes. The success of running calls does not change that."""
        self._left_alone = True
        self.breaker.trip()

    def close(self) -> None:
        """Reject further calls. Running calls are not interrupted."""
        self._closed = True

    @contextmanager
    def _call(self, is_probe: bool = False) -> Iterator[None]:
        """Guard one call, or a whole probe: raise its failures as `BucketError` and count them for the
        circuit, which only a probe closes."""
        if self._closed:
            raise BucketLeftAlone(f"{self.url} gets no more calls: the shard is ending")
        if not (self.breaker.allows() if is_probe else self.is_in_reach):
            raise BucketLeftAlone(f"{self.url} has failed and gets no calls for a while")
        try:
            yield
        except Corrupted:
            if is_probe:
                self.breaker.record_failure()
            else:
                self.breaker.record_success()  # it answers
            raise
        except VersionsKept:
            self.breaker.record_failure()
            self.leave_alone()
            raise
        except (OSError, self._obstore.exceptions.BaseError) as error:
            self.breaker.record_failure()
            raise BucketError(f"{self.url}: {reason_of(error)}") from None
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                self.breaker.withdraw()
                raise
            self.breaker.record_failure()
            raise BucketError(f"{self.url}: the client failed ({reason_of(error)})") from None
        if is_probe:
            self._left_alone = False
        self.breaker.record_success()

    def put(self, name: str, body: memoryview) -> None:
        """Store an object in one call, whole or not at all. Raises `VersionsKept`."""
        with self._call():
            self._put(name, body)

    def _put(self, name: str, body: memoryview) -> None:
        stored = self._obstore.put(self._writing, name, body, use_multipart=False)
        if stored["version"] not in (None, "null"):
            raise VersionsKept(f"{self.url} keeps versions of deleted objects; use a bucket that does not")

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """Fill views with the bytes of an object from `start` on. Raises `ObjectMissing`, and `Corrupted` if
        the answer has another length."""
        with self._call():
            self._read_into(name, start, views)

    def _read_into(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        size = sum(map(len, views))
        try:
            options = {"range": (start, start + size)}
            found = self._obstore.get(self._reading, name, options=options)
        except FileNotFoundError as error:
            if _NO_BUCKET in str(error):
                raise
            raise ObjectMissing(f"{self.url} has forgotten object {name}") from None
        filled = _fill(views, found.stream(min_chunk_size=PART_BYTES_MIN))
        if filled != size:
            raise Corrupted(f"{self.url} sent {filled} bytes of object {name} instead of {size}")

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. They need not exist."""
        for start in range(0, len(names), DELETED_AT_ONCE):
            with self._call():
                self._delete(names[start : start + DELETED_AT_ONCE])

    def _delete(self, names: Sequence[str]) -> None:
        self._obstore.delete(self._reading, list(names))

    def list_names(self) -> Iterator[str]:
        """Yield the names of the shard's objects. An untrusted bucket may list names forever."""
        pages = self._obstore.list(self._reading, chunk_size=DELETED_AT_ONCE)

        async def next_page() -> Any:
            return await anext(pages, None)

        # The client requests pages until it has names, and its deadline covers one page. Only its
        # asynchronous calls can be cancelled.
        with asyncio.Runner() as runner:
            while True:
                with self._call():
                    page = runner.run(_end_in_time(next_page(), self._read_s_max))
                if page is None:
                    return
                yield from (found["path"] for found in page)

    def check_versions(self) -> None:
        """Raise `VersionsKept` for a bucket that keeps versions: it would keep erased chunks."""
        with self._call():
            self._check_versions()

    def _check_versions(self) -> None:
        self._put(VERSIONS_NAME, memoryview(b"-"))
        self._delete([VERSIONS_NAME])

    def probe(self) -> float:
        """Write, read and delete an object, and return the bytes per second of the read. Only a probe closes
        the circuit. Raises `VersionsKept`, and `Corrupted` if other bytes come back."""
        sent = memoryview(os.urandom(PROBE_BYTES))
        received = memoryview(bytearray(PROBE_BYTES))
        with self._call(is_probe=True):
            self._check_versions()  # with a small object, in case the bucket keeps one for each probe
            self._put(PROBE_NAME, sent)
            began_s = time.perf_counter()
            self._read_into(PROBE_NAME, 0, [received])
            rate = PROBE_BYTES / max(time.perf_counter() - began_s, 1e-6)
            self._delete([PROBE_NAME])
            if received != sent:
                raise Corrupted(f"{self.url} returned other bytes than were stored")
        return rate


async def _end_in_time(call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Return the result of a call. Raises `OSError` if it takes longer than `timeout_s`."""
    try:
        return await asyncio.wait_for(call, timeout_s)
    except TimeoutError:
        raise OSError(f"no page of a listing within {timeout_s:g} s") from None


def _import_obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise InvalidField("bucket", "needs obstore: pip install 'kintsugi-kv[s3]'") from error
    return obstore


def _fill(views: Sequence[memoryview], body: Iterator[Any]) -> int:
    """Copy a body into views. Returns its length, or the number of bytes read from a body that is too
    long."""
    filled = 0
    left = [view.cast("B") for view in views]
    for part in body:
        rest = memoryview(part)
        filled += len(rest)
        while rest and left:
            count = min(len(rest), len(left[0]))
            left[0][:count] = rest[:count]
            rest, left[0] = rest[count:], left[0][count:]
            if not left[0]:
                del left[0]
        if rest:
            break
    return filled


def reason_of(error: BaseException) -> str:
    """Return why a call failed, in one line. Includes only the status code of a response, because its text
    may repeat parts of the request."""
    text = str(error)
    code = _CODE.search(text)
    line = text.split("\n", 1)[0].split("<", 1)[0]
    if status := _STATUS.search(line):
        line = line[: status.end()]
    line = "".join(c if c.isprintable() else " " for c in line).rstrip(": ")[:REASON_CHARS_MAX]
    reason = f"{line} ({code[1]})" if code else line
    for secret in filter(None, map(os.environ.get, _SECRETS)):
        reason = reason.replace(secret, "...")
    return reason
