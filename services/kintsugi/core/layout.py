"""What a stored chunk KV looks like: layout, codecs, frame sizes, manifest.

A **frame** is one layer of one chunk. It is head-major, ``[kv_heads, 2, tokens, head_dim]`` with K
before V, so that a tensor-parallel rank reads one contiguous byte range, and K is stored before RoPE:
it is rotated once, at load. Where layers differ in shape, or store something else than K and V, the layout
has **groups** of consecutive layers that are alike, and a head is its parts in a row, ``[tokens, width]``
each. Quantised codecs keep a head's scales behind its elements. A digest covers each head of each frame, so
a rank can verify exactly the bytes it read. The store never decodes; `fusor.codecs` encodes and decodes on
tensors.

A chunk may have a **prior frame** before its layers, ``[priors, tokens]`` of one byte each. It counts as
layer `PRIOR_LAYER`. See docs/adr/0009.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import xxhash

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, check_namespace

PLAIN_FORMAT, FORMAT = FORMATS = (2, 3)
"""How the bytes of a chunk may be laid out. `PLAIN_FORMAT` is a uniform layout and nothing else, `FORMAT`
holds everything. A chunk is written in the older one where that can hold it: versions that know only that one
still read it, and an upgrade can be undone."""

DIGEST_BYTES = 16
"""xxh3-128 per (layer, kv head)."""
PRIOR_LAYER = -1
"""The place of the prior frame among the layers: before the first."""
PRIORS_MAX = 16
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
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
"""What a prior and a namespace key's id may be called."""


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


class PartKind(IntEnum):
    """What a part of a head is. Ids are on disk and on the wire: never renumber."""

    K = 1
    """Before RoPE."""
    V = 2
    KV = 3
    """One tensor that K (before RoPE) and V both follow from, stored once."""
    LATENT = 4
    """What multi-head latent attention makes K and V from; one for all heads."""
    ROTARY = 5
    """The key of multi-head latent attention that is rotated, before RoPE; one for all heads."""


class Part(NamedTuple):
    """One tensor of a head, `[tokens, width]`."""

    kind: PartKind
    width: int


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers of one shape; a layer that uses another layer's KV has no frame and is left out."""

    layers: int
    heads: int
    """Ranges of a frame that a tensor-parallel rank may read by themselves; 1 for a latent."""
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
                "layout.groups", "name at least one part, each once, in the order of their ids"
            )

    @property
    def shape(self) -> tuple[int, tuple[Part, ...]]:
        """What two layers of one group have in common."""
        return self.heads, self.parts

    @cached_property
    def has_k_and_v(self) -> bool:
        """Whether a head is K and V, the parts that quantised codecs encode."""
        return [part.kind for part in self.parts] == [PartKind.K, PartKind.V]

    @property
    def is_uniform(self) -> bool:
        """Whether a layout of this group alone needs no groups."""
        return self.has_k_and_v and self.parts[0].width == self.parts[1].width

    @cached_property
    def width(self) -> int:
        """Elements of a head per token."""
        return sum(part.width for part in self.parts)

    def head_bytes(self, codec: Codec, num_tokens: int, dtype: str) -> int:
        """Bytes of one head of one frame. Raises `InvalidField` for a codec that does not encode the parts.

        Quantised, behind each other: K and V, each `[tokens, width]`, one byte an element, without the sinks;
        an exponent for K's scales, one for V's; scales of K `[width]`, of V `[tokens]`; the sinks' K and V.
        """
        if codec is Codec.RAW:
            return self.width * num_tokens * ELEMENT_BYTES[dtype]
        if not self.has_k_and_v:
            raise InvalidField(
                "codec", f"{codec.name.lower()} encodes K and V alone; store this model's KV in raw"
            )
        sinks = codec.sinks_of(num_tokens)
        small = num_tokens - sinks
        scales = EXPONENTS_BYTES + SCALE_BYTES * (self.parts[0].width + small)
        return self.width * (small + sinks * ELEMENT_BYTES[dtype]) + scales


