"""How a chunk is encrypted, byte by byte: stored chunks are read by this for as long as their keys live."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import DIGEST_BYTES, ChunkManifest, HeadRange, KVLayout, SideFrame
from kintsugi.store.client.chunk_cipher import ChunkCipher, encrypt_chunk, is_readable
from kintsugi.store.protocol.keys import NamespaceKeys, key_id_of
from tests.contracts.store_contract import LAYOUT, make_chunk, make_mixed_chunk

DATA_KEY = bytes(range(32))
KEYS = NamespaceKeys(bytes(32), (DATA_KEY,))
SALT = bytes(range(16))
HEADS = LAYOUT.num_kv_heads


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: SALT[:size])


def hkdf(key: bytes, salt: bytes, info: bytes, size: int) -> bytes:
    """RFC 5869 with SHA-256, for at most one block."""
    extracted = hmac.new(salt, key, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()[:size]


def test_every_head_range_is_aes_gcm_under_a_key_of_the_chunk() -> None:
    manifest, frames = make_chunk(range(40))
    encrypted, ciphertexts = encrypt_chunk(KEYS, manifest, frames)
    assert encrypted.key_id == key_id_of(DATA_KEY) == hkdf(DATA_KEY, bytes(32), b"kintsugi-key-id", 8).hex()
    assert encrypted.salt == SALT
    info = manifest.key.digest + b"kintsugi-chunk\x001\x0040\x00bfloat16\x003,4,1:16,2:16"
    gcm = AESGCM(hkdf(DATA_KEY, SALT, info, 32))
    size = LAYOUT.head_bytes(manifest.codec, manifest.num_tokens)
    for number in range(LAYOUT.num_layers * HEADS):
        layer, head = divmod(number, HEADS)
        tag = encrypted.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        body = bytes(ciphertexts[layer][head * size : (head + 1) * size])
        expected = frames[layer][head * size : (head + 1) * size]
        assert gcm.decrypt(number.to_bytes(12, "big"), body + tag, None) == expected


def test_all_but_salt_key_id_and_tags_is_as_it_was() -> None:
    manifest, frames = make_chunk(range(40))
    encrypted, ciphertexts = encrypt_chunk(KEYS, manifest, frames)
    decrypted = replace(encrypted, key_id="", salt=b"", digests=manifest.digests)
    assert decrypted == manifest
    assert [len(one) for one in ciphertexts] == [len(one) for one in frames]


def read(manifest: ChunkManifest, layer: int, heads: HeadRange, data: bytes) -> bytes | None:
    into = memoryview(bytearray(len(data)))
    intact = ChunkCipher(DATA_KEY, manifest).decrypt(layer, heads, memoryview(data), into)
    return bytes(into) if intact else None


@pytest.mark.parametrize("heads", [HeadRange(0, 4), HeadRange(1, 3), HeadRange(3, 4)])
@pytest.mark.parametrize("layer", range(3))
def test_any_range_of_heads_is_decrypted_by_itself(layer: int, heads: HeadRange) -> None:
    manifest, frames = make_chunk(range(40))
    encrypted, ciphertexts = encrypt_chunk(KEYS, manifest, frames)
    start, stop = manifest.head_range_bytes(heads)
    data = bytes(ciphertexts[layer][start:stop])
    assert read(encrypted, layer, heads, data) == frames[layer][start:stop]
    assert read(encrypted, (layer + 1) % 3, heads, data) is None, "bytes of another layer"
    assert read(encrypted, layer, heads, data[:-1]) is None, "cut bytes"
    damaged = bytearray(data)
    damaged[-1] ^= 1
    assert read(encrypted, layer, heads, bytes(damaged)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"key": make_chunk(range(41))[0].key},
        {"salt": bytes(16)},
        {"layout": replace(LAYOUT, dtype="float16")},
        {"layout": KVLayout.uniform(6, 2, 16, "bfloat16")},
    ],
    ids=["key", "salt", "dtype", "shape"],
)
def test_what_the_manifest_says_is_verified_with_the_bytes(change: dict[str, object]) -> None:
    manifest, frames = make_chunk(range(40))
    encrypted, ciphertexts = encrypt_chunk(KEYS, manifest, frames)
    forged = replace(encrypted, **change)  # type: ignore[arg-type]
    one_head = HeadRange(0, 1)
    _, stop = encrypted.head_range_bytes(one_head)
    data = bytes(ciphertexts[0][:stop])
    assert read(encrypted, 0, one_head, data) is not None
    assert read(forged, 0, one_head, data) is None


def test_a_side_frame_is_not_read_as_one_of_another_kind() -> None:
    manifest, frames = make_mixed_chunk(range(40))
    encrypted, ciphertexts = encrypt_chunk(KEYS, manifest, frames)
    unknown, scores = manifest.side_frames
    every_head = HeadRange(0, manifest.layout.num_kv_heads)
    data = bytes(ciphertexts[1])
    assert read(encrypted, -scores.kind, every_head, data) == frames[1]
    forged = replace(encrypted, side_frames=(unknown, SideFrame(scores.kind + 1, scores.size_bytes)))
    assert read(forged, -scores.kind - 1, every_head, data) is None


def test_damaged_frames_are_not_encrypted() -> None:
    manifest, frames = make_chunk(range(40))
    with pytest.raises(Corrupted, match="layer 1"):
        encrypt_chunk(KEYS, manifest, [frames[0], bytes(len(frames[1])), frames[2]])


def test_a_chunk_is_read_with_the_keys_of_its_namespace_alone() -> None:
    manifest, frames = make_chunk(range(40))
    encrypted, _ = encrypt_chunk(KEYS, manifest, frames)
    rotated = NamespaceKeys(bytes(32), (bytes(32), DATA_KEY))
    others = NamespaceKeys(bytes(32), (bytes(32),))
    assert [is_readable(keys, encrypted) for keys in (KEYS, rotated, others, None)] == [
        True,
        True,
        False,
        False,
    ]
    assert [is_readable(keys, manifest) for keys in (KEYS, None)] == [False, True]
