"""When certificates expire. Only the dates are read, by a walk through the DER; nothing else is parsed."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime

from kintsugi.core.errors import InvalidField

_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)
_VERSION, _UTC_TIME = 0xA0, 0x17
"""Tags: the optional version before a certificate's serial number, and a time with a year of two digits."""


def first_expiry_s(pem: bytes) -> float:
    """When the first certificate of a PEM file expires, in seconds since 1970: one of a chain is enough to
    break it. Raises `InvalidField` for a file without certificates."""
    blocks = _BLOCK.findall(pem.decode(errors="replace"))
    try:
        return min(_not_after_s(ssl.PEM_cert_to_DER_cert(block)) for block in blocks)
    except (ValueError, IndexError) as error:
        raise InvalidField("tls-cert", "holds no certificate whose dates can be read") from error


def _not_after_s(der: bytes) -> float:
    """Certificate → TBSCertificate → [version,] serial, signature, issuer, validity → notBefore, notAfter."""
    _, outer, _ = _read_element(der, 0)
    _, at, _ = _read_element(der, outer)
    if der[at] == _VERSION:
        _, _, at = _read_element(der, at)
    for _ in ("serial number", "signature algorithm", "issuer"):
        _, _, at = _read_element(der, at)
    _, not_before, _ = _read_element(der, at)
    _, _, not_after = _read_element(der, not_before)
    tag, start, end = _read_element(der, not_after)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[start:end].decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _read_element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, start and end of the content of the element at an offset."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        digits = length & 0x7F
        length, start = int.from_bytes(der[start : start + digits], "big"), start + digits
    return tag, start, start + length
