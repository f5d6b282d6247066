"""A certificate authority for tests, and the certificates of callers that it signs."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kintsugi.store.protocol.tls import TlsFiles
from tests.integration.store.test_tls import HERE, certificate


class Authority:
    """Issues certificates into a folder, each under its common name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        folder.mkdir(exist_ok=True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(certificate("ca", self._key, "ca", self._key, True))

    def issue(self, common_name: str, alternative: x509.GeneralName = HERE) -> TlsFiles:
        key = ec.generate_private_key(ec.SECP256R1())
        files = TlsFiles(
            self.ca, self._folder / f"{common_name}.pem", self._folder / f"{common_name}-key.pem"
        )
        files.cert.write_bytes(certificate(common_name, key, "ca", self._key, False, alternative))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files
