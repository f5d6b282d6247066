"""Hosts, ports and TLS files of a service's configuration."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from kintsugi.core.deploy import StoreSpec
from kintsugi.core.errors import Unavailable
from kintsugi.store.protocol.tls import TlsFiles, is_loopback

WILDCARDS = ("", "0.0.0.0", "::", "[::]")


def is_wildcard(host: str) -> bool:
    """Return whether a host means all interfaces; clients cannot connect to such a host."""
    return host in WILDCARDS


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def advertised_address(listen: str, node_ip: str) -> str:
    """Return the address at which other hosts reach a server that listens on ``listen`` on a Ray node."""
    host, _, port = listen.rpartition(":")
    return format_address(_find_host(node_ip), int(port)) if is_wildcard(host) else listen


def _find_host(node_ip: str) -> str:
    """Return the node's address for other hosts. Ray does not know it if Ray listens only on loopback."""
    if not is_loopback(f"{node_ip}:0"):
        return node_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing, but selects the interface with a route to others
        except OSError:
            return node_ip
        host: str = probe.getsockname()[0]
    return host


def tls_of(store: StoreSpec) -> TlsFiles | None:
    if not store.tls_ca:
        return None
    return TlsFiles(Path(store.tls_ca), Path(store.tls_cert), Path(store.tls_key), store.expert.tls_name)


def free_port(host: str, first: int, count: int) -> int:
    """Return the first free port of a range.

    Raises `Unavailable` if all are in use, or if one cannot be bound for another reason.
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
    if count == 1:
        raise Unavailable(f"{format_address(host, first)} is in use; name another port")
    raise Unavailable(f"ports {first} to {first + count - 1} of {host} are in use; name another first port")
