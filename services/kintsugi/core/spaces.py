"""The identity of chunks: token ids, model fingerprint, chunk space, chunk key, anchor.

Identity is over token ids, never text: the same text tokenises differently in another context, and a
digest of ids is the same on every machine (Python's `hash()` is not). See docs/adr/0003.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

import blake3
import numpy as np
import numpy.typing as npt
import xxhash

from kintsugi.core.errors import InvalidField

KEY_BYTES = 32
FORMAT_VERSION = 2
"""Version of the meaning of stored token data. It is part of every fingerprint, so requests do not find
chunks of another version. The layout of a chunk's bytes has its own version, `layout.FORMAT`."""

ANCHOR_TOKENS = 32
"""Number of tokens in the window that an anchor hashes. Anchors find known chunks at any offset of a plain
prompt."""

ANCHOR_BYTES = 8
_ALL_IDS = b"all"
"""Prefix of the ids in the hash over a whole chunk, so that a chunk of `ANCHOR_TOKENS` ids does not have the
anchor of a window."""

NAME_KEY_BYTES = 32
"""Length of the secret that names an encrypted namespace's chunks."""

NAMESPACE_BYTES_MAX = 128
NAMESPACE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/-]*"

SHOWN_CHARS = 80
_HEX_KEY = re.compile(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")

ID_BYTES = 4
"""Size of a token id."""


@dataclass(frozen=True, slots=True, repr=False)
class TokenIds(Sequence[int]):
    """Token ids as bytes, the form that every digest reads.

    Incoming ids are converted to this type, and to a list only for calls to vLLM. Microseconds for 4,000 ids
    on one x86 core, compared with two alternatives::

                               TokenIds   tuple   numpy uint32
        from a protobuf list          6      95              2
        into a `ChunkKey`             6     102              6
        pickled and back (Ray)        5     120              8
        joined from 10 parts          1      24              1
        into vLLM's list             43       6             42
        sum                          61     347             59

    A numpy array is as fast, but it is mutable, has no hash and compares element by element, so a frozen
    dataclass cannot hold it. A tuple needs up to 40 bytes per id, `TokenIds` needs 4.
    """

    data: bytes = b""
    """Little-endian u32."""

    @staticmethod
    def of(ids: Sequence[int]) -> TokenIds:
        """Convert ids; `TokenIds` are returned as they are.

        Raises `InvalidField` for values that are not integers of 32 bits: a rounded or wrapped id would
        identify another chunk.
        """
        if isinstance(ids, TokenIds):
            return ids
        if len(ids) == 0:
            return TokenIds()
        try:
            array = np.asarray(ids)
        except ValueError:
            raise InvalidField("token_ids", "must be one flat list of ids") from None
        fits = array.dtype.kind in "iu" and int(array.min()) >= 0 and int(array.max()) < 1 << 32
        if array.ndim != 1 or not fits:
            raise InvalidField("token_ids", "every id must be an integer in [0, 2**32)")
        return TokenIds(array.astype("<u4").tobytes())

    @staticmethod
    def join(parts: Iterable[TokenIds]) -> TokenIds:
        return TokenIds(b"".join(part.data for part in parts))

    def to_array(self) -> npt.NDArray[np.uint32]:
        """The ids, read-only and without a copy."""
        return np.frombuffer(self.data, "<u4")

    def to_list(self) -> list[int]:
        ids: list[int] = self.to_array().tolist()
        return ids

    def __len__(self) -> int:
        return len(self.data) // ID_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.to_list())

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...

    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if isinstance(index, int):
            return int(self.to_array()[index])
        start, stop, step = index.indices(len(self))
        if step != 1:
            return TokenIds(self.to_array()[index].tobytes())
        return TokenIds(self.data[ID_BYTES * start : ID_BYTES * max(start, stop)])

    def __repr__(self) -> str:
        return f"TokenIds.of({self.to_list()})"


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """`token_ids` as little-endian u32, the form that every digest reads. Raises `InvalidField`."""
    return TokenIds.of(token_ids).data


def _hash(data: bytes | memoryview, name_key: bytes) -> blake3.blake3:
    """blake3 over `data`, keyed unless `name_key` is empty."""
    return blake3.blake3(data, key=name_key) if name_key else blake3.blake3(data)


def check_namespace(namespace: str) -> str:
    """Return the namespace, which is mandatory: a tenant's name and part of every key. Raises
    `InvalidField`."""
    if not isinstance(namespace, str) or not namespace:
        raise InvalidField("namespace", "is mandatory; name the tenant whose chunks are used")
    if len(namespace) > NAMESPACE_BYTES_MAX or not re.fullmatch(NAMESPACE_PATTERN, namespace):
        raise InvalidField(
            "namespace",
            f"{namespace!r} must start with a letter or digit, hold only letters, digits and . _ - / "
            f"and have at most {NAMESPACE_BYTES_MAX} characters",
        )
    return namespace


@dataclass(frozen=True)
class ModelFingerprint:
    """Digest of everything that determines a token's KV. Chunks of another fingerprint are misses."""

    digest: bytes
    """`KEY_BYTES` bytes. Other digests include it without its length, so the length is fixed."""

    def __post_init__(self) -> None:
        if len(self.digest) != KEY_BYTES:
            raise InvalidField("fingerprint", f"has {len(self.digest)} bytes; it must have {KEY_BYTES}")

    @staticmethod
    def of(parts: dict[str, str]) -> ModelFingerprint:
        """Make the fingerprint from facts by name: weights, architecture, rope, kv_dtype, tokenizer (see
        `models.checkpoint`)."""
        hasher = blake3.blake3(f"kintsugi-model-{FORMAT_VERSION}".encode())
        for name in sorted(parts):
            for text in (name, parts[name]):
                data = text.encode()
                hasher.update(len(data).to_bytes(8, "little"))
                hasher.update(data)
        return ModelFingerprint(hasher.digest())

    @property
    def hex(self) -> str:
        """The fingerprint as 64 hexadecimal digits."""
        return self.digest.hex()

    def __str__(self) -> str:
        return self.hex[:16]


@dataclass(frozen=True)
class ChunkSpace:
    """The set of chunks that one request may use: model, tenant, and what chunks were prefilled after.

    In a space with a context, a chunk is *prepared*: it was prefilled after the prefix (the beginning of the
    service's prompts) and the context. Its *plain copy* was prefilled after the prefix alone. The KV of
    prefix and context is not stored. See docs/adr/0010.
    """

    fingerprint: ModelFingerprint
    """The model that computed the chunks."""
    namespace: str
    """The tenant that owns the chunks."""
    prefix_token_ids: tuple[int, ...] = ()
    """Tokens that each chunk was prefilled after."""
    portable: bool = True
    """Whether its chunks may be used in a prompt that does not start with the prefix."""
    context_token_ids: tuple[int, ...] = ()
    """Natural text between the prefix and each chunk: the same for all chunks, and not part of prompts."""
    name_key: bytes = field(default=b"", repr=False)
    """Secret from which digest, chunk keys and anchors of an encrypted namespace are derived, so that a
    guessed text cannot be confirmed without it. Empty: the namespace has no key."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if len(self.name_key) not in (0, NAME_KEY_BYTES):
            raise InvalidField("name_key", f"has {len(self.name_key)} bytes; it must have {NAME_KEY_BYTES}")
        token_bytes(self.prefix_token_ids)
        token_bytes(self.context_token_ids)

    @cached_property
    def plain(self) -> ChunkSpace:
        """The space of the plain copies; this space itself if it has no context."""
        return replace(self, context_token_ids=()) if self.context_token_ids else self

    def copies(self, plain: bool = True) -> tuple[ChunkSpace, ...]:
        """Return the spaces in which a chunk is stored, this one first; without `plain` if ``plain`` is
        false."""
        return (self, self.plain) if plain and self.context_token_ids else (self,)

    @cached_property
    def lead_token_ids(self) -> tuple[int, ...]:
        """Tokens that a chunk of this space is prefilled after: the prefix and the context."""
        return self.prefix_token_ids + self.context_token_ids

    @cached_property
    def context_keys(self) -> tuple[ChunkKey, ...]:
        """The key of the context as a chunk of the plain space; empty without a context."""
        return (ChunkKey.of(self.plain, self.context_token_ids),) if self.context_token_ids else ()

    def context_keys_of(self, passages: Sequence[Sequence[int]]) -> tuple[ChunkKey, ...]:
        """Return the keys of the copies that passages have as chunks."""
        return tuple(ChunkKey.of(copy, passage) for passage in passages for copy in self.copies())

    @cached_property
    def digest(self) -> bytes:
        """Digest of all fields, 32 bytes."""
        if self.context_token_ids:
            context = token_bytes(self.context_token_ids)
            return _hash(b"kintsugi-context\0" + self.plain.digest + context, self.name_key).digest()
        name = self.namespace.encode()
        hasher = _hash(b"kintsugi-space\0" + self.fingerprint.digest, self.name_key)
        hasher.update(len(name).to_bytes(4, "little") + name + bytes([self.portable]))
        hasher.update(token_bytes(self.prefix_token_ids))
        return hasher.digest()

    def admits(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether chunks of this space may be used in the prompt."""
        return self.portable or self.prefix_matches(prompt_token_ids)

    def prefix_matches(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the prompt begins with the prefix."""
        return tuple(prompt_token_ids[: len(self.prefix_token_ids)]) == self.prefix_token_ids

    def first_place(self, prompt_token_ids: Sequence[int]) -> int | None:
        """The position directly after the prefix; None if the prompt has another prefix."""
        return len(self.prefix_token_ids) if self.prefix_matches(prompt_token_ids) else None

    def space_at(self, start: int, prompt_token_ids: Sequence[int]) -> ChunkSpace:
        """Return the space of the copy to use for a chunk at ``start``: the plain space directly after the
        prefix, where the plain copy is exact."""
        return self.plain if start == self.first_place(prompt_token_ids) else self


@dataclass(frozen=True, order=True, slots=True)
class ChunkKey:
    """The key of a chunk: blake3(chunk space ‖ token ids), keyed with the space's name key if it has one."""

    digest: bytes
    """The 32 bytes."""

    def __post_init__(self) -> None:
        if len(self.digest) != KEY_BYTES:
            raise InvalidField("key", f"has {len(self.digest)} bytes; a chunk key has {KEY_BYTES}")

    @staticmethod
    def of(space: ChunkSpace, token_ids: Sequence[int]) -> ChunkKey:
        """The key of the chunk that these token ids make in a space."""
        return ChunkKey.of_bytes(space, token_bytes(token_ids))

    @staticmethod
    def of_bytes(space: ChunkSpace, tokens: bytes) -> ChunkKey:
        """Make the key from the output of `token_bytes`."""
        return ChunkKey.in_space(space.digest, tokens, space.name_key)

    @staticmethod
    def in_space(space_digest: bytes, tokens: bytes, name_key: bytes = b"") -> ChunkKey:
        """Make the key from the digest and the name key of the chunk space."""
        return ChunkKey(_hash(space_digest + tokens, name_key).digest())

    @staticmethod
    def from_hex(text: str, where: str = "key") -> ChunkKey:
        """Parse the hexadecimal form. ``where``: its field. Raises `InvalidField`."""
        if not _HEX_KEY.fullmatch(text):
            raise InvalidField(where, f"{text[:SHOWN_CHARS]!r} is not {2 * KEY_BYTES} hexadecimal digits")
        return ChunkKey(bytes.fromhex(text))

    @property
    def hex(self) -> str:
        """The key as 64 hexadecimal digits."""
        return self.digest.hex()

    def __str__(self) -> str:
        return self.hex[:16]


def anchors_of(token_ids: Sequence[int], name_key: bytes = b"") -> tuple[int, ...]:
    """Return the anchors of a chunk, as 64-bit hashes: of its first `ANCHOR_TOKENS` ids, of its last, and of
    all. Equal anchors are returned once. The hash is xxh3, or keyed blake3 in a space with a name key. Empty
    for a shorter chunk, which can be named only by spans.

    First and last anchor find a chunk in a prompt (`anchored_at`). The anchor of all ids is equal for the
    copies of one text in different spaces, and for them alone."""
    if len(token_ids) < ANCHOR_TOKENS:
        return ()
    ends = [token_ids[:ANCHOR_TOKENS], token_ids[-ANCHOR_TOKENS:]]
    windows = [anchor for end in ends for anchor in anchors_at_every_offset(end, name_key)]
    whole = memoryview(_ALL_IDS + token_bytes(token_ids))
    return tuple(dict.fromkeys((*windows, _anchor(whole, name_key))))


def anchored_at(anchors: Sequence[int]) -> tuple[int, int]:
    """Return the anchors of a chunk's first and last ids. There must be one anchor at least."""
    return anchors[0], anchors[-2] if len(anchors) > 1 else anchors[0]


def _anchor(data: memoryview, name_key: bytes) -> int:
    if not name_key:
        return xxhash.xxh3_64_intdigest(data)
    return int.from_bytes(_hash(data, name_key).digest(ANCHOR_BYTES), "little")


def anchors_at_every_offset(token_ids: Sequence[int], name_key: bytes = b"") -> list[int]:
    """Return the anchor of each window of `ANCHOR_TOKENS` ids. Cost: one xxh3 or blake3 of 128 bytes per
    offset."""
    data = memoryview(token_bytes(token_ids))
    width, count = 4 * ANCHOR_TOKENS, len(token_ids) - ANCHOR_TOKENS + 1
    windows = (data[4 * i : 4 * i + width] for i in range(max(count, 0)))
    if not name_key:
        return [xxhash.xxh3_64_intdigest(window) for window in windows]
    return [_anchor(window, name_key) for window in windows]


@dataclass(frozen=True)
class Span:
    """Tokens `[start, end)` of a prompt that are one chunk."""

    start: int
    """Position of the first token."""
    end: int
    """Position after the last token."""
    key: ChunkKey | None = None
    """The chunk's key, if the caller knows it."""

    @property
    def num_tokens(self) -> int:
        """Length of the chunk."""
        return self.end - self.start
