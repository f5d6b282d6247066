"""Losses, and what many of them prove. Error rates are checked by simulation, with seeds."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from kintsugi.core import evidence
from kintsugi.core.errors import InvalidField
from kintsugi.core.evidence import (
    CHANGED_MAX,
    EMPTY,
    KL_CAP,
    STEPS,
    TRIP_LIMIT_MIN,
    Deviation,
    Levels,
    Quality,
    Tally,
    TripTest,
    loss_of,
    size_of,
    trip_limits,
)
from tests.fakes.reports import tally_of

BALANCED = Quality.BALANCED
LIMIT = BALANCED.loss_max
LOST = BALANCED.lost_max
LIMITS = Levels(LIMIT, LIMIT, LIMIT)
ERROR = 0.05
ENOUGH = math.log(1 / ERROR)

Draw = Callable[[random.Random], float]
AT_THE_LIMIT: dict[str, Draw] = {
    "one in eight is lost": lambda some: float(some.random() < LOST),
    "every second is half lost": lambda some: 0.5 * (some.random() < 2 * LIMIT),
    "all are at the limit": lambda some: LIMIT,
    "most are near the limit, few are lost": lambda some: (
        1.0 if some.random() < 1 / 32 else LIMIT - (1 - LIMIT) / 31
    ),
}
"""Losses with a mean of exactly `LIMIT`, or a share of lost answers of exactly `LOST`."""


def draw_tallies(draw: Draw, seed: int, pairs: int, step: int) -> Iterator[Tally]:
    """The tally after each ``step`` more pairs."""
    some, total = random.Random(seed), EMPTY
    for _ in range(pairs // step):
        losses = Counter(math.ceil(draw(some) * STEPS) for _ in range(step))
        total += Tally(losses=tuple(losses.items()))
        yield total


@pytest.mark.parametrize(
    ("kl", "changed", "loss"),
    [
        (0.0, 0.0, 0.0),
        (KL_CAP / 4, 0.0, 0.25),
        (KL_CAP, 0.25, 1.0),
        (9.0, 0.0, 1.0),
        (0.0, 0.25, 0.0),
        (0.0, 0.26, 1.0),
    ],
)
def test_the_loss_is_the_capped_kl_unless_many_tokens_changed(kl: float, changed: float, loss: float) -> None:
    assert loss_of(Deviation(kl, changed)) == pytest.approx(loss)


def test_a_deviation_is_the_mean_over_its_positions() -> None:
    assert Deviation.of([0.25, 0.75], [True, False]) == Deviation(0.5, 0.5)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Deviation.of([], []),
        lambda: Deviation.of([0.1], [True, False]),
        lambda: Deviation(-0.1, 0.0),
        lambda: Deviation(math.nan, 0.0),
        lambda: Deviation(math.inf, 0.0),
        lambda: Deviation(0.0, 1.1),
    ],
)
def test_impossible_values_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(InvalidField):
        build()


def test_one_pair_is_a_tally() -> None:
    tally = Tally.of(Deviation(KL_CAP / 3, 0.1), 0.4, [100, 200, 300], wrong=1)
    assert tally.losses == ((43, 1),), "rounded up: 42.7 of 128"
    assert (tally.pairs, tally.loss, tally.lost) == (1, 43 / STEPS, 0)
    assert (tally.cost, tally.kl) == (0.4, KL_CAP / 3)
    assert tally.changes == ((13, 1),), "rounded up: 12.8 of 128"
    assert tally.changed == 13 / STEPS
    assert tally.severities == ((1, 1),), "rounded up: 0.3 of 128"
    assert (tally.answers, tally.sizes, tally.chunks) == (((1, 1),), ((7, 1),), ((1, 1),))
    assert Tally.of(Deviation(0.0, 1.0), 1.0, [1]).lost == 1
    assert EMPTY.pairs == EMPTY.loss == EMPTY.lost == 0


def test_sizes_are_counted_by_octave() -> None:
    assert [size_of(one) for one in (0, 1, 2, 3, 4, 7, 8, 1024)] == [0, 0, 1, 1, 2, 2, 3, 10]


def test_tallies_are_added_in_any_order_and_grouping() -> None:
    some = random.Random(1)
    pairs = [
        Tally.of(
            Deviation(some.randrange(8) / 64, some.randrange(4) / 8),
            some.randrange(4) / 4,
            [some.randrange(1, 400)] * some.randrange(1, 9),
            some.choice((None, -1, 0, 1)),
        )
        for _ in range(200)
    ]
    whole = sum(pairs, EMPTY)
    assert whole.pairs == 200
    shuffled = pairs[:]
    some.shuffle(shuffled)
    halves = sum(shuffled[:77], EMPTY) + sum(shuffled[77:], EMPTY)
    assert (halves.losses, halves.changes, halves.answers, halves.sizes, halves.chunks) == (
        whole.losses,
        whole.changes,
        whole.answers,
        whole.sizes,
        whole.chunks,
    )
    assert (halves.cost, halves.kl) == pytest.approx((whole.cost, whole.kl))
    for quality in (Quality.STRICT, Quality.BALANCED):
        assert halves.log_wealth(quality) == pytest.approx(whole.log_wealth(quality))
    assert EMPTY + whole == whole


@pytest.mark.parametrize("name", AT_THE_LIMIT)
def test_at_the_limit_at_most_the_stated_share_of_streams_ever_passes(name: str) -> None:
    streams = 400
    passed = sum(
        any(
            tally.log_wealth(BALANCED) >= ENOUGH for tally in draw_tallies(AT_THE_LIMIT[name], seed, 1000, 20)
        )
        for seed in range(streams)
    )
    assert passed <= ERROR * streams


def test_streams_at_half_of_the_limit_pass() -> None:
    def draw(some: random.Random) -> float:
        return float(some.random() < LOST / 2)

    passed = sum(
        any(tally.log_wealth(BALANCED) >= ENOUGH for tally in draw_tallies(draw, seed, 600, 20))
        for seed in range(100)
    )
    assert passed >= 90


def test_a_catastrophe_in_one_prompt_of_five_never_passes() -> None:
    total = EMPTY
    for _ in range(200):
        total += tally_of(4, 0.0)
        assert total.log_wealth(BALANCED) < ENOUGH
        total += tally_of(1, 1.0)
    assert total.lost == 200
    assert total.loss < LIMIT, "the mean alone would pass"
    assert total.pairs_missing(BALANCED, ENOUGH) is None


def test_the_number_of_missing_pairs_is_foreseen() -> None:
    foreseen = EMPTY.pairs_missing(BALANCED, ENOUGH)
    needed = next(pairs for pairs in range(1, 200) if tally_of(pairs, 0.0).log_wealth(BALANCED) >= ENOUGH)
    assert foreseen is not None
    assert foreseen <= needed <= foreseen + 8
    half = tally_of(needed // 2, 0.0).pairs_missing(BALANCED, ENOUGH)
    assert half is not None
    assert abs(half - (needed - needed // 2)) <= 8
    assert tally_of(needed, 0.0).pairs_missing(BALANCED, ENOUGH) == 0
    assert tally_of(20, LIMIT).pairs_missing(BALANCED, ENOUGH) is None
    for more in (tally_of(1, 1.0), tally_of(40, 0.95 * LIMIT)):
        worse = (tally_of(8, 0.0) + more).pairs_missing(BALANCED, ENOUGH)
        clean = tally_of(8 + more.pairs, 0.0).pairs_missing(BALANCED, ENOUGH)
        assert worse is not None
        assert clean is not None
        assert worse > clean


def test_exact_match_is_shown_by_many_answers_alone() -> None:
    assert tally_of(100).log_wealth(BALANCED) >= ENOUGH, "no answers are known"
    few = tally_of(100, answers=((0, 100),))
    assert few.log_wealth(BALANCED) < ENOUGH
    missing, half = few.pairs_missing(BALANCED, ENOUGH), tally_of(200, answers=((0, 100),))
    assert missing is not None
    assert missing > 0
    assert half.pairs_missing(BALANCED, ENOUGH) == pytest.approx(2 * missing, abs=2)
    assert tally_of(200, answers=((0, 200),)).log_wealth(BALANCED) >= ENOUGH
    assert tally_of(200, answers=((0, 180), (1, 20))).log_wealth(BALANCED) < 0
    balanced = tally_of(200, answers=((-1, 20), (0, 160), (1, 20)))
    assert balanced.log_wealth(BALANCED) < ENOUGH, "as many became right as wrong"


def test_the_upper_bound_is_above_the_mean_and_falls_with_more_pairs() -> None:
    few, many = tally_of(40, 0.0625), tally_of(400, 0.0625)
    assert EMPTY.loss_upper(ERROR) == 1.0
    assert 0.0625 < many.loss_upper(ERROR) < few.loss_upper(ERROR) < 1.0
    assert few.loss_upper(ERROR) < few.loss_upper(ERROR / 10)
    upper = many.loss_upper(ERROR)
    rows = evidence._scaled(many.losses)
    assert evidence._log_wealth(rows, upper) >= ENOUGH > evidence._log_wealth(rows, upper - 1e-6)


def test_strict_is_a_third_of_balanced() -> None:
    strict, balanced = Quality.STRICT, Quality.BALANCED
    assert strict.loss_max == pytest.approx(balanced.loss_max / 3)
    assert strict.lost_max == pytest.approx(balanced.lost_max / 3)
    assert strict.wrong_max == pytest.approx(balanced.wrong_max / 3)


@pytest.mark.parametrize(
    "draw",
    [
        lambda some: float(some.random() < LIMIT / 2),
        lambda some: LIMIT / 2,
        lambda some: min(1.0, some.expovariate(2 / LIMIT)),
    ],
    ids=["lost or not", "constant", "exponential"],
)
@pytest.mark.parametrize("seed", range(4))
def test_answers_at_half_of_the_limit_trip_nothing(draw: Draw, seed: int) -> None:
    some, test = random.Random(seed), TripTest()
    assert not any(test.observe(Levels(draw(some), draw(some), draw(some)), LIMITS) for _ in range(20_000))


@pytest.mark.parametrize("clean", [0, 5000])
@pytest.mark.parametrize("seed", range(20))
def test_three_times_the_limit_trips_soon_however_good_earlier_answers_were(seed: int, clean: int) -> None:
    some, test = random.Random(seed), TripTest()
    assert not any(test.observe(Levels(0.0, 0.0, 0.0), LIMITS) for _ in range(clean))
    found = [test.observe(Levels(float(some.random() < 3 * LIMIT), 0.0, 0.0), LIMITS) for _ in range(200)]
    assert "the mean loss of served blends is above 0.250" in found


@pytest.mark.parametrize("seed", range(20))
def test_many_small_changes_that_hardly_add_to_the_loss_trip_too(seed: int) -> None:
    some, test, limits = random.Random(seed), TripTest(), Levels(LIMIT, 0.03, LIMIT)
    levels = [Levels(LIMIT / 4, some.choice((0.0, 0.0, 0.25)), 0.0) for _ in range(200)]
    assert "the share of changed tokens of served blends is above 0.030" in [
        test.observe(one, limits) for one in levels
    ]


@pytest.mark.parametrize("seed", range(20))
def test_other_answers_among_uncertain_ones_trip_although_few_more_are_lost(seed: int) -> None:
    """One answer in twelve is lost by uncertainty; then one in twenty becomes another answer."""
    some, test = random.Random(seed), TripTest()
    uncertain, other, sound = Deviation(0.1, 1.0), Deviation(6.0, 1.0), Deviation(0.001, 0.0)
    clean = [uncertain if some.random() < 1 / 12 else sound for _ in range(300)]
    limits = trip_limits(sum((Tally.of(one, 1.0, [1]) for one in clean), EMPTY), LIMIT)
    assert not any(test.observe(Levels.of(one), limits) for one in clean)
    damaged = [other if some.random() < 1 / 20 else some.choice(clean) for _ in range(400)]
    found = next(told for one in damaged if (told := test.observe(Levels.of(one), limits)))
    assert found.startswith("the severity of served blends' errors is above")


def test_the_trip_limits_follow_the_evidence_within_their_bounds() -> None:
    assert trip_limits(EMPTY, LIMIT) == Levels.limits(LIMIT) == (LIMIT, CHANGED_MAX, CHANGED_MAX)
    assert trip_limits(sum([Tally.of(Deviation(0.0, 0.0), 1.0, [1])] * 2000, EMPTY), LIMIT) == (
        TRIP_LIMIT_MIN,
        TRIP_LIMIT_MIN,
        TRIP_LIMIT_MIN,
    )
    assert trip_limits(tally_of(100, LIMIT), LIMIT).loss == LIMIT
    some = trip_limits(tally_of(400, 0.03125), LIMIT)
    assert 0.03125 < some.loss < trip_limits(tally_of(100, 0.03125), LIMIT).loss < LIMIT
    changed = sum([Tally.of(Deviation(0.0, 0.0625), 1.0, [1])] * 200, EMPTY)
    assert 0.0625 < trip_limits(changed, LIMIT).changed < 0.125
