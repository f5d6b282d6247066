"""Mutual TLS: who may connect, and certificates that are replaced while a shard runs."""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol import watched_files
from kintsugi.store.protocol.tls import TlsFiles, check_listen, is_loopback, parse_address
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier

Key = ec.EllipticCurvePrivateKey


HERE = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


def certificate(
    subject: str, key: Key, issuer: str, signer: Key, authority: bool, name: x509.GeneralName = HERE
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
    built = (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([name]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return built.public_bytes(serialization.Encoding.PEM)


def issue(folder: Path, name: x509.GeneralName = HERE) -> TlsFiles:
    """A new authority and one certificate that it signed, in place of what the folder held."""
    folder.mkdir(exist_ok=True)
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = folder / "ca.pem"
    files = TlsFiles(ca, folder / "cert.pem", folder / "key.pem")
    contents = {
        ca: certificate("ca", authority, "ca", authority, True),
        files.cert: certificate("shard", own, "ca", authority, False, name),
        files.key: own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    }
    for path, content in contents.items():
        fresh = path.with_suffix(".new")
        fresh.write_bytes(content)
        os.replace(fresh, path)
    return files


def answers(address: str, tls: TlsFiles | None) -> bool:
    store = GrpcStore(address, GrpcOptions(tls=tls, call_timeout_s=3.0))
    try:
        return store.stats().chunks == 0
    except Unavailable:
        return False
    finally:
        store.close()


def test_only_peers_with_a_signed_certificate_are_answered(tmp_path: Path) -> None:
    ours, theirs = issue(tmp_path / "ours"), issue(tmp_path / "theirs")
    with ShardServer(Shard(RamTier(1 << 20)), "127.0.0.1:0", ServerOptions(tls=ours)) as server:
        assert answers(server.address, ours)
        assert not answers(server.address, None)
        assert not answers(server.address, TlsFiles(ours.ca, theirs.cert, theirs.key))
        assert not answers(server.address, theirs)


def test_a_certificate_may_be_for_a_name_that_is_not_the_address(tmp_path: Path) -> None:
    """As with pods: their addresses come and go, the name stays."""
    named = issue(tmp_path / "named", x509.DNSName("acme-store"))
    with ShardServer(Shard(RamTier(1 << 20)), "127.0.0.1:0", ServerOptions(tls=named)) as server:
        assert not answers(server.address, named)
        assert answers(server.address, dataclasses.replace(named, name="acme-store"))
        assert not answers(server.address, dataclasses.replace(named, name="other-store"))


def test_replaced_certificates_are_used_without_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    files = issue(folder)
    with ShardServer(Shard(RamTier(1 << 20)), "127.0.0.1:0", ServerOptions(tls=files)) as server:
        assert answers(server.address, files)
        issue(folder)
        assert answers(server.address, files)


def test_a_client_follows_replaced_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)
    files = issue(tmp_path / "tls")
    with ShardServer(Shard(RamTier(1 << 20)), "127.0.0.1:0", ServerOptions(tls=files)) as server:
        address = server.address
        store = GrpcStore(address, GrpcOptions(tls=files, call_timeout_s=3.0))
        assert store.stats().chunks == 0
    issue(tmp_path / "tls")
    with ShardServer(Shard(RamTier(1 << 20)), address, ServerOptions(tls=files)):
        assert store.stats().chunks == 0
        store.close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    with pytest.raises(InvalidField, match="tls-ca"):
        ShardServer(Shard(RamTier(1 << 20)), "127.0.0.1:0", ServerOptions(tls=files)).start()


def test_files_that_are_no_certificates_are_suspected(tmp_path: Path) -> None:
    file = tmp_path / "garbage"
    file.write_text("garbage")
    with pytest.raises(Unavailable, match="PEM"):
        ShardServer(
            Shard(RamTier(1 << 20)), "127.0.0.1:0", ServerOptions(tls=TlsFiles(file, file, file))
        ).start()


@pytest.mark.parametrize(
    "address",
    ["http://localhost:1", "dns:///a:1,b:1", "[::1", "[::1:1", "a b:1", "a:1\n", "a:\u0661", ":1", "a:65536"],
)
def test_what_is_no_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(InvalidField, match="is not host:port"):
        parse_address("listen", address)


def test_an_address_is_parsed() -> None:
    addresses = ("localhost:1", "my_shard-0.ns.svc:65535", "127.0.0.1:0", "[fe80::1%eth0]:7")
    assert [parse_address("listen", address) for address in addresses] == [
        ("localhost", 1),
        ("my_shard-0.ns.svc", 65535),
        ("127.0.0.1", 0),
        ("fe80::1%eth0", 7),
    ]


def test_beyond_loopback_tls_is_mandatory() -> None:
    assert [is_loopback(f"{host}:1") for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "shard")] == [
        *(True, True, True),
        *(False, False),
    ]
    with pytest.raises(InvalidField, match="--insecure"):
        check_listen("0.0.0.0:7400", None, insecure=False)
    check_listen("0.0.0.0:7400", None, insecure=True)
