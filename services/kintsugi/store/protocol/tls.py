"""Channels of gRPC clients, and TLS credentials of servers."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kintsugi.core.errors import InvalidField
from kintsugi.store.protocol.watched_files import WatchedFiles
from kintsugi.store.protocol.wire import CLIENT_OPTIONS

PORT_MAX = 65535
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[\w.-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class TlsFiles:
    """One side's PEM files. Each side presents a certificate that `ca` signed."""

    ca: Path | None
    """None: a server whose clients present a token instead."""
    cert: Path
    key: Path
    name: str = ""
    """The name in the other side's certificate; empty: its address. Needed for pods, whose addresses
    change."""

    def read(self) -> tuple[bytes | None, bytes, bytes]:
        """Return the contents of ca, cert and key. Raises `InvalidField` with the name of a file that cannot
        be read."""
        ca = None if self.ca is None else read_pem("tls-ca", self.ca)
        return ca, read_pem("tls-cert", self.cert), read_pem("tls-key", self.key)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files to watch for changes."""
        return (self.cert, self.key) if self.ca is None else (self.ca, self.cert, self.key)

    def expires_s(self) -> float:
        """Return when the certificate expires, in Unix seconds; NaN if it cannot be read."""
        try:
            return first_expiry_s(read_pem("tls-cert", self.cert))
        except InvalidField:
            return math.nan


def read_pem(field: str, path: Path) -> bytes:
    """Raises `InvalidField` for a file that cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidField(field, f"{path} cannot be read ({error.strerror})") from error


def first_expiry_s(pem: bytes) -> float:
    """Return the earliest expiry in a PEM file, in Unix seconds: one expired certificate breaks the chain.
    Raises `InvalidField` for a file without certificates."""
    from cryptography.x509 import load_pem_x509_certificates  # services have it; the SDK runs without

    try:
        chain = load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InvalidField("tls-cert", "contains no valid certificate") from error
    return min(certificate.not_valid_after_utc.timestamp() for certificate in chain)


def open_channel(address: str, tls: TlsFiles | None) -> Any:
    """Open a channel that can carry whole frames. Raises `InvalidField` if a TLS file cannot be read."""
    if tls is None:
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    ca, cert, key = tls.read()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    named = [("grpc.ssl_target_name_override", tls.name)] if tls.name else []
    return grpc.secure_channel(address, credentials, options=(*CLIENT_OPTIONS, *named))


class ServerTls:
    """Credentials of a server, which reads its files again when they change."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises `InvalidField` for a file that cannot be read."""
        self._files = files
        self._watched = WatchedFiles("set of TLS files", files.paths, self._read, always_check=True)
        self._given = self._watched.current()
        self.credentials: Any = grpc.dynamic_ssl_server_credentials(
            self._given, self._configuration_if_changed, require_client_authentication=files.ca is not None
        )

    def _read(self) -> Any:
        ca, cert, key = self._files.read()
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def _configuration_if_changed(self) -> Any:
        """Return the new configuration for a handshake, or None to keep the old one, as gRPC requires."""
        newest, given = self._watched.current(), self._given
        self._given = newest
        return None if newest is given else newest


def is_loopback(listen: str) -> bool:
    """Return whether `host:port` can be reached only from this machine. Of host names, only `localhost` is
    accepted."""
    host = listen.rsplit(":", 1)[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(field: str, address: str) -> tuple[str, int]:
    """Return host and port of `host:port`. Raises `InvalidField`, also without a port, which gRPC would
    choose itself, and for a URL, which gRPC would try to resolve until the deadline."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > PORT_MAX:
        raise InvalidField(
            field,
            f"{address!r} is not host:port with a port of at most {PORT_MAX}, such as 127.0.0.1:7500 or "
            "[::1]:7500",
        )
    return match["host"].strip("[]"), int(match["port"])


def check_listen(listen: str, tls: TlsFiles | None, insecure: bool) -> None:
    """Raise `InvalidField` for an invalid address, and for an address beyond loopback without TLS unless
    `insecure` is set."""
    parse_address("listen", listen)
    if tls is None and not insecure and not is_loopback(listen):
        raise InvalidField(
            "listen",
            f"{listen} can be reached from other machines: give --tls-ca, --tls-cert and --tls-key, "
            "or --insecure",
        )
