"""A chunk that is read often gets more readers, and fewer again when it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kintsugi.core.spaces import ChunkKey
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.heat import (
    HEAT_S,
    READS_NOTED,
    READS_PER_S_MAX,
    WATCHED_BYTES_MAX,
    WIDTH_MAX,
    Heat,
    next_width,
)
from tests.contracts.store_contract import make_chunk

MANIFEST = make_chunk(range(4))[0]
HOT = READS_PER_S_MAX


@pytest.mark.parametrize(
    ("width", "reads_per_s", "shards", "wanted"),
    [
        (1, HOT, 1000, 1),
        (1, HOT + 1, 1000, 2),
        (1, 3000, 1000, WIDTH_MAX),
        (1, 10**9, 1000, WIDTH_MAX),
        (1, 10**9, 3, 3),
        (1, 10**9, 1, 1),
        (8, HOT, 1000, 8),
        (8, 2 * HOT, 1000, 16),
        (5, HOT + 1, 1000, 10),
        (8, HOT / 4, 1000, 8),
        (8, HOT / 5, 1000, 4),
        (64, 0, 1000, 1),
        (64, HOT, 16, 16),
    ],
)
def test_the_number_of_readers_follows_all_reads(
    width: int, reads_per_s: float, shards: int, wanted: int
) -> None:
    assert next_width(width, reads_per_s, shards) == wanted


@pytest.mark.parametrize("reads_per_s", [0.0, 10.0, 70.0, 130.0, 500.0, 3000.0, 10**6])
def test_a_constant_rate_ends_at_one_number(reads_per_s: float) -> None:
    """It must not widen and narrow in turns, or copies are sent for nothing."""
    width, seen = 1, []
    for _ in range(20):
        width = next_width(width, reads_per_s / width, 1000)
        seen.append(width)
    assert len(set(seen[10:])) == 1
    assert width == WIDTH_MAX or reads_per_s / width <= READS_PER_S_MAX


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def entry_of(number: int, namespace: str = "acme") -> ChunkEntry:
    manifest = replace(MANIFEST, key=ChunkKey(number.to_bytes(32, "little")), namespace=namespace)
    return ChunkEntry(manifest)


def use(heat: Heat, entry: ChunkEntry, times: int) -> None:
    for _ in range(times):
        entry.uses += 1
        heat.note_use(entry)


def test_a_hot_chunk_is_reported_until_it_has_cooled() -> None:
    clock = Clock()
    heat, hot, cold = Heat(clock), entry_of(0), entry_of(10)
    use(heat, hot, READS_NOTED)
    use(heat, cold, READS_NOTED - 1)
    assert heat.review(lambda key: True, 8) == {}, "nobody knows yet how fast the reads came"
    clock.now_s += HEAT_S
    use(heat, hot, int(4 * HOT * HEAT_S))
    assert heat.review(lambda key: True, 8) == {hot: 4}
    assert heat.width_of(hot) == 0, "no other shard has it yet"
    heat.set_width(hot, 3)
    assert heat.width_of(hot) == 3
    assert heat.width_of(entry_of(0)) == 0, "another put of the same chunk has no other readers"
    clock.now_s += HEAT_S
    assert heat.review(lambda key: True, 8) == {}
    assert heat.width_of(hot) == 0
    heat.set_width(hot, 3)
    assert heat.width_of(hot) == 0, "nobody decides about it any more"


@pytest.mark.parametrize("is_gone", [True, False])
def test_only_its_first_owner_decides_about_a_chunk_that_is_there(is_gone: bool) -> None:
    clock = Clock()
    heat, hot = Heat(clock), entry_of(0)
    use(heat, hot, READS_NOTED)
    clock.now_s += HEAT_S
    use(heat, hot, int(4 * HOT * HEAT_S))
    heat.set_width(hot, 3)
    hot.gone = is_gone
    assert heat.review(lambda key: is_gone, 8) == {}
    assert heat.width_of(hot) == 0


def test_one_namespace_leaves_room_for_the_hot_chunks_of_others() -> None:
    heat, mine = Heat(Clock()), entry_of(0)
    use(heat, mine, READS_NOTED)
    heat.set_width(mine, 2)
    for number in range(WATCHED_BYTES_MAX // 256):
        use(heat, entry_of(number, "greedy"), READS_NOTED)
    assert heat.width_of(mine) == 2
