"""What a stored chunk KV looks like: layout, codecs, frame sizes, manifest.

A **frame** is one layer of one chunk. It is head-major, ``[kv_heads, 2, tokens, head_dim]`` with K
before V, so that a tensor-parallel rank reads one contiguous byte range, and K is stored before RoPE:
it is rotated once, at load. Quantised codecs keep a head's scales behind its elements. A digest covers
each head of each frame, so a rank can verify exactly the bytes it read. The store never decodes;
`fusor.codecs` encodes and decodes on tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, check_namespace

DIGEST_BYTES = 16
"""xxh3-128 per (layer, kv head)."""
KEY_ID_CHARS_MAX = 64

SALT_BYTES = 16
"""Random for every put of an encrypted chunk: no two puts share a chunk key."""

TOKENS_MAX = 1 << 20
LAYERS_MAX = 1024
HEADS_MAX = 1024
HEAD_DIM_MAX = 1024
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 1
"""A scale is a float of three bits of exponent and five of mantissa. Its own rounding costs little accuracy,
because elements are divided by the rounded scale."""
EXPONENTS_BYTES = 2
"""Two exponents per head: the one that its scales of K count from, and the one for V."""
SINK_TOKENS = 4


class Codec(IntEnum):
    """How a frame's head is encoded. Ids are on disk and on the wire: never renumber.

    The quantised ones have one scale per channel of K and one per token of V. ``*_SINKS`` keep the first
    `SINK_TOKENS` tokens of a chunk as they are: where a chunk starts a sequence, those can be so large
    that K's scales would be theirs.
    """

    RAW = 1
    """The engine's own 16- or 32-bit elements."""
    INT8 = 2
    FP8 = 3
    """e4m3: three bits of mantissa, no infinity."""
    INT8_SINKS = 4
    FP8_SINKS = 5

    def sinks_of(self, num_tokens: int) -> int:
        """Leading tokens that are not quantised."""
        return min(num_tokens, SINK_TOKENS) if self in (Codec.INT8_SINKS, Codec.FP8_SINKS) else 0


def codec_named(name: str) -> Codec:
    """The codec that a configuration calls `name`. Raises `InvalidField`."""
    try:
        return Codec[name.upper()]
    except KeyError:
        known = ", ".join(codec.name.lower() for codec in Codec)
        raise InvalidField("codec", f"{name!r} is not one of {known}") from None


@dataclass(frozen=True)
class KVLayout:
    """Shape of a model's KV: what decides a frame's size."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Element type before encoding: a key of `ELEMENT_BYTES`."""

    def __post_init__(self) -> None:
        for name, bound in (
            ("num_layers", LAYERS_MAX),
            ("num_kv_heads", HEADS_MAX),
            ("head_dim", HEAD_DIM_MAX),
        ):
            if not 0 < getattr(self, name) <= bound:
                raise InvalidField(f"layout.{name}", f"{getattr(self, name)} is outside [1, {bound}]")
        if self.dtype not in ELEMENT_BYTES:
            raise InvalidField("layout.dtype", f"{self.dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")

    def head_bytes(self, codec: Codec, num_tokens: int) -> int:
        """Bytes of one kv head (its K and V) of one frame.

        Quantised, behind each other: K `[tokens, head_dim]` and V `[tokens, head_dim]`, one byte an
        element, without the sinks; an exponent for K's scales, one for V's; scales of K `[head_dim]`, of V
        `[tokens]`; the sinks' K and V.
        """
        sinks = num_tokens if codec is Codec.RAW else codec.sinks_of(num_tokens)
        small = num_tokens - sinks
        scales = EXPONENTS_BYTES + SCALE_BYTES * (self.head_dim + small) if codec is not Codec.RAW else 0
        return 2 * self.head_dim * (small + sinks * ELEMENT_BYTES[self.dtype]) + scales

    def frame_bytes(self, codec: Codec, num_tokens: int) -> int:
        """Bytes of one layer of a chunk."""
        return self.num_kv_heads * self.head_bytes(codec, num_tokens)

    def chunk_bytes(self, codec: Codec, num_tokens: int) -> int:
        return self.num_layers * self.frame_bytes(codec, num_tokens)

    @property
    def digests_bytes(self) -> int:
        return self.num_layers * self.num_kv_heads * DIGEST_BYTES


