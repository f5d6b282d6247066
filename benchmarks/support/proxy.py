"""A TCP proxy on loopback that can hang, like a store whose process or network stops in the middle of a
stream."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE = 1 << 16


class HangingProxy:
    """Forwards connections to one address, and counts the bytes that come back.

    After `hang_after`, it stops in the middle of the answer: nothing is forwarded any more in either
    direction, on no connection. Connections stay open, and new ones are accepted and not answered.
    """

    def __init__(self, upstream: str) -> None:
        host, port = upstream.rsplit(":", 1)
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._returned = 0
        self._hangs_at: int | None = None
        self._sockets: list[socket.socket] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def returned_bytes(self) -> int:
        """Bytes that came back so far."""
        with self._lock:
            return self._returned

    @property
    def hangs(self) -> bool:
        with self._lock:
            return self._is_over()

    def hang_after(self, num_bytes: int) -> None:
        """Hang once `num_bytes` more have come back."""
        with self._lock:
            self._hangs_at = self._returned + num_bytes

    def serve(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            if self.hangs:
                continue
            server = socket.create_connection(self._upstream)
            self._sockets.append(server)
            for source, target, returns in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._forward, args=(source, target, returns), daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _is_over(self) -> bool:
        return self._hangs_at is not None and self._returned >= self._hangs_at

    def _forward(self, source: socket.socket, target: socket.socket, returns: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE):
                with self._lock:
                    if self._is_over():
                        return
                    if returns and self._hangs_at is not None:
                        piece = piece[: self._hangs_at - self._returned]
                    self._returned += len(piece) if returns else 0
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


@contextmanager
def hanging_proxy(upstream: str) -> Iterator[HangingProxy]:
    """A proxy that serves on threads of its own."""
    proxy = HangingProxy(upstream)
    threading.Thread(target=proxy.serve, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.close()
