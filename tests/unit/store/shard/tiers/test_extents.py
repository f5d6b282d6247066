"""The allocator against a model: bytes handed out never overlap, and come back."""

from __future__ import annotations

import random

import pytest

from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, Extent, ExtentAllocator, offsets_of, stride_of


def covered(extents: tuple[Extent, ...], stride: int) -> set[int]:
    return {
        block
        for extent in extents
        for block in range(
            extent.offset // BLOCK_BYTES, (extent.offset + extent.frames * stride) // BLOCK_BYTES
        )
    }


@pytest.mark.parametrize("seed", range(5))
def test_allocations_never_overlap_and_everything_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    allocator = ExtentAllocator(1000 * BLOCK_BYTES)
    held: list[tuple[tuple[Extent, ...], int]] = []
    used: set[int] = set()
    for _ in range(2000):
        if held and chance.random() < 0.5:
            extents, stride = held.pop(chance.randrange(len(held)))
            allocator.free(extents, stride)
            used -= covered(extents, stride)
        else:
            stride, frames = BLOCK_BYTES * chance.randint(1, 20), chance.randint(1, 12)
            got = allocator.allocate(stride, frames)
            if got is None:
                continue
            blocks = covered(got, stride)
            assert sum(extent.frames for extent in got) == frames
            assert not blocks & used
            used |= blocks
            held.append((got, stride))
        assert allocator.used_bytes == len(used) * BLOCK_BYTES
    for extents, stride in held:
        allocator.free(extents, stride)
    assert allocator.allocate(BLOCK_BYTES, 1000) == (Extent(0, 1000),)


def test_scattered_space_is_used_frame_by_frame() -> None:
    allocator = ExtentAllocator(10 * BLOCK_BYTES)
    pieces = [allocator.allocate(BLOCK_BYTES, 1) for _ in range(10)]
    for piece in pieces[::2]:
        assert piece is not None
        allocator.free(piece, BLOCK_BYTES)
    scattered = allocator.allocate(BLOCK_BYTES, 5)
    assert scattered is not None
    assert sorted(offsets_of(scattered, BLOCK_BYTES)) == [2 * i * BLOCK_BYTES for i in range(5)]
    assert allocator.allocate(BLOCK_BYTES, 1) is None


def test_it_is_built_around_what_a_catalog_names() -> None:
    used = [(2 * BLOCK_BYTES, 3 * BLOCK_BYTES), (9 * BLOCK_BYTES, BLOCK_BYTES)]
    allocator = ExtentAllocator(10 * BLOCK_BYTES, used)
    assert allocator.used_bytes == 4 * BLOCK_BYTES
    assert allocator.allocate(4 * BLOCK_BYTES, 1) == (Extent(5 * BLOCK_BYTES, 1),)


def test_frames_are_padded_to_blocks() -> None:
    assert [stride_of(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]