@dataclass(frozen=True)
class HeadRange:
    """Contiguous kv heads `[start, stop)` that a tensor-parallel rank reads."""

    start: int
    stop: int

    @staticmethod
    def of_rank(num_kv_heads: int, rank: int, world_size: int) -> HeadRange:
        """vLLM's split: whole heads per rank, or one replicated head where ranks outnumber heads.

        One number must divide the other; vLLM itself refuses to start otherwise.
        """
        assert 0 <= rank < world_size
        assert num_kv_heads % world_size == 0 or world_size % num_kv_heads == 0
        if num_kv_heads >= world_size:
            per_rank = num_kv_heads // world_size
            return HeadRange(rank * per_rank, (rank + 1) * per_rank)
        head = rank * num_kv_heads // world_size
        return HeadRange(head, head + 1)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ChunkManifest:
    """Everything about a stored chunk but its bytes. Committing it makes the chunk visible."""

    key: ChunkKey
    space_digest: bytes
    fingerprint: ModelFingerprint
    namespace: str
    num_tokens: int
    layout: KVLayout
    codec: Codec
    anchor: int | None
    digests: bytes
    """`[layers, kv_heads]` digests of `DIGEST_BYTES` each, row-major; of an encrypted chunk, AES-GCM tags."""
    key_id: str = ""
    """Names the namespace key that its bytes are encrypted with. Empty: they are not encrypted."""
    salt: bytes = b""
    """`SALT_BYTES` random bytes from which an encrypted chunk's own key is derived."""

    @staticmethod
    def of(
        space: ChunkSpace,
        key: ChunkKey,
        anchor: int | None,
        num_tokens: int,
        layout: KVLayout,
        codec: Codec,
        frames: Sequence[memoryview | bytes],
    ) -> ChunkManifest:
        """The manifest of a chunk of `space` whose layers are `frames`. Cost: one xxh3 pass over them."""
        head_bytes = layout.head_bytes(codec, num_tokens)
        return ChunkManifest(
            key=key,
            space_digest=space.digest,
            fingerprint=space.fingerprint,
            namespace=space.namespace,
            num_tokens=num_tokens,
            layout=layout,
            codec=codec,
            anchor=anchor,
            digests=b"".join(digests_of(frame, head_bytes) for frame in frames),
        )

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not 0 < self.num_tokens <= TOKENS_MAX:
            raise InvalidField("manifest.num_tokens", f"{self.num_tokens} is outside [1, {TOKENS_MAX}]")
        if len(self.digests) != self.layout.digests_bytes:
            raise InvalidField(
                "manifest.digests",
                f"has {len(self.digests)} bytes; this layout needs {self.layout.digests_bytes}",
            )
        if len(self.key_id) > KEY_ID_CHARS_MAX:
            raise InvalidField(
                "manifest.key_id", f"has {len(self.key_id)} characters; at most {KEY_ID_CHARS_MAX}"
            )
        if len(self.salt) != (SALT_BYTES if self.key_id else 0):
            raise InvalidField(
                "manifest.salt", f"has {len(self.salt)} bytes; with a key_id it has {SALT_BYTES}, without 0"
            )

    @property
    def is_encrypted(self) -> bool:
        return bool(self.key_id)

    @property
    def frame_bytes(self) -> int:
        return self.layout.frame_bytes(self.codec, self.num_tokens)

    @property
    def chunk_bytes(self) -> int:
        return self.layout.chunk_bytes(self.codec, self.num_tokens)

    def head_range_bytes(self, heads: HeadRange) -> tuple[int, int]:
        """Byte range of `heads` within each frame."""
        size = self.layout.head_bytes(self.codec, self.num_tokens)
        return heads.start * size, heads.stop * size

    def frame_is_intact(self, layer: int, heads: HeadRange, frame: memoryview) -> bool:
        """Whether `frame` (the bytes of `heads` of `layer`) matches its digests. Cost: one xxh3 pass. Of an
        encrypted chunk only the length is checked: who decrypts it checks its tags."""
        assert 0 <= layer < self.layout.num_layers
        assert 0 <= heads.start < heads.stop <= self.layout.num_kv_heads
        size = self.layout.head_bytes(self.codec, self.num_tokens)
        if frame.nbytes != size * len(heads):
            return False
        if self.is_encrypted:
            return True
        first = layer * self.layout.num_kv_heads + heads.start
        expected = self.digests[first * DIGEST_BYTES : (first + len(heads)) * DIGEST_BYTES]
        return digests_of(frame, size) == expected


def digests_of(frame: memoryview | bytes, head_bytes: int) -> bytes:
    """xxh3-128 of each head of a frame, concatenated."""
    view = memoryview(frame).cast("B")
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + head_bytes]) for start in range(0, len(view), head_bytes)
    )


def check_frames(manifest: ChunkManifest, frame_sizes: Sequence[int]) -> None:
    """Raise `InvalidField` unless the frames are exactly those that the manifest announces."""
    if len(frame_sizes) != manifest.layout.num_layers:
        raise InvalidField(
            "frames", f"{len(frame_sizes)} frames for a layout of {manifest.layout.num_layers} layers"
        )
    for layer, size in enumerate(frame_sizes):
        if size != manifest.frame_bytes:
            raise InvalidField(
                f"frames[{layer}]", f"has {size} bytes; the manifest needs {manifest.frame_bytes}"
            )


@dataclass(frozen=True)
class LayerFrame:
    """The bytes of some heads of one layer of one chunk, verified, as they arrive."""

    chunk: int
    """Index into the request's keys."""
    layer: int
    data: memoryview
    """`KVLayout.head_bytes(codec, tokens) · len(heads)` bytes, valid until the next frame is taken."""


@dataclass(frozen=True)
class ChunkLost:
    """In place of a frame: this chunk can no longer be read. Its other frames do not follow."""

    chunk: int
    layer: int
    reason: str
