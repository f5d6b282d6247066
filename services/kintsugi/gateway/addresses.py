"""Hosts, ports and TLS files of a service's configuration."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from kintsugi.core.deploy import StoreSpec
from kintsugi.core.errors import Unavailable
from kintsugi.store.protocol.tls import TlsFiles

WILDCARDS = ("", "0.0.0.0", "::", "[::]")


def is_wildcard(host: str) -> bool:
    """Whether a host means all interfaces, so that nobody can connect to it."""
    return host in WILDCARDS


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def tls_of(store: StoreSpec) -> TlsFiles | None:
    if not store.tls_ca:
        return None
    return TlsFiles(Path(store.tls_ca), Path(store.tls_cert), Path(store.tls_key), store.tls_name)


def free_port(host: str, first: int, count: int) -> int:
    """The first free port of a range.

    Raises `Unavailable` if all are taken, and if one cannot be bound for another reason.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, first + count):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host.strip("[]"), port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise Unavailable(
                    f"{format_address(host, port)} cannot be bound ({error.strerror}); name another one"
                ) from error
            return port
    raise Unavailable(f"ports {first} to {first + count - 1} of {host} are all taken; name another first one")
