"""Counts of sightings: what they remember, and what they may take."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.discovery.sightings import BYTES_MAX, WIDTH_MIN, Sightings

HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def digest(number: int, namespace: str = "") -> bytes:
    return hashlib.blake2b(f"{namespace} {number}".encode(), digest_size=16).digest()


def sightings(clock: Clock | None = None, bytes_max: int = BYTES_MAX) -> Sightings:
    return Sightings(HOUR_S, clock or Clock(), bytes_max)


@given(st.lists(st.integers(0, 40), max_size=300))
@settings(deadline=None)
def test_counts_are_exact_for_few_segments(seen: list[int]) -> None:
    counts: dict[int, int] = {}
    some = sightings()
    for number in seen:
        counts[number] = counts.get(number, 0) + 1
        assert some.count("a", "a", [digest(number)]) == [counts[number]]


def test_two_namespaces_never_count_together() -> None:
    some = sightings()
    assert some.count("a", "a", [digest(1)]) == [1]
    assert some.count("b", "b", [digest(1)]) == [1]
    assert some.count("a", "a/user", [digest(1)]) == [1]
    assert some.count("a", "a", [digest(1)]) == [2]


def test_nothing_that_others_send_changes_a_namespaces_counts() -> None:
    """Not even digests chosen to fall into the same cells."""
    some = sightings()
    for _ in range(5):
        some.count("flood", "flood", [digest(1)])
    assert some.count("a", "a", [digest(1)]) == [1]


def test_a_sighting_is_remembered_for_one_to_two_periods() -> None:
    clock = Clock()
    some = sightings(clock)
    some.count("a", "a", [digest(1)])
    clock.now_s = HOUR_S
    assert some.count("a", "a", [digest(1)]) == [2]
    clock.now_s = 2 * HOUR_S
    some.count("a", "a", [digest(2)])
    clock.now_s = 3 * HOUR_S
    assert some.count("a", "a", [digest(1)]) == [1]


def test_an_idle_namespace_forgets() -> None:
    clock = Clock()
    some = sightings(clock)
    some.count("a", "a", [digest(1)])
    clock.now_s = 5 * HOUR_S
    assert some.count("a", "a", [digest(1)]) == [1]


@pytest.mark.full
def test_a_million_segments_are_remembered_within_the_bound() -> None:
    some = sightings()
    wrong = 0
    for start in range(0, 1_000_000, 50):
        counts = some.count("a", "a", [digest(number) for number in range(start, start + 50)])
        wrong += sum(count > 1 for count in counts)
    assert some.num_bytes <= BYTES_MAX
    assert wrong < 1000
    assert some.count("a", "a", [digest(999_000)])[0] >= 2
    assert some.count("a", "a", [digest(600_000)])[0] >= 2


def test_recent_sightings_survive_growth() -> None:
    some = sightings()
    full = WIDTH_MIN // 8
    for number in range(full):
        some.count("a", "a", [digest(number)])
    some.count("a", "a", [digest(full)])
    assert some.num_bytes > 4 * WIDTH_MIN
    assert all(some.count("a", "a", [digest(number)]) == [2] for number in range(full + 1))


def test_many_namespaces_stay_within_the_bound() -> None:
    bytes_max = 40 * 4 * WIDTH_MIN
    some = sightings(bytes_max=bytes_max)
    for number in range(200):
        some.count(f"user/{number}", f"user/{number}", [digest(1)])
        assert some.num_bytes <= bytes_max
    assert some.count("user/199", "user/199", [digest(1)]) == [2]
    assert some.count("user/0", "user/0", [digest(1)]) == [1]


def test_who_has_many_namespaces_makes_nobody_else_be_forgotten() -> None:
    bytes_max = 40 * 4 * WIDTH_MIN
    some = sightings(bytes_max=bytes_max)
    for owner in range(10):
        some.count(f"quiet {owner}", f"quiet {owner}", [digest(1)])
    for number in range(1000):
        some.count("flood", f"flood/{number}", [digest(1)])
        assert some.num_bytes <= bytes_max
    assert some.num_given_up == 1000 - 30
    assert all(some.count(f"quiet {owner}", f"quiet {owner}", [digest(1)]) == [2] for owner in range(10))
    assert some.count("flood", "flood/999", [digest(1)]) == [2]
    assert some.count("flood", "flood/0", [digest(1)]) == [1]


def test_a_namespace_larger_than_the_bound_is_still_counted() -> None:
    some = sightings(bytes_max=1)
    assert some.count("a", "a", [digest(1)]) == [1]
    assert some.count("a", "a", [digest(1)]) == [2]
    assert some.count("b", "b", [digest(1)]) == [1]
    assert some.num_bytes == 4 * WIDTH_MIN
