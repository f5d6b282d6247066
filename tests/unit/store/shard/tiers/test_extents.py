"""The allocator against a model: bytes handed out never overlap, and come back."""

from __future__ import annotations

import random

import pytest

from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, Extent, ExtentAllocator, Strides, stride_of


def frames_of(*runs: tuple[int, int]) -> Strides:
    """Frames of so many blocks each."""
    return Strides.of(tuple((blocks * BLOCK_BYTES, frames) for blocks, frames in runs))


def covered(extents: tuple[Extent, ...]) -> set[int]:
    return {
        block
        for offset, size in extents
        for block in range(offset // BLOCK_BYTES, (offset + size) // BLOCK_BYTES)
    }


@pytest.mark.parametrize("seed", range(5))
def test_allocations_never_overlap_and_everything_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    allocator = ExtentAllocator(1000 * BLOCK_BYTES)
    held: list[tuple[Extent, ...]] = []
    used: set[int] = set()
    split = 0
    for _ in range(2000):
        if held and chance.random() < 0.5:
            extents = held.pop(chance.randrange(len(held)))
            allocator.free(extents)
            used -= covered(extents)
        else:
            runs = [(chance.randint(1, 20), chance.randint(1, 12)) for _ in range(chance.randint(1, 4))]
            strides = frames_of(*runs)
            got = allocator.allocate(strides)
            if got is None:
                continue
            assert strides.fill(got)
            assert len(strides.offsets_in(got)) == len(strides.each)
            assert not covered(got) & used
            used |= covered(got)
            held.append(got)
            split += len(got) > 1
        assert allocator.used_bytes == len(used) * BLOCK_BYTES
    assert split
    for extents in held:
        allocator.free(extents)
    assert allocator.allocate(frames_of((1, 1000))) == (Extent(0, 1000 * BLOCK_BYTES),)


def holes(count: int) -> ExtentAllocator:
    """Every other block is free, from the first on."""
    used = [((2 * i + 1) * BLOCK_BYTES, BLOCK_BYTES) for i in range(count)]
    return ExtentAllocator(2 * count * BLOCK_BYTES, used)


def test_scattered_space_is_used_frame_by_frame() -> None:
    allocator = holes(5)
    scattered = allocator.allocate(frames_of((1, 5)))
    assert scattered is not None
    assert sorted(frames_of((1, 5)).offsets_in(scattered)) == [2 * i * BLOCK_BYTES for i in range(5)]
    assert allocator.allocate(frames_of((1, 1))) is None


def test_a_frame_is_never_cut() -> None:
    assert holes(5).allocate(frames_of((2, 1))) is None
    assert holes(5).allocate(frames_of((1, 2), (2, 1))) is None


def test_frames_of_several_sizes_share_a_hole() -> None:
    """Three blocks, then two: the first hole takes the prior frame and one layer."""
    used = [(3 * BLOCK_BYTES, BLOCK_BYTES), (6 * BLOCK_BYTES, BLOCK_BYTES)]
    allocator = ExtentAllocator(7 * BLOCK_BYTES, used)
    extents = allocator.allocate(frames_of((1, 1), (2, 2)))
    assert extents == (Extent(0, 3 * BLOCK_BYTES), Extent(4 * BLOCK_BYTES, 2 * BLOCK_BYTES))
    offsets = frames_of((1, 1), (2, 2)).offsets_in(extents)
    assert offsets == (0, BLOCK_BYTES, 4 * BLOCK_BYTES)


@pytest.mark.parametrize("sizes", [(), (5,), (4,), (6, 4), (2, 3), (1, 4, 1)])
def test_extents_that_cut_a_frame_are_not_filled(sizes: tuple[int, ...]) -> None:
    """One block, then two frames of two blocks."""
    extents, strides = [Extent(0, size * BLOCK_BYTES) for size in sizes], frames_of((1, 1), (2, 2))
    assert strides.fill(extents) == (sizes == (5,))
    assert strides.fill([Extent(0, 3 * BLOCK_BYTES), Extent(9 * BLOCK_BYTES, 2 * BLOCK_BYTES)])


def test_steps_hold_at_least_one_frame() -> None:
    strides = frames_of((1, 3), (4, 2))
    for start, limit, stop in ((0, 2, 2), (0, 3, 3), (0, 6, 3), (0, 7, 4), (3, 1, 4), (4, 99, 5), (0, 0, 1)):
        assert strides.stop_within(start, limit * BLOCK_BYTES) == stop


def test_it_is_built_around_what_a_catalog_names() -> None:
    used = [(2 * BLOCK_BYTES, 3 * BLOCK_BYTES), (9 * BLOCK_BYTES, BLOCK_BYTES)]
    allocator = ExtentAllocator(10 * BLOCK_BYTES, used)
    assert allocator.used_bytes == 4 * BLOCK_BYTES
    assert allocator.allocate(frames_of((4, 1))) == (Extent(5 * BLOCK_BYTES, 4 * BLOCK_BYTES),)


def test_frames_are_padded_to_blocks() -> None:
    assert [stride_of(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]
    assert Strides.of(((1, 2), (4097, 1))).each == (4096, 4096, 8192)
