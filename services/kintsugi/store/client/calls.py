"""Calls to one shard. They wait in the caller's thread, while gRPC's own threads do the work."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.watchdog import Watchdog
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.status import errors_of
from kintsugi.store.protocol.tls import ReloadingChannel, TlsFiles

METADATA = ((wire.PROTOCOL_METADATA, str(wire.PROTOCOL_VERSION)),)


class ShardCalls:
    """The shard at `address`. Thread-safe. Every method raises what `store.protocol.status` makes of a
    failure."""

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        self.address = address
        self._line = ReloadingChannel(address, tls)
        self._watchdog = Watchdog()

    def unary(self, name: str, request: Any, response: Any, timeout_s: float) -> Any:
        """Make one call and return its response. `response` is the message's class."""
        with errors_of(self.address):
            method = self._line.channel().unary_unary(
                f"/{wire.SERVICE}/{name}", type(request).SerializeToString, response.FromString
            )
            return method(request, timeout=timeout_s, metadata=METADATA)

    def put(self, messages: Iterable[bytes], timeout_s: float) -> pb.PutChunkKVResponse:
        """Send one chunk."""
        with errors_of(self.address):
            method = self._line.channel().stream_unary(
                f"/{wire.SERVICE}/PutChunkKV", None, pb.PutChunkKVResponse.FromString
            )
            response: pb.PutChunkKVResponse = method(iter(messages), timeout=timeout_s, metadata=METADATA)
            return response

    def stream(
        self, name: str, request: Any, wait_s: float, response: Any = None
    ) -> Generator[Any, None, None]:
        """Yield messages as they arrive, bytes where `response` is None. Waits at most `wait_s` for each."""
        with errors_of(self.address):
            method = self._line.channel().unary_stream(
                f"/{wire.SERVICE}/{name}",
                type(request).SerializeToString,
                None if response is None else response.FromString,
            )
            call = method(request, metadata=METADATA)
        guard = self._watchdog.guard(call.cancel)
        try:
            while True:
                with errors_of(self.address, lambda: guard.expired):
                    guard.arm(wait_s)
                    message = next(call, None)
                    guard.disarm()
                if message is None:
                    return
                yield message
        finally:
            self._watchdog.release(guard)
            call.cancel()

    def close(self) -> None:
        """Idempotent. Calls under way fail."""
        self._watchdog.close()
        self._line.close()
