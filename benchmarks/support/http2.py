"""Builds HTTP/2 frames for attacking clients, which gRPC's own client cannot imitate."""

from __future__ import annotations

from collections.abc import Mapping

FRAME_BYTES = 16_384
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def open_connection(window_bytes: int = 65_535) -> bytes:
    """Return the frames that open a connection, with this initial flow-control window for its streams."""
    setting = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + window_bytes.to_bytes(4, "big")
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, setting)


def call(path: str, message: bytes, headers: Mapping[str, str]) -> bytes:
    """A call of gRPC with one message, which is compressed if a header says how."""
    head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    head |= {"content-type": "application/grpc", **headers}
    fields = b"".join(b"\0" + _text(name) + _text(value) for name, value in head.items())
    flag = b"\1" if "grpc-encoding" in headers else b"\0"
    data = flag + len(message).to_bytes(4, "big") + message
    pieces = [data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES)]
    return _frame(_HEADERS, _END_HEADERS, 1, fields) + b"".join(
        _frame(_DATA, _END_STREAM if piece is pieces[-1] else 0, 1, piece) for piece in pieces
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """A string of at most 126 bytes, as HPACK writes it without compression."""
    data = text.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data
