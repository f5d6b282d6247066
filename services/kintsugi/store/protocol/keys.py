"""Interface of a key management service: the keys that name and encrypt a namespace's chunks.

Only clients of the store (engines, gateways, precompute) have keys; shards store and stream ciphertext. A
namespace has one *name key*, from which chunk keys and anchors are derived, and one or more *data keys*: the
newest encrypts, all of them decrypt. Rotation adds a data key and keeps the name key, so chunks stay hits. As
soon as the last copy of a data key is destroyed, no chunk encrypted with it can be read.
`store.client.key_file` reads keys from a file, such as a mounted Secret. See docs/adr/0009."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import NAME_KEY_BYTES

DATA_KEY_BYTES = 32
"""AES-256."""
DATA_KEYS_MAX = 16
"""Maximum per namespace. Retire old keys after a rotation."""
_KEY_ID_BYTES = 8


def key_id_of(data_key: bytes) -> str:
    """Return the id of a data key in manifests: 16 hexadecimal digits derived from the key itself. So a
    client with other keys can tell a chunk that it cannot read from a damaged one."""
    kdf = HKDF(algorithm=SHA256(), length=_KEY_ID_BYTES, salt=None, info=b"kintsugi-key-id")
    return kdf.derive(data_key).hex()


@dataclass(frozen=True)
class NamespaceKeys:
    """The keys of one namespace."""

    name_key: bytes = field(repr=False)
    """`NAME_KEY_BYTES` bytes. Chunks are found only as long as the name key stays the same."""
    data_keys: tuple[bytes, ...] = field(repr=False)
    """`DATA_KEY_BYTES` bytes each, newest first."""

    def __post_init__(self) -> None:
        if len(self.name_key) != NAME_KEY_BYTES:
            raise InvalidField("name_key", f"has {len(self.name_key)} bytes; it must have {NAME_KEY_BYTES}")
        if not 0 < len(self.data_keys) <= DATA_KEYS_MAX:
            raise InvalidField(
                "data_keys", f"has {len(self.data_keys)} keys; it must have between 1 and {DATA_KEYS_MAX}"
            )
        for key in self.data_keys:
            if len(key) != DATA_KEY_BYTES:
                raise InvalidField("data_keys", f"has a key of {len(key)} bytes; each has {DATA_KEY_BYTES}")

    @cached_property
    def by_id(self) -> dict[str, bytes]:
        """The data keys by their ids, newest first."""
        return {key_id_of(key): key for key in self.data_keys}

    @property
    def newest_id(self) -> str:
        """The id of the data key that encrypts new chunks."""
        return next(iter(self.by_id))


class KeySource(ABC):
    """A source of keys for a client of the store. Thread-safe."""

    def replace(self, namespace: str) -> int:
        """Replace the data keys of a namespace, and of parts with their own keys, by one new key each.
        Returns the number of destroyed keys. Raises `InvalidField` if this source is read-only."""
        raise InvalidField("keys", "are read-only here; destroy them at their source")

    @abstractmethod
    def find(self, namespace: str) -> NamespaceKeys | None:
        """Return the namespace's keys; None for a namespace that is not encrypted.

        Called for every request, lookup, put and stream, so an implementation must answer from memory. A
        stream that begins after a key was removed must not use it. Raises `PermissionDenied` for a namespace
        whose keys were destroyed or are unavailable; then nothing of it is read or stored. Must raise no
        other error, because the client would treat it as a failure of a shard."""
