"""The interface to a key management service: the keys that name and encrypt a namespace's chunks.

Only clients of the store (engines, gateways, precompute) have keys; shards store and stream ciphertext. A
namespace has one *name key*, from which chunk keys and anchors are derived, and one or more *data keys*: the
newest encrypts, all of them decrypt. Rotation adds a data key and keeps the name key, so chunks stay hits.
Once the last copy of a data key is destroyed, the chunks encrypted with it are erased, wherever they lie.
`store.client.key_file` reads keys from a file, such as a mounted Secret. See docs/adr/0009.
"""

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
"""Per namespace: rotate, then retire the old ones."""
_KEY_ID_BYTES = 8


def key_id_of(data_key: bytes) -> str:
    """The id of a data key in manifests: 16 hexadecimal digits derived from the key itself. A client with
    other keys therefore sees a chunk that it cannot read, never one that looks damaged."""
    kdf = HKDF(algorithm=SHA256(), length=_KEY_ID_BYTES, salt=None, info=b"kintsugi-key-id")
    return kdf.derive(data_key).hex()


@dataclass(frozen=True)
class NamespaceKeys:
    """The keys of one namespace."""

    name_key: bytes = field(repr=False)
    """`NAME_KEY_BYTES` bytes, the same for as long as the namespace's chunks shall be found."""
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
        """The id of the data key that new chunks are encrypted with."""
        return next(iter(self.by_id))


class KeySource(ABC):
    """Where a client of the store gets keys. Thread-safe."""

    def replace(self, namespace: str) -> int:
        """Destroy the data keys of a namespace, and of parts that have their own, and give each a new one.
        Returns how many were destroyed. Raises `InvalidField` for a source that it cannot change."""
        raise InvalidField("keys", "cannot be changed here; destroy them where they come from")

    @abstractmethod
    def find(self, namespace: str) -> NamespaceKeys | None:
        """The namespace's keys; None for a namespace that is not encrypted.

        Called for every request, lookup, put and stream, so an implementation answers from memory. Streams
        that begin after a key was removed do not use it. Raises `PermissionDenied` for a namespace whose keys
        were destroyed or are not at hand: then nothing of it is read or stored. No other error, because the
        client would take it for a failure of a shard.
        """
