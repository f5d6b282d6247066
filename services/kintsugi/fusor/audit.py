"""Audits compare a stored chunk with the KV that the model computes for the same tokens.

The evidence compares answers, and an answer depends on few layers of few chunks, so damaged KV rarely
changes it. The KV itself shows the damage at once. A chunk's KV depends only on its tokens and the tokens
before them, so a second prefill gives the same KV except for two differences: the rounding of the engine's
dtype, which varies with the batch, and the loss of the codec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from kintsugi.core.accounting import ChunkAudit
from kintsugi.core.errors import NotFound
from kintsugi.core.exchange import ChunkLost, LayerFrame
from kintsugi.core.layout import ChunkManifest, Codec, codec_named
from kintsugi.fusor.codecs import decode_frame

ROUNDING = 0.25
"""Largest relative error of a layer's keys or values that rounding explains. The largest error measured
between two attention kernels in bfloat16 was 0.06 (0.13 against float32, in a chunk of 4 tokens); the bound
adds a factor of 2 to 4 for deeper or noisier models. Damage that costs answers is larger: values that are 1.5
times too large have an error of 0.5, other tokens' KV an error above 1."""
CODEC_ERRORS: Mapping[Codec, float] = {
    Codec.RAW: 0.0,
    Codec.INT8: 0.02,
    Codec.INT8_SINKS: 0.02,
    Codec.FP8: 0.04,
    Codec.FP8_SINKS: 0.04,
    Codec.INT4: 0.2,
}
"""Additional relative error of a codec. The largest measured were 0.006 (int8) and 0.027 (fp8)."""
DIGITS = 5


def measure_errors(
    manifest: ChunkManifest, stored: Iterable[LayerFrame | ChunkLost], computed: Sequence[memoryview]
) -> ChunkAudit:
    """Compare a chunk's stored frames of all heads with the `raw` frames that the engine has just computed,
    layer by layer. Raises `NotFound` if the chunk is lost meanwhile, `Corrupted` for frames that cannot be
    decoded."""
    layout, num_tokens = manifest.layout, manifest.num_tokens
    errors = []
    for frame, mine in zip(stored, computed, strict=True):
        if isinstance(frame, ChunkLost):
            raise NotFound(f"the chunk cannot be read any more ({frame.reason}); it is now a miss")
        theirs = decode_frame(frame.data, layout, manifest.codec, num_tokens, layer=frame.layer)
        ours = decode_frame(mine, layout, Codec.RAW, num_tokens, layer=frame.layer)
        errors.append([relative_error(*pair) for pair in zip(theirs, ours, strict=True)])
    keys, values = zip(*errors, strict=True)
    return ChunkAudit(manifest.codec.name.lower(), list(keys), list(values))


def relative_error(stored: Tensor, computed: Tensor) -> float:
    """Return the L2 norm of the difference ÷ the L2 norm of `computed`. NaN if either contains NaN."""
    stored, computed = stored.float(), computed.float()
    difference, norm = (stored - computed).norm(), computed.norm()
    return round(float(difference / norm), DIGITS) if difference else 0.0


def tolerance_of(codec: Codec) -> float:
    """Return the relative error above which a layer of a chunk in this codec counts as damaged."""
    return ROUNDING + CODEC_ERRORS[codec]


def find_damage(audit: ChunkAudit) -> str | None:
    """Describe the layer with the largest error, if rounding and the codec do not explain it."""
    tolerance = tolerance_of(codec_named(audit.codec))
    errors = chain(
        ((error, "keys", layer) for layer, error in enumerate(audit.key_errors)),
        ((error, "values", layer) for layer, error in enumerate(audit.value_errors)),
    )
    # `not … <=` makes NaN exceed every tolerance.
    damaged = [one for one in errors if not one[0] <= tolerance]
    if not damaged:
        return None
    error, what, layer = max(damaged)
    return f"the {what} of layer {layer} are off by {error:.0%}; {audit.codec} explains {tolerance:.0%}"
