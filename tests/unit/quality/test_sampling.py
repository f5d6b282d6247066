"""Who is sampled: a share of all requests, spread evenly over tenants."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.quality.sampling import FairSampler, fair_share, is_sampled


def drawn(share: float, senders: list[str]) -> Counter[str]:
    sampler = FairSampler(share, 0.0)
    chances = [(tenant, sampler.count_request(tenant)) for tenant in senders]
    return Counter(
        tenant for number, (tenant, chance) in enumerate(chances) if is_sampled(f"{number}", chance)
    )


def senders_of(seed: int, weights: dict[str, float], count: int) -> list[str]:
    return random.Random(seed).choices(list(weights), list(weights.values()), k=count)


def test_a_share_is_sampled_and_everybody_agrees_on_it() -> None:
    sampled = [number for number in range(20_000) if is_sampled(f"r{number}", 0.05)]
    assert 800 < len(sampled) < 1200
    assert sampled == [number for number in range(20_000) if is_sampled(f"r{number}", 0.05)]
    assert not any(is_sampled(f"r{number}", 0.0) for number in range(1000))
    assert all(is_sampled(f"r{number}", 1.0) for number in range(1000))


@pytest.mark.parametrize(
    ("wanted", "room", "level"),
    [
        ([10, 10], 10, 5),
        ([1, 10], 10, 9),
        ([1, 2, 100], 6, 3),
        ([7], 7, 7),
        ([1, 1], 3, math.inf),
        ([], 1, math.inf),
    ],
)
def test_levels_by_hand(wanted: list[int], room: float, level: float) -> None:
    assert fair_share(wanted, room) == level


@given(st.lists(st.integers(1, 1000), min_size=1), st.floats(0, 1))
def test_a_level_fills_the_room(wanted: list[int], share: float) -> None:
    room = share * sum(wanted)
    level = fair_share(wanted, room)
    assert sum(min(one, level) for one in wanted) == pytest.approx(room)


def test_one_tenant_is_sampled_at_the_share() -> None:
    count = drawn(0.05, ["only"] * 20_000)["only"]
    assert 850 < count < 1150


def test_who_sends_most_is_not_most_of_what_is_drawn() -> None:
    """In all as many are drawn as before: a share of all requests."""
    weights = {"large": 0.9, "small": 0.06, "smaller": 0.04}
    counts = drawn(0.05, senders_of(1, weights, 20_000))
    assert 850 < counts.total() < 1150
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_who_sends_too_few_for_an_even_part_has_all_of_them_drawn() -> None:
    weights = {"large": 0.99, "small": 0.01}
    senders = senders_of(2, weights, 20_000)
    counts = drawn(0.1, senders)
    assert counts["small"] > 0.9 * senders.count("small")
    assert 1700 < counts.total() < 2300


def test_a_tenant_for_every_request_draws_no_more_in_all() -> None:
    assert 850 < drawn(0.05, [f"tenant-{number}" for number in range(20_000)]).total() < 1150


def sampled_at(rate_per_minute: float, share: float, per_minute: float, minutes: float = 600) -> int:
    """Requests sampled in so many minutes, which arrive evenly."""
    clock_s = [0.0]
    sampler = FairSampler(share, per_minute=per_minute, now=lambda: clock_s[0])
    found = 0
    for number in range(int(minutes * rate_per_minute)):
        clock_s[0] = number * 60 / rate_per_minute
        found += is_sampled(f"{number}", sampler.count_request("only"))
    return found


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(0.05, 30, 30), (1.0, 560, 600), (20.0, 500, 720), (400.0, 1050, 1350)]
)
def test_few_requests_are_sampled_at_a_rate_and_many_at_a_share(rate: float, least: int, most: int) -> None:
    """One a minute, where half a percent would give less; 400 requests a minute give two at their share."""
    assert least <= sampled_at(rate, 0.005, 1.0) <= most


def test_a_rate_samples_tenants_alike() -> None:
    clock_s = [0.0]
    sampler = FairSampler(0.001, per_minute=6.0, now=lambda: clock_s[0])
    counts: Counter[str] = Counter()
    for number in range(12_000):
        clock_s[0] = number * 1.0
        tenant = "small" if number % 10 == 0 else "large"
        counts[tenant] += is_sampled(f"{number}", sampler.count_request(tenant))
    assert 1000 < counts.total() < 1450
    assert 0.7 < counts["large"] / counts["small"] < 1.4


def test_an_idle_night_does_not_save_up_samples() -> None:
    clock_s = [0.0]
    sampler = FairSampler(0.005, per_minute=1.0, now=lambda: clock_s[0])
    sampler.count_request("only")
    clock_s[0] = 8 * 3600.0
    assert sampler.count_request("only") == 1.0, "the rate is not known yet"
    clock_s[0] += 0.1
    assert sampler.count_request("only") < 0.01
