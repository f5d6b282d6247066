"""The format of stored chunk KV: layout, codecs, frame sizes, manifest.

A **frame** is one layer of one chunk. It is head-major, ``[kv_heads, 2, tokens, head_dim]`` with K before V,
so that a tensor-parallel rank reads one contiguous byte range. K is stored before RoPE and rotated once, at
load. A layout has **groups** of consecutive equal layers. In a layer that stores something other than K and
V, a head is the sequence of its parts, ``[tokens, width]`` each. Quantised codecs store a head's scales after
its elements. A digest covers each head of each frame, so a rank can verify exactly the bytes it read. The
store never decodes; `fusor.codecs` does.

A chunk may have **side frames** before its layers: bytes that belong to the whole chunk, identified by a
kind. As a layer number, kind k is -k, so the frames of a chunk are in ascending order. A reader skips kinds
that it does not need. See docs/adr/0009.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import xxhash

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, check_namespace

FORMAT = 1
"""Version of the chunk layout. Chunks of another version are rejected."""

DIGEST_BYTES = 16
"""xxh3-128 per (layer, kv head)."""
SALT_BYTES = 16
"""Length of the salt, random for every put of an encrypted chunk: no two puts share an encryption key."""

TOKENS_MAX = 1 << 20
ANCHORS_MAX = 16
CONTEXT_KEYS_MAX = 64
SIDE_FRAMES_MAX = 16
SIDE_KIND_MAX = 255
LAYERS_MAX = 1024
HEADS_MAX = 1024
HEAD_DIM_MAX = 1 << 16
"""Largest width of a part. A recurrent layer stores its inputs as one head."""
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 1
"""Size of a scale: a float with three bits of exponent and five of mantissa. Its rounding costs little
accuracy, because elements are divided by the rounded scale."""
EXPONENTS_BYTES = 2
"""Size of a head's two exponents, to which its scales of K and of V are relative."""
SINK_TOKENS = 4
INT4_KEY_TOKENS = 32
"""Tokens of a channel of K that share a scale and a zero point in `Codec.INT4`."""
INT4_VALUE_CHANNELS = 64
"""Channels of a token of V that share a scale in `Codec.INT4`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
"""Valid ids of namespace keys."""


class Codec(IntEnum):
    """How a frame's head is encoded. Ids are on disk and on the wire: never renumber.

    Quantised codecs have one scale per channel of K and one per token of V. ``*_SINKS`` do not quantise the
    first `SINK_TOKENS` tokens of a chunk: at the start of a sequence, their values can be so large that they
    would determine K's scales.
    """

    RAW = 1
    """The engine's own 16- or 32-bit elements."""
    INT8 = 2
    FP8 = 3
    """e4m3: three bits of mantissa, no infinity."""
    INT8_SINKS = 4
    FP8_SINKS = 5
    INT4 = 6
    """Two elements a byte. Scales cover few elements (`INT4_KEY_TOKENS`, `INT4_VALUE_CHANNELS`), and K has
    zero points, too. Only K's sinks are not quantised."""

    def sinks_of(self, num_tokens: int) -> int:
        """Return the number of leading tokens that are not quantised."""
        return min(num_tokens, SINK_TOKENS) if self in _WITH_SINKS else 0


_WITH_SINKS = frozenset((Codec.INT8_SINKS, Codec.FP8_SINKS, Codec.INT4))


def codec_named(name: str) -> Codec:
    """Return the codec of this name. Raises `InvalidField`."""
    try:
        return Codec[name.upper()]
    except KeyError:
        known = ", ".join(codec.name.lower() for codec in Codec)
        raise InvalidField("codec", f"{name!r} is not one of {known}") from None


class PartKind(IntEnum):
    """The kind of a part of a head. Ids are on disk and on the wire: never renumber."""

    K = 1
    """Before RoPE."""
    V = 2
    KV = 3
    """One tensor from which both K (before RoPE) and V are computed, stored once."""
    LATENT = 4
    """The latent from which multi-head latent attention computes K and V; one for all heads."""
    ROTARY = 5
    """The part of the key of multi-head latent attention that is rotated, before RoPE; one for all heads."""
    INPUT = 6
    """A token's input to the convolution and scan of a recurrent layer."""
    GATE = 7
    """A token's input to the decay and the write strength of a recurrent layer. Never quantised: errors of
    decays compound."""


