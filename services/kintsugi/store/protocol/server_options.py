"""What every gRPC server of ours allows a connection before it knows who is there; its port is its own."""

from __future__ import annotations

METADATA_BYTES_MAX = 8 << 10
HANDSHAKE_S = 10.0
"""Time in which TLS and HTTP/2 have to be agreed on."""
PING_S, PONG_S = 30.0, 10.0
"""A peer of running calls that does not answer a ping is gone."""


SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.keepalive_time_ms", int(PING_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(PONG_S * 1000)),
    # A second server on the same port would take some of the connections, and nobody would notice.
    ("grpc.so_reuseport", 0),
)
