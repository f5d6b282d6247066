"""The save pass on a toy decoder: each chunk as if it had been run alone behind the prefix."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kintsugi.core.layout import Codec, KVLayout
from kintsugi.fusor import save
from kintsugi.fusor.codecs import decode_frame
from kintsugi.fusor.save import SaveItem, SavePass
from kintsugi.fusor.sliced import PassStatus
from tests.fakes.toy_stack import HEAD_DIM, KV_HEADS, VOCAB, ToyModel, ToyStack

LAYERS = 3
LAYOUT = KVLayout.uniform(LAYERS, KV_HEADS, HEAD_DIM, "float32")
STEPS_MAX = 10_000


@functools.cache
def model() -> ToyModel:
    return ToyModel(LAYERS, dtype=torch.float32)


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def saved(items: list[SaveItem], unit: int, stack: ToyStack | None = None) -> SavePass:
    work = SavePass(items, stack or ToyStack(model(), len(items)), unit, Codec.RAW)
    for _ in range(STEPS_MAX):
        if work.status is not PassStatus.RUNNING:
            break
        assert work.advance(10.0) <= 10 + unit
    work.close()
    assert work.status is PassStatus.DONE
    return work


def items_of(prefix: int, lengths: list[int]) -> list[SaveItem]:
    """Chunks of these lengths, all behind the same prefix."""
    shared = tokens(prefix, 1000)
    return [
        SaveItem(torch.cat((shared, tokens(length, seed))), 0, prefix, prefix + length)
        for seed, length in enumerate(lengths)
    ]


def assert_frames(work: SavePass, items: list[SaveItem]) -> None:
    for item, frames in zip(items, work.frames, strict=True):
        rows = slice(item.chunk_start, item.chunk_end)
        alone = model().dense(item.token_ids)
        num_tokens = item.chunk_end - item.chunk_start
        assert len(frames) == LAYERS
        for layer, frame in enumerate(frames):
            assert len(frame) == LAYOUT.frame_bytes(Codec.RAW, num_tokens)
            key, value = decode_frame(frame, LAYOUT, Codec.RAW, num_tokens)
            assert torch.allclose(key, alone.keys_before_rope[layer, rows], atol=2e-5, rtol=0)
            assert torch.allclose(value, alone.values[layer, rows], atol=2e-5, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    prefix=st.integers(0, 4),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    unit=st.integers(1, 60),
)
def test_a_batch_is_each_chunk_alone(prefix: int, lengths: list[int], unit: int) -> None:
    items = items_of(prefix, lengths)
    work = saved(items, unit)
    assert_frames(work, items)
    assert work.token_layers == LAYERS * sum(prefix + length for length in lengths)


@pytest.mark.parametrize("unit", [3, 8, 100])
def test_the_same_chunk_twice_in_a_batch(unit: int) -> None:
    items = items_of(2, [9, 9])
    items[1] = items[0]
    work = saved(items, unit)
    assert_frames(work, items)


def test_another_prefix_gives_another_chunk() -> None:
    one, two = items_of(2, [9]), items_of(3, [9])
    first, second = saved(one, 100).frames[0], saved(two, 100).frames[0]
    for layer in range(2):
        (_, this), (_, that) = (decode_frame(f[layer], LAYOUT, Codec.RAW, 9) for f in (first, second))
        # Layer 0 sees no context.
        assert torch.allclose(this, that, atol=1e-5, rtol=0) == (layer == 0)


def test_behind_a_prefix_that_is_in_the_cache_already() -> None:
    prefix = 4
    (item,) = items_of(prefix, [11])
    alone = model().dense(item.token_ids)
    stack = ToyStack(model())
    stack.keys[:, 0, :prefix], stack.values[:, 0, :prefix] = alone.keys[:, :prefix], alone.values[:, :prefix]
    stack.written[:, 0, :prefix] = True
    rest = SaveItem(item.token_ids[prefix:], prefix, prefix, prefix + 11)
    work = saved([rest], 4, stack)
    assert work.token_layers == LAYERS * 11
    for layer, frame in enumerate(work.frames[0]):
        key, value = decode_frame(frame, LAYOUT, Codec.RAW, 11)
        assert torch.allclose(key, alone.keys_before_rope[layer, prefix:], atol=2e-5, rtol=0)
        assert torch.allclose(value, alone.values[layer, prefix:], atol=2e-5, rtol=0)


def test_part_of_what_is_computed_is_kept() -> None:
    """The last token of a prompt is the engine's own; a chunk may end before it."""
    items = [SaveItem(item.token_ids, 0, 5, 9) for item in items_of(2, [12, 10, 15])]
    assert_frames(saved(items, 5), items)


def test_closing_early() -> None:
    stack = ToyStack(model(), 1)
    work = SavePass(items_of(2, [20]), stack, 4, Codec.RAW)
    work.advance(5.0)
    work.close()
    work.close()
    assert stack.calls


def test_a_rank_that_cannot_encode_stays_in_step_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(save, "encode", run_out_of_memory)
    work = saved(items_of(3, [5, 7]), 4, ToyStack(model(), 2, world_size=2))
    assert "out of memory" in str(work.failure)
    with pytest.raises(torch.OutOfMemoryError):
        saved(items_of(3, [5, 7]), 4)
