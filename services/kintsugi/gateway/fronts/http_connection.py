"""HTTP connections, bounded before anybody knows who is calling.

uvicorn bounds neither the bytes of a request's head nor the time that it may take, and httptools keeps a
header until it is complete. A connection therefore counts what it has fed to the parser without getting a
head or a piece of a body out of it. A connection on which no caller was authenticated yet is a *stranger*:
there are few of them at a time. Those who have asked without a token give way first, then the oldest, so that
somebody who only holds connections open never keeps a caller out.
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
"""Largest head: request line and headers."""
HEADERS_MAX = 100
HEAD_READ_S = 10.0
"""Time in which a whole head has to arrive, and a TLS handshake has to end."""
PIPELINED_MAX = 8
"""Requests that wait on one connection behind the one that is being answered."""
UNREAD_S = 10.0
"""A closed connection whose peer does not read the answer is cut after this long."""
TOO_LARGE = b"431 Request Header Fields Too Large"
_CONNECTION = "kintsugi.connection"


class Connections:
    """All connections of one server. For one event loop."""

    def __init__(self, connections_max: int, strangers_max: int) -> None:
        self._connections_max = connections_max
        self._strangers_max = strangers_max
        # Dictionaries as ordered sets, the oldest first.
        self._strangers: dict[BoundedConnection, None] = {}
        self._refused: dict[BoundedConnection, None] = {}
        self._callers: dict[BoundedConnection, None] = {}

    def add(self, connection: BoundedConnection) -> None:
        """Takes in a stranger. Cuts another connection off where there are too many."""
        self._strangers[connection] = None
        num_strangers = len(self._strangers) + len(self._refused)
        if num_strangers > self._strangers_max or len(self) > self._connections_max:
            self._find_least_wanted().cut()

    def _find_least_wanted(self) -> BoundedConnection:
        """The oldest stranger, before all others one who has asked; if there is none but the last one, the
        caller's connection that has waited longest for a request; else the last stranger."""
        oldest = next(iter(self._refused or self._strangers))
        if self._refused or len(self._strangers) > 1:
            return oldest
        return next((one for one in self._callers if one.is_waiting), oldest)

    def expect_token(self, connection: BoundedConnection) -> None:
        """A whole head has arrived: unless the connection is admitted now, its peer has no token."""
        if connection in self._strangers:
            self.remove(connection)
            self._refused[connection] = None

    def admit(self, connection: BoundedConnection) -> None:
        """A caller has authenticated on the connection; moves it behind the others."""
        if connection in self._refused or connection in self._callers:
            self.remove(connection)
            self._callers[connection] = None

    def remove(self, connection: BoundedConnection) -> None:
        """Idempotent."""
        self._strangers.pop(connection, None)
        self._refused.pop(connection, None)
        self._callers.pop(connection, None)

    def __len__(self) -> int:
        return len(self._strangers) + len(self._refused) + len(self._callers)


class BoundedConnection(HttpToolsProtocol):
    """One connection, as uvicorn serves it, with bounds."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._connections = connections
        self._reads_head = True
        self._unused_bytes = 0
        """Bytes fed to the parser since it last gave something back."""
        self._num_headers = 0
        self._refusal = b""
        """Status and reason of the answer, if a limit refused the request."""
        self._late: TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def admit(self) -> None:
        """A caller has authenticated on this connection."""
        self._connections.admit(self)

    def cut(self) -> None:
        """Closes the connection at once, whatever is under way. Idempotent."""
        self._connections.remove(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        with suppress(AttributeError):  # asyncio's own transports read 256 KiB at a time; others say nothing
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
        else:  # blanks behind a request look like the next head; the answer goes on
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        status = self._refusal or b"400 Bad Request"
        if self.is_waiting:  # in the middle of an answer, the status of another would be taken for its text
            head = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head % status)
        self._close()

    def _close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(UNREAD_S, self.cut)

    # The parser's callbacks. What they raise ends the connection with `send_400_response`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = 0
        self.scope["state"][_CONNECTION] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > HEADERS_MAX:
            self._refusal = TOO_LARGE
            raise httptools.HttpParserError(f"more than {HEADERS_MAX} headers")
        if self._reads_head:  # nobody asks for trailers
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
    """Tells the server that a caller has authenticated. Other servers have nothing to be told."""
    connection = scope.get("state", {}).get(_CONNECTION)
    if isinstance(connection, BoundedConnection):
        connection.admit()
