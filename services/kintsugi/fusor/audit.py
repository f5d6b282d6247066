"""Audits: how far a stored chunk is from what the model computes for the same tokens, and how far it may be.

Shadowing compares answers, and an answer needs few layers of few chunks, so damaged KV changes it rarely. The
KV itself shows the damage at once. A chunk depends on its tokens and on what it is prefilled behind alone.
Prefilling it again gives the same KV but for two things: the rounding of the engine's dtype, which varies
with what else is in the batch, and what the codec drops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from kintsugi.core.accounting import ChunkAudit
from kintsugi.core.errors import NotFound
from kintsugi.core.layout import ChunkLost, ChunkManifest, Codec, LayerFrame, codec_named
from kintsugi.fusor.codecs import decode_frame

ROUNDING = 0.25
"""Largest relative error of a layer's keys or values that rounding explains. The largest seen between two
attention kernels in bfloat16 was 0.06 (0.13 against float32, in a chunk of 4 tokens): it takes a factor of 2
to 4 for models that are deeper or noisier. Damage that costs answers is larger: values that are 1.5 times too
large are off by 0.5, other tokens' KV by more than 1."""
CODEC_ERRORS: Mapping[Codec, float] = {
    Codec.RAW: 0.0,
    Codec.INT8: 0.02,
    Codec.INT8_SINKS: 0.02,
    Codec.FP8: 0.04,
    Codec.FP8_SINKS: 0.04,
}
"""What a codec may add to that, because it drops bits: 0.006 and 0.027 were the most that was measured."""
DIGITS = 5


def measure_errors(
    manifest: ChunkManifest, stored: Iterable[LayerFrame | ChunkLost], computed: Sequence[memoryview]
) -> ChunkAudit:
    """Compare the stored frames of every head of one chunk with the frames that the engine has just computed,
    which are `raw`, layer by layer. Raises `NotFound` if the chunk is lost meanwhile, `Corrupted` for frames
    that cannot be decoded."""
    layout, num_tokens = manifest.layout, manifest.num_tokens
    errors = []
    for frame, mine in zip(stored, computed, strict=True):
        if isinstance(frame, ChunkLost):
            raise NotFound(f"the chunk cannot be read any more ({frame.reason}); it is a miss from now on")
        theirs = decode_frame(frame.data, layout, manifest.codec, num_tokens, layer=frame.layer)
        ours = decode_frame(mine, layout, Codec.RAW, num_tokens, layer=frame.layer)
        errors.append([relative_error(*pair) for pair in zip(theirs, ours, strict=True)])
    keys, values = zip(*errors, strict=True)
    return ChunkAudit(manifest.codec.name.lower(), list(keys), list(values))


def relative_error(stored: Tensor, computed: Tensor) -> float:
    """The L2 norm of the difference ÷ that of `computed`. NaN where either holds one."""
    stored, computed = stored.float(), computed.float()
    difference, norm = (stored - computed).norm(), computed.norm()
    return round(float(difference / norm), DIGITS) if difference else 0.0


def tolerance_of(codec: Codec) -> float:
    """The relative error beyond which a layer of a chunk in this codec is damaged."""
    return ROUNDING + CODEC_ERRORS[codec]


def find_damage(audit: ChunkAudit) -> str | None:
    """Describe the layer that is furthest off, if rounding and the codec do not explain it."""
    tolerance = tolerance_of(codec_named(audit.codec))
    errors = chain(
        ((error, "keys", layer) for layer, error in enumerate(audit.key_errors)),
        ((error, "values", layer) for layer, error in enumerate(audit.value_errors)),
    )
    # Written so that NaN is beyond every tolerance.
    damaged = [one for one in errors if not one[0] <= tolerance]
    if not damaged:
        return None
    error, what, layer = max(damaged)
    return f"the {what} of layer {layer} are off by {error:.0%}, and {audit.codec} explains {tolerance:.0%}"
