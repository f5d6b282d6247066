"""Hosts, ports and TLS files, as a service's configuration names them."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from kintsugi.core.deploy import StoreSpec
from kintsugi.core.errors import Unavailable
from kintsugi.store.protocol.tls import TlsFiles

WILDCARDS = ("", "0.0.0.0", "::", "[::]")


def is_wildcard(host: str) -> bool:
    """Whether it means all interfaces, and so nothing to connect to."""
    return host in WILDCARDS


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def tls_of(store: StoreSpec) -> TlsFiles | None:
    if not store.tls_ca:
        return None
    return TlsFiles(Path(store.tls_ca), Path(store.tls_cert), Path(store.tls_key), store.tls_name)


def free_port(host: str, first: int, count: int) -> int:
    """The first port of a range that nobody listens on.

    Raises `Unavailable` where all are taken, and where one cannot be had for another reason, with it.
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
                    f"{format_address(host, port)} cannot be listened on ({error.strerror}); name another one"
                ) from error
            return port
    raise Unavailable(f"ports {first} to {first + count - 1} of {host} are all taken; name another first one")