@dataclass(frozen=True)
class KVLayout:
    """Shape of a model's KV: what decides a frame's size.

    A layout is *uniform* where every layer stores K and V of one shape. `of_groups` makes any other.
    """

    num_layers: int
    """Layers that have a frame."""
    num_kv_heads: int
    """Heads of the layer that has most."""
    head_dim: int
    """Width of the widest part of any layer."""
    dtype: str
    """Element type before encoding: a key of `ELEMENT_BYTES`."""
    groups: tuple[LayerGroup, ...] = ()
    """The layers in order, neighbours of one shape in one group. Empty for a uniform layout."""

    @staticmethod
    def of_groups(groups: Sequence[LayerGroup], dtype: str) -> KVLayout:
        """The layout of layers in this order. Joins neighbours of one shape. Raises `InvalidField`."""
        if not groups:
            raise InvalidField("layout.groups", "name at least one group of layers")
        joined = tuple(_join(groups))
        return KVLayout(
            sum(group.layers for group in joined),
            max(group.heads for group in joined),
            max(part.width for group in joined for part in group.parts),
            dtype,
            () if len(joined) == 1 and joined[0].is_uniform else joined,
        )

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
        for group in self.groups:
            if self.num_kv_heads % group.heads:
                raise InvalidField(
                    "layout.groups",
                    f"{group.heads} heads do not divide {self.num_kv_heads}, the most of any layer: ranks "
                    "read the same share of every layer",
                )
        if self.groups and not self._groups_agree():
            raise InvalidField("layout.groups", "disagree with the other fields; use KVLayout.of_groups")

    def _groups_agree(self) -> bool:
        """Whether the groups are joined, and the other fields are what follows from them."""
        layers = sum(group.layers for group in self.groups)
        heads = max(group.heads for group in self.groups)
        width = max(part.width for group in self.groups for part in group.parts)
        joined = tuple(_join(self.groups)) == self.groups
        uniform = len(self.groups) == 1 and self.groups[0].is_uniform
        fields = (self.num_layers, self.num_kv_heads, self.head_dim)
        return joined and not uniform and (layers, heads, width) == fields

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers in order; one group for a uniform layout."""
        if self.groups:
            return self.groups
        parts = (Part(PartKind.K, self.head_dim), Part(PartKind.V, self.head_dim))
        return (LayerGroup(self.num_layers, self.num_kv_heads, parts),)

    @cached_property
    def _group_of_layer(self) -> tuple[LayerGroup, ...]:
        return tuple(chain.from_iterable([group] * group.layers for group in self.layer_groups))

    @cached_property
    def _first_heads(self) -> tuple[int, ...]:
        """For each layer, how many heads the layers before it have together."""
        return tuple(accumulate((group.heads for group in self._group_of_layer), initial=0))

    def group_of(self, layer: int | None) -> LayerGroup:
        """The group of a layer, which may be left out for a uniform layout."""
        if not self.groups:
            return self.layer_groups[0]
        assert layer is not None, "these layers differ: name one"
        assert layer >= 0
        return self._group_of_layer[layer]

    def holds(self, codec: Codec) -> bool:
        """Whether `codec` encodes every layer."""
        return codec is Codec.RAW or all(group.has_k_and_v for group in self.layer_groups)

    def first_head(self, layer: int) -> int:
        """How many heads the layers before this one have together."""
        return self._first_heads[layer] if self.groups else layer * self.num_kv_heads

    def heads_of(self, layer: int | None, heads: HeadRange) -> HeadRange:
        """The heads of a layer that are the same share of it as `heads` is of `num_kv_heads`. For the range
        of a tensor-parallel rank, they are what `HeadRange.of_rank` gives for the layer's own heads."""
        if not self.groups:
            return heads
        own = self.group_of(layer).heads
        return HeadRange(heads.start * own // self.num_kv_heads, -(-heads.stop * own // self.num_kv_heads))

    def head_bytes(self, codec: Codec, num_tokens: int, layer: int | None = None) -> int:
        """Bytes of one head of one frame. `layer` may be left out for a uniform layout. Raises `InvalidField`
        for a codec that does not encode the layer's parts."""
        return self.group_of(layer).head_bytes(codec, num_tokens, self.dtype)

    def frame_bytes(self, codec: Codec, num_tokens: int, layer: int | None = None) -> int:
        """Bytes of one layer of a chunk. `layer` may be left out for a uniform layout."""
        group = self.group_of(layer)
        return group.heads * group.head_bytes(codec, num_tokens, self.dtype)

    def frame_runs(self, codec: Codec, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """For each group, the bytes of a frame and the number of frames."""
        if not self.groups:
            return ((self.frame_bytes(codec, num_tokens), self.num_layers),)
        return tuple(
            (group.heads * group.head_bytes(codec, num_tokens, self.dtype), group.layers)
            for group in self.layer_groups
        )

    def chunk_bytes(self, codec: Codec, num_tokens: int) -> int:
        """Bytes of all layers of a chunk."""
        if not self.groups:
            return self.num_layers * self.frame_bytes(codec, num_tokens)
        return sum(size * count for size, count in self.frame_runs(codec, num_tokens))

    @property
    def digests_bytes(self) -> int:
        return sum(group.layers * group.heads for group in self.layer_groups) * DIGEST_BYTES


def _join(groups: Iterable[LayerGroup]) -> list[LayerGroup]:
    """The groups, those beside each other joined where they have one shape."""
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
    """The place of the first one among the digests of the chunk."""
    head_bytes: int
    """Bytes that each digest covers."""
    digests: bytes
    """`DIGEST_BYTES` for each head."""


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
    """`DIGEST_BYTES` for the prior frame where there is one, then for each layer and head, row-major."""
    format: int = PLAIN_FORMAT
    """One of `FORMATS`. The chunk's record on disk and its manifest on the wire name it."""
    key_id: str = ""
    """The namespace key that the frames are encrypted with; the digests are then AES-GCM tags, which only
    its holder can check. Empty: not encrypted."""
    salt: bytes = b""
    """`SALT_BYTES` random bytes from which an encrypted chunk's own key is derived; else none."""
    priors: tuple[str, ...] = ()
    """Names of the rows of the prior frame; without any, there is none."""
    asked_at_s: float = field(default=0.0, compare=False)
    """When the save was asked for, in Unix seconds. An erasure that was asked for then or later covers the
    chunk. 0 in a put: now, by the store's clock."""

    @staticmethod
    def of(
        space: ChunkSpace,
        key: ChunkKey,
        anchor: int | None,
        num_tokens: int,
        layout: KVLayout,
        codec: Codec,
        frames: Sequence[memoryview | bytes],
        priors: tuple[str, ...] = (),
        asked_at_s: float = 0.0,
    ) -> ChunkManifest:
        """The manifest of a chunk of `space` whose frames are the prior frame, if there are `priors`, and its
        layers. Cost: one xxh3 pass over them."""
        sizes = [len(priors) * num_tokens] if priors else []
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
            anchor=anchor,
            digests=b"".join(digests_of(frame, size) for frame, size in zip(frames, sizes, strict=True)),
            format=FORMAT if priors or layout.groups else PLAIN_FORMAT,
            priors=priors,
            asked_at_s=asked_at_s,
        )

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not 0 < self.num_tokens <= TOKENS_MAX:
            raise InvalidField("manifest.num_tokens", f"{self.num_tokens} is outside [1, {TOKENS_MAX}]")
        if not 0.0 <= self.asked_at_s < math.inf:
            raise InvalidField("manifest.asked_at_s", f"{self.asked_at_s} is not a time in Unix seconds")
        if self.format != PLAIN_FORMAT or self.priors or self.key_id or self.salt or self.layout.groups:
            self._check_format()
        needed = self.layout.digests_bytes + DIGEST_BYTES * bool(self.priors)
        if len(self.digests) != needed:
            raise InvalidField(
                "manifest.digests", f"has {len(self.digests)} bytes; this layout needs {needed}"
            )

    @property
    def is_encrypted(self) -> bool:
        return bool(self.key_id)

    def as_plain(self) -> ChunkManifest | None:
        """The chunk in `PLAIN_FORMAT`, without its priors; None where that cannot hold the layers. (The head
        ranges of an encrypted chunk are numbered, so it keeps its priors.)"""
        if self.layout.groups or self.key_id:
            return None
        layers = self.digests[DIGEST_BYTES if self.priors else 0 :]
        return replace(self, format=PLAIN_FORMAT, priors=(), digests=layers)

    def _check_format(self) -> None:
        """Raise `InvalidField` for what the format cannot hold."""
        if self.format not in FORMATS:
            raise InvalidField("manifest.format", f"{self.format} is not one of {FORMATS}")
        if self.format == PLAIN_FORMAT:
            raise InvalidField(
                "manifest.format",
                f"{PLAIN_FORMAT} holds no layer groups, priors or encrypted frames; write {FORMAT}",
            )
        if len(self.priors) > PRIORS_MAX or len(set(self.priors)) < len(self.priors):
            raise InvalidField("manifest.priors", f"name at most {PRIORS_MAX}, each once")
        salt_bytes = SALT_BYTES if self.key_id else 0
        if len(self.salt) != salt_bytes:
            raise InvalidField("manifest.salt", f"has {len(self.salt)} bytes; this chunk needs {salt_bytes}")
        if self.key_id:
            _check_name("manifest.key_id", self.key_id)
        for name in self.priors:
            _check_name("manifest.priors", name)
        self.layout.frame_runs(self.codec, self.num_tokens)  # raises for a codec that cannot hold the layers

    @property
    def frame_bytes(self) -> int:
        """Bytes of the largest frame: of each one, where the layout is uniform and there is no prior."""
        if not self.layout.groups and not self.priors:
            return self.layout.frame_bytes(self.codec, self.num_tokens)
        return max(size for size, _ in self.frame_runs)

    @property
    def frame_runs(self) -> tuple[tuple[int, int], ...]:
        """Bytes of a frame and number of such frames in a row, for all frames in order."""
        runs = self.layout.frame_runs(self.codec, self.num_tokens)
        return ((self.prior_bytes, 1), *runs) if self.priors else runs

    @property
    def prior_bytes(self) -> int:
        """Bytes of the prior frame; 0 where there is none."""
        return len(self.priors) * self.num_tokens

    @property
    def chunk_bytes(self) -> int:
        return self.layout.chunk_bytes(self.codec, self.num_tokens) + self.prior_bytes

    @property
    def first_layer(self) -> int:
        """The layer of the first frame: 0, or `PRIOR_LAYER`."""
        return PRIOR_LAYER if self.priors else 0

    @property
    def layers(self) -> range:
        """The layers that have frames, with `PRIOR_LAYER` where there are priors."""
        return range(self.first_layer, self.layout.num_layers)

    @property
    def num_frames(self) -> int:
        return self.layout.num_layers - self.first_layer

    def frame_bytes_of(self, layer: int) -> int:
        """Bytes of the frame of `layer`, which may be `PRIOR_LAYER`."""
        if layer == PRIOR_LAYER:
            return self.prior_bytes
        return self.layout.frame_bytes(self.codec, self.num_tokens, layer)

    def head_range_bytes(self, heads: HeadRange, layer: int | None = None) -> tuple[int, int]:
        """Byte range of `heads` (as `KVLayout.heads_of`) within the frame of `layer`, which may be left out
        for a uniform layout. The prior frame belongs to every head."""
        if layer == PRIOR_LAYER:
            return 0, self.prior_bytes
        heads = self.layout.heads_of(layer, heads)
        size = self.layout.head_bytes(self.codec, self.num_tokens, layer)
        return heads.start * size, heads.stop * size

    def range_bytes_max(self, heads: HeadRange) -> int:
        """Bytes of `heads` in the frame where they have most."""
        layers: Iterable[int | None] = self.layers if self.layout.groups or self.priors else (None,)
        ranges = (self.head_range_bytes(heads, layer) for layer in layers)
        return max(stop - start for start, stop in ranges)

    def head_digests(self, layer: int, heads: HeadRange) -> HeadDigests:
        """The digests of `heads` of the frame of `layer`."""
        assert layer in self.layers
        assert 0 <= heads.start < heads.stop <= self.layout.num_kv_heads
        if layer == PRIOR_LAYER:
            return HeadDigests(0, self.prior_bytes, self.digests[:DIGEST_BYTES])
        heads = self.layout.heads_of(layer, heads)
        first = bool(self.priors) + self.layout.first_head(layer) + heads.start
        return HeadDigests(
            first,
            self.layout.head_bytes(self.codec, self.num_tokens, layer),
            self.digests[first * DIGEST_BYTES : (first + len(heads)) * DIGEST_BYTES],
        )

    def frame_is_intact(self, layer: int, heads: HeadRange, frame: memoryview) -> bool:
        """Whether `frame` (the bytes of `heads` of `layer`) matches its digests. Cost: one xxh3 pass. Of an
        encrypted frame only the length is checked: whoever decrypts it verifies it."""
        _, size, expected = self.head_digests(layer, heads)
        if frame.nbytes != size * len(expected) // DIGEST_BYTES:
            return False
        return bool(self.key_id) or digests_of(frame, size) == expected


def _check_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidField(field, f"{name!r} does not match {_NAME.pattern}")


def digests_of(frame: memoryview | bytes, head_bytes: int) -> bytes:
    """xxh3-128 of each head of a frame, concatenated."""
    view = memoryview(frame).cast("B")
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + head_bytes]) for start in range(0, len(view), head_bytes)
    )