class SideKind(IntEnum):
    """The kind of a side frame. Ids are on disk and on the wire: never renumber. Stores accept any id from 1
    to `SIDE_KIND_MAX`, so a new kind needs no change to stores."""

    PATCH = 1
    """Low-rank approximation of the change that a context makes to the chunk's KV."""
    SCORES = 2
    """A score for each token."""


class SideFrame(NamedTuple):
    """A frame that belongs to the whole chunk. Ranks read it whole."""

    kind: int
    size_bytes: int


class Part(NamedTuple):
    """One tensor of a head, `[tokens, width]`."""

    kind: PartKind
    width: int


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers of one shape; a layer that uses another layer's KV has no frame and is left out."""

    layers: int
    heads: int
    """Heads of a frame, which a tensor-parallel rank can read separately; 1 for a latent."""
    parts: tuple[Part, ...]
    """The tensors of a head, in ascending order of their kinds."""

    def __post_init__(self) -> None:
        bounds = [("layers", self.layers, LAYERS_MAX), ("heads", self.heads, HEADS_MAX)]
        bounds += [(f"width of {part.kind.name}", part.width, HEAD_DIM_MAX) for part in self.parts]
        for name, value, bound in bounds:
            if not 0 < value <= bound:
                raise InvalidField("layout.groups", f"{name} {value} is outside [1, {bound}]")
        kinds = [part.kind for part in self.parts]
        if not kinds or kinds != sorted(set(kinds)):
            raise InvalidField(
                "layout.groups", "must have at least one part, in the order of their ids, without duplicates"
            )

    @property
    def shape(self) -> tuple[int, tuple[Part, ...]]:
        """Heads and parts, which are equal in all layers of a group."""
        return self.heads, self.parts

    @cached_property
    def has_k_and_v(self) -> bool:
        """Whether a head is K and V."""
        return [part.kind for part in self.parts] == [PartKind.K, PartKind.V]

    @cached_property
    def gates(self) -> int:
        """Elements of a head per token that no codec quantises."""
        return sum(part.width for part in self.parts if part.kind is PartKind.GATE)

    def is_encoded_by(self, codec: Codec) -> bool:
        """Whether `codec` encodes the parts. Quantised codecs encode K and V, and all but `Codec.INT4` the
        inputs of a recurrent layer."""
        if codec is Codec.INT4:
            return self.has_k_and_v and all(part.width % 2 == 0 for part in self.parts)
        return codec is Codec.RAW or self.has_k_and_v or self.parts[0].kind is PartKind.INPUT

    @cached_property
    def width(self) -> int:
        """Elements of a head per token."""
        return sum(part.width for part in self.parts)

    def head_bytes(self, codec: Codec, num_tokens: int, dtype: str) -> int:
        """Return the bytes of one head of one frame. Raises `InvalidField` for a codec that does not encode
        the parts.

        A quantised head is a sequence: K and V, each `[tokens, width]`, one byte per element, without the
        sinks; an exponent for K's scales, one for V's; scales of K `[width]`, of V `[tokens]`; the sinks' K
        and V. An input of a recurrent layer is encoded as K is, without a V; its gates follow, as they are.
        """
        if codec is Codec.RAW:
            return self.width * num_tokens * ELEMENT_BYTES[dtype]
        if not self.has_k_and_v and not self.is_encoded_by(codec):
            raise InvalidField("codec", f"{codec.name.lower()} encodes other tensors; use raw for this model")
        sinks = codec.sinks_of(num_tokens)
        if codec is Codec.INT4:
            key = self.parts[0].width * sinks * ELEMENT_BYTES[dtype]
            return sum(self.int4_bytes(num_tokens, sinks)) + EXPONENTS_BYTES + key
        small = num_tokens - sinks
        coded = self.width - self.gates
        exact = (coded * sinks + self.gates * num_tokens) * ELEMENT_BYTES[dtype]
        scales = EXPONENTS_BYTES + SCALE_BYTES * (self.parts[0].width + small * self.has_k_and_v)
        return coded * small + scales + exact

    def int4_bytes(self, num_tokens: int, sinks: int) -> tuple[int, int, int, int]:
        """Return the bytes of a head's K and V in `Codec.INT4`, of K's scales and zero points, and of V's
        scales. Raises `InvalidField` for an odd width."""
        key, value = (part.width for part in self.parts)
        if key % 2 or value % 2:
            raise InvalidField(
                "codec", f"int4 stores two elements a byte; widths {key}, {value} are not even"
            )
        groups = -(-(num_tokens - sinks) // INT4_KEY_TOKENS)
        return (
            (num_tokens - sinks) * key // 2,
            num_tokens * value // 2,
            2 * SCALE_BYTES * key * groups,
            SCALE_BYTES * num_tokens * -(-value // INT4_VALUE_CHANNELS),
        )


@dataclass(frozen=True)
class KVLayout:
    """Shape of a model's KV, which determines a frame's size."""

    groups: tuple[LayerGroup, ...]
    """The layers that have a frame, in order. Consecutive groups differ in shape."""
    dtype: str
    """Element type before encoding: a key of `ELEMENT_BYTES`."""

    @staticmethod
    def uniform(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVLayout:
        """The layout of a model whose layers all store K and V of one shape. Raises `InvalidField`."""
        parts = (Part(PartKind.K, head_dim), Part(PartKind.V, head_dim))
        return KVLayout((LayerGroup(num_layers, num_kv_heads, parts),), dtype)

    @staticmethod
    def of_groups(groups: Iterable[LayerGroup], dtype: str) -> KVLayout:
        """The layout of layers in this order. Joins neighbours of one shape. Raises `InvalidField`."""
        return KVLayout(tuple(_join(groups)), dtype)

    def __post_init__(self) -> None:
        if not self.groups:
            raise InvalidField("layout.groups", "must have at least one group of layers")
        if self.num_layers > LAYERS_MAX:
            raise InvalidField("layout.groups", f"{self.num_layers} layers; at most {LAYERS_MAX} are stored")
        if self.dtype not in ELEMENT_BYTES:
            raise InvalidField("layout.dtype", f"{self.dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
        for group in self.groups:
            if self.num_kv_heads % group.heads:
                raise InvalidField(
                    "layout.groups",
                    f"{group.heads} heads do not divide {self.num_kv_heads}, the most of any layer; ranks "
                    "read the same share of every layer",
                )
        if tuple(_join(self.groups)) != self.groups:
            raise InvalidField("layout.groups", "consecutive groups of one shape must be one group")

    @cached_property
    def num_layers(self) -> int:
        """Layers that have a frame."""
        return sum(group.layers for group in self.groups)

    @cached_property
    def num_kv_heads(self) -> int:
        """Number of heads of the layer with the most heads."""
        return max(group.heads for group in self.groups)

    @cached_property
    def head_dim(self) -> int:
        """Width of the widest part of any layer."""
        return max(part.width for group in self.groups for part in group.parts)

    @cached_property
    def _group_of_layer(self) -> tuple[LayerGroup, ...]:
        return tuple(chain.from_iterable([group] * group.layers for group in self.groups))

    @cached_property
    def _first_heads(self) -> tuple[int, ...]:
        """For each layer, the total number of heads of the layers before it."""
        return tuple(accumulate((group.heads for group in self._group_of_layer), initial=0))

    def group_of(self, layer: int | None) -> LayerGroup:
        """The group of a layer, which may be left out where all layers are alike."""
        if len(self.groups) == 1:
            return self.groups[0]
        assert layer is not None, "these layers differ: name one"
        assert layer >= 0
        return self._group_of_layer[layer]

    def holds(self, codec: Codec) -> bool:
        """Whether `codec` encodes every layer."""
        return all(group.is_encoded_by(codec) for group in self.groups)

    def first_head(self, layer: int) -> int:
        """The total number of heads of the layers before this one."""
        return self._first_heads[layer]

    def heads_of(self, layer: int | None, heads: HeadRange) -> HeadRange:
        """Scale `heads`, a range of `num_kv_heads`, to the layer's own number of heads. For the range of a
        tensor-parallel rank, the result equals `HeadRange.of_rank` for the layer's heads."""
        own = self.group_of(layer).heads
        return HeadRange(heads.start * own // self.num_kv_heads, -(-heads.stop * own // self.num_kv_heads))

    def head_bytes(self, codec: Codec, num_tokens: int, layer: int | None = None) -> int:
        """Bytes of one head of one frame. `layer` may be left out where all layers are alike. Raises
        `InvalidField` for a codec that does not encode the layer's parts."""
        return self.group_of(layer).head_bytes(codec, num_tokens, self.dtype)

    def frame_bytes(self, codec: Codec, num_tokens: int, layer: int | None = None) -> int:
        """Bytes of one layer of a chunk. `layer` may be left out where all layers are alike."""
        group = self.group_of(layer)
        return group.heads * group.head_bytes(codec, num_tokens, self.dtype)

    def frame_runs(self, codec: Codec, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """For each group, the bytes of a frame and the number of frames."""
        return tuple(
            (group.heads * group.head_bytes(codec, num_tokens, self.dtype), group.layers)
            for group in self.groups
        )

    def chunk_bytes(self, codec: Codec, num_tokens: int) -> int:
        """Bytes of all layers of a chunk."""
        return sum(size * count for size, count in self.frame_runs(codec, num_tokens))

    @cached_property
    def digests_bytes(self) -> int:
        """Bytes of the digests of all layers."""
        return sum(group.layers * group.heads for group in self.groups) * DIGEST_BYTES


def _join(groups: Iterable[LayerGroup]) -> list[LayerGroup]:
    """Join neighbouring groups of one shape."""
    joined: list[LayerGroup] = []
    for group in groups:
        if joined and joined[-1].shape == group.shape:
            group = LayerGroup(joined.pop().layers + group.layers, *group.shape)
        joined.append(group)
    return joined


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


class HeadDigests(NamedTuple):
    """The digests of some heads of a frame."""

    first: int
    """Index of the first digest among the digests of the chunk."""
    head_bytes: int
    """Bytes that each digest covers."""
    digests: bytes
    """`DIGEST_BYTES` for each head."""


@dataclass(frozen=True)
class ChunkManifest:
    """The description of a stored chunk. Committing it makes the chunk visible."""

    key: ChunkKey
    space_digest: bytes
    fingerprint: ModelFingerprint
    namespace: str
    num_tokens: int
    layout: KVLayout
    codec: Codec
    anchors: tuple[int, ...]
    """Hashes of some tokens, by which the chunk is found in a prompt (`spaces.anchors_of`); empty for a chunk
    that can be named only by spans."""
    digests: bytes
    """`DIGEST_BYTES` for each side frame, then for each layer and head, row-major."""
    key_id: str = ""
    """Id of the namespace key that encrypts the frames; the digests are then AES-GCM tags, which can be
    checked only with the key. Empty: not encrypted."""
    salt: bytes = b""
    """`SALT_BYTES` random bytes from which an encrypted chunk's own key is derived; otherwise empty."""
    side_frames: tuple[SideFrame, ...] = ()
    """In the order in which they are stored: the highest kind first."""
    asked_at_s: float = field(default=0.0, compare=False)
    """When the save was requested, in Unix seconds. An erasure requested at that time or later covers the
    chunk. 0 in a put: now, by the store's clock."""
    context_keys: tuple[ChunkKey, ...] = ()
    """Keys, as chunks of the namespace, of the texts between the prefix and the chunk when it was prefilled.
    Deleting or erasing one of them does the same to this chunk. The texts were prefilled with the chunk, so
    what they were prepared after as chunks does not matter."""

    @staticmethod
    def of(
        space: ChunkSpace,
        key: ChunkKey,
        anchors: tuple[int, ...],
        num_tokens: int,
        layout: KVLayout,
        codec: Codec,
        frames: Sequence[memoryview | bytes],
        side_kinds: Sequence[int] = (),
        asked_at_s: float = 0.0,
        context_keys: tuple[ChunkKey, ...] = (),
    ) -> ChunkManifest:
        """Return the manifest of a chunk in `space`. `frames`: its side frames, one for each of `side_kinds`
        in descending order, then its layers. `context_keys`: of the chunk's own context, if it has one
        instead of the space's. Cost: one xxh3 pass over the frames."""
        side_frames = tuple(
            SideFrame(kind, len(frame)) for kind, frame in zip(side_kinds, frames, strict=False)
        )
        sizes = [frame.size_bytes for frame in side_frames]
        sizes += [layout.head_bytes(codec, num_tokens, layer) for layer in range(layout.num_layers)]
        if len(frames) != len(sizes):
            raise InvalidField("frames", f"{len(frames)} frames; this chunk has {len(sizes)}")
        return ChunkManifest(
            key=key,
            space_digest=space.digest,
            fingerprint=space.fingerprint,
            namespace=space.namespace,
            num_tokens=num_tokens,
            layout=layout,
            codec=codec,
            anchors=anchors,
            digests=b"".join(digests_of(frame, size) for frame, size in zip(frames, sizes, strict=True)),
            side_frames=side_frames,
            context_keys=context_keys or space.context_keys,
            asked_at_s=asked_at_s,
        )

    @property
    def erased_by(self) -> tuple[ChunkKey, ...]:
        """The keys whose erasure includes this chunk: its own and those of its context."""
        return self.key, *self.context_keys

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not 0 < self.num_tokens <= TOKENS_MAX:
            raise InvalidField("manifest.num_tokens", f"{self.num_tokens} is outside [1, {TOKENS_MAX}]")
        if not 0.0 <= self.asked_at_s < math.inf:
            raise InvalidField("manifest.asked_at_s", f"{self.asked_at_s} is not a time in Unix seconds")
        salt_bytes = SALT_BYTES if self.key_id else 0
        if len(self.salt) != salt_bytes:
            raise InvalidField("manifest.salt", f"has {len(self.salt)} bytes; this chunk needs {salt_bytes}")
        if self.key_id and not _NAME.fullmatch(self.key_id):
            raise InvalidField("manifest.key_id", f"{self.key_id!r} does not match {_NAME.pattern}")
        for name, bound in (("anchors", ANCHORS_MAX), ("context_keys", CONTEXT_KEYS_MAX)):
            values = getattr(self, name)
            if len(values) > bound or len(set(values)) < len(values):
                raise InvalidField(
                    f"manifest.{name}", f"has {len(values)} items; at most {bound} different ones are allowed"
                )
        if self.side_frames:
            self._check_side_frames()
        self.layout.frame_runs(
            self.codec, self.num_tokens
        )  # raises for a codec that cannot encode the layers
        needed = self.layout.digests_bytes + DIGEST_BYTES * len(self.side_frames)
        if len(self.digests) != needed:
            raise InvalidField(
                "manifest.digests", f"has {len(self.digests)} bytes; this layout needs {needed}"
            )

    def _check_side_frames(self) -> None:
        kinds = [frame.kind for frame in self.side_frames]
        if len(kinds) > SIDE_FRAMES_MAX or kinds != sorted(set(kinds), reverse=True):
            raise InvalidField(
                "manifest.side_frames",
                f"has kinds {kinds}; at most {SIDE_FRAMES_MAX} are allowed, in descending order",
            )
        for kind, size_bytes in self.side_frames:
            if not 0 < kind <= SIDE_KIND_MAX or size_bytes <= 0:
                raise InvalidField(
                    "manifest.side_frames",
                    f"kind {kind} of {size_bytes} bytes; kinds are 1 to {SIDE_KIND_MAX}, sizes are positive",
                )

    @property
    def is_encrypted(self) -> bool:
        return bool(self.key_id)

    @property
    def frame_bytes(self) -> int:
        """Bytes of the largest frame."""
        return max(size for size, _ in self.frame_runs)

    @property
    def frame_runs(self) -> tuple[tuple[int, int], ...]:
        """Bytes of a frame and number of such frames in a row, for all frames in order."""
        runs = self.layout.frame_runs(self.codec, self.num_tokens)
        return (*((frame.size_bytes, 1) for frame in self.side_frames), *runs)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all frames."""
        side_bytes = sum(frame.size_bytes for frame in self.side_frames)
        return self.layout.chunk_bytes(self.codec, self.num_tokens) + side_bytes

    @property
    def layers(self) -> Sequence[int]:
        """The frames in order: side frames as negative numbers, then layers."""
        layers = range(self.layout.num_layers)
        return (*(-frame.kind for frame in self.side_frames), *layers) if self.side_frames else layers

    @property
    def num_frames(self) -> int:
        return self.layout.num_layers + len(self.side_frames)

    def place_of(self, layer: int) -> int:
        """Index of the frame of `layer` among the chunk's frames."""
        return len(self.side_frames) + layer if layer >= 0 else self.layers.index(layer)

    def frame_bytes_of(self, layer: int) -> int:
        """Bytes of the frame of `layer`, which may be a side frame."""
        if layer < 0:
            return self.side_frames[self.place_of(layer)].size_bytes
        return self.layout.frame_bytes(self.codec, self.num_tokens, layer)

    def head_range_bytes(self, heads: HeadRange, layer: int | None = None) -> tuple[int, int]:
        """Byte range of `heads` (as `KVLayout.heads_of`) within the frame of `layer`, which may be left out
        where all layers are alike. A side frame belongs to every head."""
        if layer is not None and layer < 0:
            return 0, self.frame_bytes_of(layer)
        heads = self.layout.heads_of(layer, heads)
        size = self.layout.head_bytes(self.codec, self.num_tokens, layer)
        return heads.start * size, heads.stop * size

    def range_bytes_max(self, heads: HeadRange) -> int:
        """Largest number of bytes that `heads` have in a frame."""
        ranges = (self.head_range_bytes(heads, layer) for layer in self.layers)
        return max(stop - start for start, stop in ranges)

    def head_digests(self, layer: int, heads: HeadRange) -> HeadDigests:
        """The digests of `heads` of the frame of `layer`."""
        assert layer in self.layers
        assert 0 <= heads.start < heads.stop <= self.layout.num_kv_heads
        if layer < 0:
            first = self.place_of(layer)
            digest = self.digests[first * DIGEST_BYTES : (first + 1) * DIGEST_BYTES]
            return HeadDigests(first, self.frame_bytes_of(layer), digest)
        heads = self.layout.heads_of(layer, heads)
        first = len(self.side_frames) + self.layout.first_head(layer) + heads.start
        return HeadDigests(
            first,
            self.layout.head_bytes(self.codec, self.num_tokens, layer),
            self.digests[first * DIGEST_BYTES : (first + len(heads)) * DIGEST_BYTES],
        )

    def frame_is_intact(self, layer: int, heads: HeadRange, frame: memoryview) -> bool:
        """Whether `frame` (the bytes of `heads` of `layer`) matches its digests. Cost: one xxh3 pass. For an
        encrypted frame only the length is checked: decryption verifies it."""
        _, size, expected = self.head_digests(layer, heads)
        if frame.nbytes != size * len(expected) // DIGEST_BYTES:
            return False
        return bool(self.key_id) or digests_of(frame, size) == expected


def digests_of(frame: memoryview | bytes, head_bytes: int) -> bytes:
    """xxh3-128 of each head of a frame, concatenated."""
    view = memoryview(frame).cast("B")
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + head_bytes]) for start in range(0, len(view), head_bytes)
    )


def check_frames(manifest: ChunkManifest, frame_sizes: Sequence[int]) -> None:
    """Raise `InvalidField` unless the frames are exactly those that the manifest declares."""
    if len(frame_sizes) != manifest.num_frames:
        beside = f" and {len(manifest.side_frames)} side frames" if manifest.side_frames else ""
        raise InvalidField(
            "frames", f"{len(frame_sizes)} frames for a layout of {manifest.layout.num_layers} layers{beside}"
        )
    for index, (layer, size) in enumerate(zip(manifest.layers, frame_sizes, strict=True)):
        needed = manifest.frame_bytes_of(layer)
        if size != needed:
            raise InvalidField(f"frames[{index}]", f"has {size} bytes; the manifest needs {needed}")
