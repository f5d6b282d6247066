"""When certificates expire, and how shards and gateways say so."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from kintsugi.core.errors import InvalidField
from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.store.protocol.tls import TlsFiles, first_expiry_s
from kintsugi.store.shard.eviction.room import Counters
from kintsugi.store.shard.exporter import ShardMetrics

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


def certificate(
    not_after: datetime, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | None = None
) -> bytes:
    """A self-signed certificate as PEM."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kintsugi-store")])
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(not_after)
        .sign(key, hashes.SHA256())
    )
    return built.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("years", [1, 20, 60])
def test_the_date_is_read_in_both_forms(years: int) -> None:
    """From 2050 on a year has four digits."""
    until = NOW.replace(year=NOW.year + years)
    assert first_expiry_s(certificate(until)) == until.timestamp()


def test_a_long_certificate_is_read_too() -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=4096)
    assert first_expiry_s(certificate(NOW, key)) == NOW.timestamp()


def test_of_a_chain_the_first_to_expire_counts() -> None:
    chain = certificate(NOW + timedelta(days=90)) + b"intermediate\n" + certificate(NOW + timedelta(days=5))
    assert first_expiry_s(chain) == (NOW + timedelta(days=5)).timestamp()


@pytest.mark.parametrize("text", [b"", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidField, match="tls-cert: contains no valid certificate"):
        first_expiry_s(text)


def shard() -> MagicMock:
    """A shard without chunks or tiers."""
    return MagicMock(table=MagicMock(counters=Counters(), queues=[]), tiers=[], failure=None)


def test_shard_and_gateway_show_when_their_certificate_expires(tmp_path: Path) -> None:
    path = tmp_path / "tls.crt"
    path.write_bytes(certificate(NOW))
    files = TlsFiles(None, path, path)
    names = [f"kintsugi_{part}_certificate_expiry_timestamp_seconds" for part in ("store", "gateway")]
    gateway = GatewayMetrics()
    registries = [ShardMetrics(shard(), {}, files).registry, gateway.registry]
    assert gateway.registry.get_sample_value(names[1]) is None, "without TLS there is nothing to expire"
    gateway.certificate.read_s = files.expires_s
    for registry, name in zip(registries, names, strict=True):
        assert registry.get_sample_value(name) == NOW.timestamp()
        path.write_bytes(certificate(NOW + timedelta(days=30)))
        assert registry.get_sample_value(name) == (NOW + timedelta(days=30)).timestamp(), "it was replaced"
        path.write_bytes(certificate(NOW))
    path.unlink()
    assert math.isnan(gateway.registry.get_sample_value(names[1]) or 0.0)
