"""HTTP connections with limits that apply before a caller is authenticated.

uvicorn limits neither the size nor the duration of a request's head, and httptools buffers a header until it
is complete. A connection therefore counts the bytes that the parser has consumed without returning a head or
a piece of a body. A connection without an authenticated caller is a *stranger*. The number of strangers is
limited. Beyond the limit, strangers that were answered without a token are closed first, then the oldest
without a head. Strangers whose head has arrived are closed last, because their tokens are about to be read.
So neither idle connections nor a flood of them keep callers out.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from contextlib import suppress
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 16 << 10
"""Maximum size of a head: request line and headers."""
HEADERS_MAX = 100
HEAD_READ_S = 10.0
"""Maximum time until a whole head has arrived, and maximum time of a TLS handshake."""
PIPELINED_MAX = 8
"""Maximum number of requests on one connection that wait for the current answer."""
UNREAD_S = 10.0
"""Time after which a closing connection is aborted if its peer does not read the answer."""
TOO_LARGE = b"431 Request Header Fields Too Large"
_CONNECTION = "kintsugi.connection"


class Connections:
    """All connections of one server. For one event loop."""

    def __init__(self, connections_max: int, strangers_max: int) -> None:
        self._connections_max = connections_max
        self._strangers_max = strangers_max
        # Dictionaries are used as ordered sets, the oldest first.
        self._strangers: dict[BoundedConnection, None] = {}
        self._asking: dict[BoundedConnection, None] = {}
        """Connections without an authenticated caller whose head has arrived."""
        self._callers: dict[BoundedConnection, None] = {}

    def add(self, connection: BoundedConnection) -> None:
        """Add a stranger. If there are too many connections, abort one."""
        self._strangers[connection] = None
        num_strangers = len(self._strangers) + len(self._asking)
        if num_strangers > self._strangers_max or len(self) > self._connections_max:
            self._find_least_wanted().cut()

    def _find_least_wanted(self) -> BoundedConnection:
        """Return the connection to abort: the oldest stranger that was answered, or else the oldest without
        a head, or the oldest whose head has arrived. The newest stranger is aborted only if no
        caller's connection is idle; otherwise the oldest idle connection of a caller is."""
        asking, oldest = next(iter(self._asking), None), next(iter(self._strangers))
        if asking is not None and asking.is_answered:
            return asking
        if len(self._strangers) > 1:
            return oldest
        return asking or next((one for one in self._callers if one.is_waiting), oldest)

    def expect_token(self, connection: BoundedConnection) -> None:
        """Note that a whole head has arrived. Unless `admit` follows, the peer has no token."""
        if connection in self._strangers:
            self.remove(connection)
            self._asking[connection] = None

    def admit(self, connection: BoundedConnection) -> None:
        """Note that a caller has authenticated on the connection, which becomes the newest."""
        if connection in self._asking or connection in self._callers:
            self.remove(connection)
            self._callers[connection] = None

    def remove(self, connection: BoundedConnection) -> None:
        """Idempotent."""
        self._strangers.pop(connection, None)
        self._asking.pop(connection, None)
        self._callers.pop(connection, None)

    def __len__(self) -> int:
        return len(self._strangers) + len(self._asking) + len(self._callers)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._connections = connections
        self._reads_head = True
        self._unused_bytes = 0
        """Bytes that the parser has consumed since it last returned something."""
        self._num_headers = 0
        self._refusal = b""
        """Status and reason of the answer if a limit refused the request."""
        self._late: TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_answered(self) -> bool:
        """Whether the answer to the last request has begun."""
        return self.cycle is not None and self.cycle.response_started

    def admit(self) -> None:
        """Note that a caller has authenticated on this connection."""
        self._connections.admit(self)

    def cut(self) -> None:
        """Abort the connection. Idempotent."""
        self._connections.remove(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        with suppress(AttributeError):  # only asyncio's own transports, which read 256 KiB at a time
            transport.max_size = HEAD_BYTES_MAX  # type: ignore[attr-defined]
        self._expect_head()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reads_head:
            self._expect_head()
        while data and not self.transport.is_closing():
            room = HEAD_BYTES_MAX - self._unused_bytes
            piece, data = data[:room], data[room:]
            self._unused_bytes += len(piece)
            super().data_received(piece)
            if self._unused_bytes >= HEAD_BYTES_MAX and not self.transport.is_closing():
                self._refusal = TOO_LARGE
                self.send_400_response("")

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_READ_S, self._give_up)

    def _end_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self.is_waiting:
            self.cut()
        else:  # blank lines after a request look like the next head; the answer continues
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        status = self._refusal or b"400 Bad Request"
        if self.is_waiting:  # during an answer, the client would take this status for a part of it
            head = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head % status)
        self._close()

    def _close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(UNREAD_S, self.cut)

    # The parser's callbacks. An exception ends the connection with `send_400_response`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = 0
        self.scope["state"][_CONNECTION] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > HEADERS_MAX:
            self._refusal = TOO_LARGE
            raise httptools.HttpParserError(f"more than {HEADERS_MAX} headers")
        if self._reads_head:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED_MAX:
            raise httptools.HttpParserError(f"more than {PIPELINED_MAX} requests wait")
        self._reads_head = False
        self._unused_bytes = 0
        self._end_head()
        self._connections.expect_token(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unused_bytes = 0
        self._reads_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def timeout_keep_alive_handler(self) -> None:
        self.cut()


def admit_connection(scope: Scope) -> None:
    """Tell a `BoundedConnection` that a caller has authenticated on it. Does nothing with other servers."""
    connection = scope.get("state", {}).get(_CONNECTION)
    if isinstance(connection, BoundedConnection):
        connection.admit()
