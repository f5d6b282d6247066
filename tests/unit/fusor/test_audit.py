"""How far off a stored chunk is, and which errors rounding and the codec do not explain."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kintsugi.core.accounting import ChunkAudit
from kintsugi.core.errors import NotFound
from kintsugi.core.exchange import ChunkLost, LayerFrame
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.fusor.audit import find_damage, measure_errors, relative_error, tolerance_of
from kintsugi.fusor.codecs import encode_frame

SPACE = ChunkSpace(ModelFingerprint.of({"model": "toy"}), "acme")
LAYERS, TOKENS, HEADS, DIM = 3, 20, 2, 16
LAYOUT = KVLayout.uniform(LAYERS, HEADS, DIM, "bfloat16")

Layer = tuple[Tensor, Tensor]


@pytest.fixture
def layers() -> list[Layer]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(LAYERS, 2, TOKENS, HEADS, DIM, generator=generator).bfloat16()
    return [(key, value) for key, value in drawn]


def measure(stored: list[Layer], computed: list[Layer], codec: Codec = Codec.RAW) -> ChunkAudit:
    frames = [encode_frame(*layer, codec) for layer in stored]
    tokens = range(TOKENS)
    manifest = ChunkManifest.of(SPACE, ChunkKey.of(SPACE, tokens), (), TOKENS, LAYOUT, codec, frames)
    arriving = (LayerFrame(0, layer, frame) for layer, frame in enumerate(frames))
    return measure_errors(manifest, arriving, [encode_frame(*layer, Codec.RAW) for layer in computed])


def test_errors_by_hand() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one, one) == 0.0
    assert relative_error(1.5 * one, one) == 0.5
    assert relative_error(0 * one, one) == 1.0
    assert relative_error(-one, one) == 2.0
    assert relative_error(0 * one, 0 * one) == 0.0
    assert relative_error(one, 0 * one) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan, 4.0]), one))


def test_errors_are_by_layer_and_of_keys_and_values_apart(layers: list[Layer]) -> None:
    stored = [*layers]
    stored[1] = (layers[1][0], 1.5 * layers[1][1])
    stored[2] = (0 * layers[2][0], layers[2][1])
    audit = measure(stored, layers)
    assert audit.codec == "raw"
    assert audit.key_errors == [0.0, 0.0, 1.0]
    assert audit.value_errors == pytest.approx([0.0, 0.5, 0.0], abs=2e-3)


def test_one_damaged_head_of_all_shows_in_its_layer(layers: list[Layer]) -> None:
    key, value = layers[1][0], layers[1][1].clone()
    value[:, -1] = 0
    audit = measure([layers[0], (key, value), layers[2]], layers)
    assert audit.value_errors[1] == pytest.approx(math.sqrt(1 / HEADS), abs=0.1)
    damage = find_damage(audit)
    assert damage is not None
    assert damage.startswith("the values of layer 1 are off by")


@pytest.mark.parametrize("codec", list(Codec))
def test_what_a_codec_drops_is_far_within_its_tolerance(layers: list[Layer], codec: Codec) -> None:
    audit = measure(layers, layers, codec)
    worst = max(*audit.key_errors, *audit.value_errors)
    assert (worst == 0.0) is (codec is Codec.RAW)
    assert worst < tolerance_of(codec) / 4
    assert find_damage(audit) is None


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("what", ["keys", "values"])
def test_the_verdict_is_by_the_codec_of_the_stored_chunk(codec: Codec, what: str) -> None:
    def audit(error: float) -> ChunkAudit:
        sound, found = [0.01, 0.01], [0.0, error]
        name = codec.name.lower()
        return ChunkAudit(name, found, sound) if what == "keys" else ChunkAudit(name, sound, found)

    assert find_damage(audit(tolerance_of(codec))) is None
    for error in (tolerance_of(codec) + 0.001, 1.0, math.inf, math.nan):
        damage = find_damage(audit(error))
        assert damage is not None
        assert f"the {what} of layer 1 are off by" in damage


def test_a_chunk_that_is_lost_meanwhile_is_not_judged(layers: list[Layer]) -> None:
    frames = [encode_frame(*layer, Codec.RAW) for layer in layers]
    manifest = ChunkManifest.of(SPACE, ChunkKey.of(SPACE, [1]), (), TOKENS, LAYOUT, Codec.RAW, frames)

    def arriving() -> Iterator[LayerFrame | ChunkLost]:
        yield LayerFrame(0, 0, frames[0])
        yield ChunkLost(0, 1, "evicted")

    with pytest.raises(NotFound, match="evicted"):
        measure_errors(manifest, arriving(), frames)