def check_frames(manifest: ChunkManifest, frame_sizes: Sequence[int]) -> None:
    """Raise `InvalidField` unless the frames are exactly those that the manifest announces."""
    if len(frame_sizes) != manifest.num_frames:
        prior = " and a prior frame" if manifest.priors else ""
        raise InvalidField(
            "frames", f"{len(frame_sizes)} frames for a layout of {manifest.layout.num_layers} layers{prior}"
        )
    for index, (layer, size) in enumerate(zip(manifest.layers, frame_sizes, strict=True)):
        needed = manifest.frame_bytes_of(layer)
        if size != needed:
            raise InvalidField(f"frames[{index}]", f"has {size} bytes; the manifest needs {needed}")


@dataclass(frozen=True)
class LayerFrame:
    """The bytes of some heads of one layer of one chunk, verified, as they arrive."""

    chunk: int
    """Index into the request's keys."""
    layer: int
    data: memoryview
    """The bytes of `ChunkManifest.head_range_bytes`, valid until the next frame is taken."""


@dataclass(frozen=True)
class ChunkLost:
    """In place of a frame: this chunk can no longer be read. Its other frames do not follow."""

    chunk: int
    layer: int
    reason: str
    is_unanswered: bool = False
    """Whether it may be there, in a shard that was asked and did not answer."""
