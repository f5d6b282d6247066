"""Encrypts chunks before they leave a client; decrypts and verifies the frames that it reads.

Each head range is encrypted with AES-256-GCM, so a tensor-parallel rank decrypts only what it reads. In the
manifest, the tag replaces the digest of the head; sizes and offsets are those of an unencrypted chunk. A
chunk's own key is derived from the namespace's data key, a random salt, the chunk key, the codec, the number
of tokens and the layout, so a shard cannot pass off one chunk or encoding as another. The nonce is the number
of the head range within the chunk: no two puts share a salt, so no nonce is used twice under one key. Side
frames have the highest numbers, by their kinds, so that a shard cannot pass off one kind as another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import (
    DIGEST_BYTES,
    SALT_BYTES,
    ChunkManifest,
    HeadRange,
    Part,
)
from kintsugi.store.protocol.interface import Buffer
from kintsugi.store.protocol.keys import DATA_KEY_BYTES, NamespaceKeys

NONCE_BYTES = 12
NUMBERS = 1 << 8 * NONCE_BYTES
"""The side frame of kind k has the number `NUMBERS` - k: no head range has it."""


class ChunkCipher:
    """Encrypts and decrypts the frames of one chunk. Holds only the chunk's own key."""

    def __init__(self, data_key: bytes, manifest: ChunkManifest) -> None:
        """`manifest` must describe an encrypted chunk. Cost: one HKDF."""
        assert manifest.is_encrypted
        self._manifest = manifest
        layout = manifest.layout
        groups = (f"{one.layers},{one.heads},{_describe(one.parts)}" for one in layout.groups)
        facts = "\0".join(
            map(str, ("kintsugi-chunk", int(manifest.codec), manifest.num_tokens, layout.dtype, *groups))
        )
        info = manifest.key.digest + facts.encode()
        kdf = HKDF(algorithm=SHA256(), length=DATA_KEY_BYTES, salt=manifest.salt, info=info)
        self._aes = AES(kdf.derive(data_key))

    def encrypt_frame(self, layer: int, frame: memoryview, into: memoryview) -> bytes:
        """Encrypt a whole frame into a buffer of the same size. Returns the tags of its heads."""
        heads = HeadRange(0, self._manifest.layout.num_kv_heads)
        tags = bytearray()
        for number, part in self._parts(layer, heads):
            encryptor = Cipher(self._aes, GCM(_nonce_of(number))).encryptor()
            encryptor.update_into(frame[part], into[part])
            encryptor.finalize()
            tags += encryptor.tag
        return bytes(tags)

    def decrypt(self, layer: int, heads: HeadRange, data: memoryview, into: memoryview) -> bool:
        """Decrypt the bytes of `heads` of a layer into a buffer of the same size. Returns whether every tag
        matches; if not, the contents of `into` must not be used.

        Cost: one AES-GCM pass, and 2.5 us for each head.
        """
        start, stop = self._manifest.head_range_bytes(heads, layer)
        if not data.nbytes == into.nbytes == stop - start:
            return False
        tags = self._manifest.head_digests(layer, heads).digests
        for place, (number, part) in enumerate(self._parts(layer, heads)):
            tag = tags[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            decryptor = Cipher(self._aes, GCM(_nonce_of(number), tag)).decryptor()
            decryptor.update_into(data[part], into[part])
            try:
                decryptor.finalize()
            except InvalidTag:
                return False
        return True

    def _parts(self, layer: int, heads: HeadRange) -> list[tuple[int, slice]]:
        """Return, for each head range, its number within the chunk and its slice of the bytes of `heads`."""
        manifest = self._manifest
        if layer < 0:
            return [(NUMBERS + layer, slice(0, manifest.frame_bytes_of(layer)))]
        heads = manifest.layout.heads_of(layer, heads)
        size = manifest.layout.head_bytes(manifest.codec, manifest.num_tokens, layer)
        first = manifest.layout.first_head(layer) + heads.start
        return [(first + head, slice(head * size, (head + 1) * size)) for head in range(len(heads))]


def _describe(parts: Sequence[Part]) -> str:
    return ",".join(f"{int(part.kind)}:{part.width}" for part in parts)


def _nonce_of(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "big")


def encrypt_chunk(
    keys: NamespaceKeys, manifest: ChunkManifest, frames: Sequence[Buffer]
) -> tuple[ChunkManifest, list[memoryview]]:
    """Encrypt a chunk: return its manifest with tags instead of digests, and encrypted copies of its frames.

    Cost: one xxh3 and one AES-GCM pass, and memory for another copy of the chunk. Raises `Corrupted` if a
    digest does not match, because the tag would then confirm damaged bytes."""
    every_head = HeadRange(0, manifest.layout.num_kv_heads)
    for layer, frame in zip(manifest.layers, frames, strict=True):
        if not manifest.frame_is_intact(layer, every_head, memoryview(frame).cast("B")):
            raise Corrupted(f"the frame of layer {layer} does not match the manifest's digest; send it again")
    key_id = keys.newest_id
    salted = replace(manifest, key_id=key_id, salt=os.urandom(SALT_BYTES))
    cipher = ChunkCipher(keys.by_id[key_id], salted)
    encrypted = [memoryview(bytearray(memoryview(frame).nbytes)) for frame in frames]
    tags = [
        cipher.encrypt_frame(layer, memoryview(frame).cast("B"), into)
        for layer, frame, into in zip(manifest.layers, frames, encrypted, strict=True)
    ]
    return replace(salted, digests=b"".join(tags)), encrypted


def is_readable(keys: NamespaceKeys | None, manifest: ChunkManifest) -> bool:
    """Return whether a client with these keys may read the chunk. In a namespace with keys, an unencrypted
    chunk is never read, because a client without the keys could have written it."""
    return manifest.key_id in keys.by_id if keys is not None else not manifest.is_encrypted
