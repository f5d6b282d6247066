from __future__ import annotations

from benchmarks.support.memory_samples import MemorySamples


def test_growth_is_not_that_of_a_burst() -> None:
    sizes = iter([900] + [100] * 48 + [130] * 50 + [5])
    memory = MemorySamples(lambda: next(sizes))
    for tenth_s in range(1000):
        memory.watch(tenth_s / 10)

    assert memory.growth_bytes == 30


def test_one_sample_has_not_grown() -> None:
    memory = MemorySamples(lambda: 7)
    memory.watch(0.0)

    assert memory.growth_bytes == 0
