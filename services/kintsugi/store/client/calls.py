"""Calls to one shard. The caller's thread waits while gRPC's own threads do the work.

A gRPC deadline bounds a whole call, but a stream of many layers needs a bound on the wait for each message.
One thread watches all streams of a store and cancels a stream that waits too long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import ChunkManifest
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.grpc_status import errors_of
from kintsugi.store.protocol.tls import TlsFiles, open_channel
from kintsugi.store.protocol.watched_files import WatchedFiles

METADATA = ((wire.PROTOCOL_METADATA, str(wire.PROTOCOL_VERSION)),)
TOKEN_BYTES_MAX = 4096
RESOLUTION_S = 0.02


def read_metadata(token_file: Path | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call, with the bearer token in a file if one is named. Raises `InvalidField`
    for a file that cannot be read or holds no token."""
    if token_file is None:
        return METADATA
    try:
        with token_file.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError as error:
        raise InvalidField("token_file", f"{token_file} cannot be read ({error.strerror})") from error
    if not token.isprintable() or not token.isascii() or not token:
        raise InvalidField("token_file", f"{token_file} must hold one bearer token, made with kintsugi token")
    return (*METADATA, ("authorization", f"Bearer {token}"))


class ShardCalls:
    """Calls to the shard at `address`. Thread-safe. Every method raises the error that
    `store.protocol.grpc_status` makes from a failure."""

    def __init__(self, address: str, tls: TlsFiles | None, token_file: Path | None = None) -> None:
        """Raises `InvalidField` for a file that cannot be read."""
        self.address = address
        self._metadata = WatchedFiles(
            "token file", () if token_file is None else (token_file,), partial(read_metadata, token_file)
        )
        self._channel = WatchedFiles(
            "set of TLS files", () if tls is None else tls.paths, partial(open_channel, address, tls)
        )
        self._watchdog = Watchdog()

    def unary(self, name: str, request: Any, response: Any, timeout_s: float) -> Any:
        """Make one call and return its response, a message of class `response`."""
        with errors_of(self.address):
            method = self._channel.current().unary_unary(
                f"/{wire.SERVICE}/{name}", type(request).SerializeToString, response.FromString
            )
            return method(request, timeout=timeout_s, metadata=self._metadata.current())

    def put(self, messages: Iterable[bytes], timeout_s: float) -> pb.PutChunkKVResponse:
        """Send one chunk."""
        with errors_of(self.address):
            method = self._channel.current().stream_unary(
                f"/{wire.SERVICE}/PutChunkKV", None, pb.PutChunkKVResponse.FromString
            )
            metadata = self._metadata.current()
            response: pb.PutChunkKVResponse = method(iter(messages), timeout=timeout_s, metadata=metadata)
            return response

    def stream(
        self, name: str, request: Any, patience: Patience, response: Any = None
    ) -> Generator[Any, None, None]:
        """Yield messages as they arrive, as bytes if `response` is None. Waits while `patience` lasts."""
        with errors_of(self.address):
            method = self._channel.current().unary_stream(
                f"/{wire.SERVICE}/{name}",
                type(request).SerializeToString,
                None if response is None else response.FromString,
            )
            call = method(request, metadata=self._metadata.current())
        guard = self._watchdog.guard(call.cancel)
        try:
            while True:
                with errors_of(self.address, lambda: guard.expired), patience.spend() as left_s:
                    guard.arm(left_s)
                    message = next(call, None)
                    guard.disarm()
                if message is None:
                    return
                yield message
        finally:
            self._watchdog.release(guard)
            call.cancel()

    def close(self) -> None:
        """Close the connection; calls in progress fail. Idempotent."""
        self._watchdog.close()
        self._channel.current().close()


class Patience:
    """The time that a stream may still wait for messages, until it is renewed."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._left_s = wait_s

    def renew(self) -> None:
        self._left_s = self._wait_s

    @contextmanager
    def spend(self) -> Iterator[float]:
        """Yield the time that is left, and count the time in the block."""
        began_s = time.monotonic()
        try:
            yield self._left_s
        finally:
            self._left_s -= time.monotonic() - began_s


def _message_ends(frames: Sequence[memoryview]) -> Iterator[int]:
    """Yield the indices of frames at which messages end. A message has at most `MESSAGE_BYTES_TARGET` bytes,
    or one larger frame."""
    size = 0
    for index, frame in enumerate(frames):
        if size and size + len(frame) > wire.MESSAGE_BYTES_TARGET:
            yield index
            size = 0
        size += len(frame)
    yield len(frames)


def frames_of(message: bytes) -> Iterator[tuple[pb.FrameHeader, memoryview]]:
    """Yield the frames of one message of a stream."""
    response, payload = wire.parse_payload(message, pb.StreamLayersResponse)
    position = 0
    for header in response.frames:
        yield header, payload[position : position + header.size_bytes]
        position += header.size_bytes


def put_messages(
    header: pb.PutHeader, manifest: ChunkManifest, views: Sequence[memoryview]
) -> Iterator[bytes]:
    """Yield the messages of one put, in order."""
    yield pb.PutChunkKVRequest(header=header).SerializeToString()
    first = 0
    for stop in _message_ends(views):
        request = pb.PutChunkKVRequest(first_layer=manifest.layers[first], commit=stop == len(views))
        yield wire.with_payload(request.SerializeToString(), views[first:stop])
        first = stop


class GuardedStream:
    """A stream with a bound on each wait. Call `arm` before a wait and `disarm` after it."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.expires_s = math.inf
        self.expired = False
        self._cancel = cancel

    def arm(self, wait_s: float) -> None:
        self.expires_s = time.monotonic() + wait_s

    def disarm(self) -> None:
        self.expires_s = math.inf

    def expire(self) -> None:
        self.expired = True
        self._cancel()


class Watchdog:
    """Cancels guarded streams that wait too long, at most `RESOLUTION_S` late. Sleeps while no stream is
    guarded."""

    def __init__(self) -> None:
        self._guards: set[GuardedStream] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def guard(self, cancel: Callable[[], object]) -> GuardedStream:
        """Watch a stream until `release`."""
        guard = GuardedStream(cancel)
        with self._changed:
            self._guards.add(guard)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kintsugi-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        return guard

    def release(self, guard: GuardedStream) -> None:
        with self._changed:
            self._guards.discard(guard)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._guards or self._closed)
                if self._closed:
                    return
                now = time.monotonic()
                overdue = [guard for guard in self._guards if guard.expires_s < now]
                self._guards.difference_update(overdue)
            for guard in overdue:
                guard.expire()
            time.sleep(RESOLUTION_S)
