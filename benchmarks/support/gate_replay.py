"""Replays the gate's decisions on recorded outcomes of real models (`outcomes.py`).

Streams draw recorded prompts with replacement, so the truth about every configuration is known: its mean loss
over the records. If a figure needs a configuration exactly at the limit, prompts that lose everything are
mixed into its records.

`power` runs the product's own code (`quality.stream.choose_trials`, `quality.reports.ReportKeeper`). The
false openings of a life of 10,000 requests are replayed on arrays with the same wealth as `Tally.log_wealth`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.outcomes import Records
from kintsugi.core.evidence import (
    BETS,
    STEPS,
    Deviation,
    Levels,
    Quality,
    Tally,
    TripTest,
    loss_of,
    trip_limits,
)
from kintsugi.core.gate import GateState
from kintsugi.core.plan import Selection
from kintsugi.core.report import (
    COMMON_SHARE,
    ERROR,
    FIRST_EPOCH,
    LADDER,
    NAMESPACES_MIN,
    Binding,
    Cell,
    Report,
    ReportPart,
    share_of_slot,
    source_of,
)
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.stream import TRIP_PAIRS_MIN, TRIP_STEP, choose_trials

LIFE = 10_000
"""Requests of a stream's whole life."""
PAIRS = 300
TALLY_MAX = 1001
"""Pairs that set a trip limit. It hardly changes afterwards, and a tally of many is slow to add to."""
CLEAN = 20_000
DROP = 0.05
"""Drop of agreement that must cause a trip."""
BINDING = Binding("00" * 16, "prefix", "raw")
VERSIONS = "replay"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Losses of each configuration of the ladder, one value per recorded prompt."""

    name: str
    losses: dict[Selection, list[float]]
    costs: dict[Selection, float]
    deviations: dict[Selection, list[Deviation]]

    @staticmethod
    def of(records: Records) -> World:
        deviations = {
            one.selection: [Deviation(kl, changed) for kl, changed in zip(one.kl, one.changed, strict=True)]
            for one in records.outcomes
        }
        return World(
            f"{records.model}, {records.prompts}",
            {name: [loss_of(one) for one in some] for name, some in deviations.items()},
            {one.selection: sum(one.cost) / max(1, len(one.cost)) for one in records.outcomes},
            deviations,
        )

    def mean(self, selection: Selection) -> float:
        losses = self.losses[selection]
        return sum(losses) / len(losses)

    def lost(self, selection: Selection) -> float:
        """The share of lost answers."""
        losses = self.losses[selection]
        return sum(one >= 1 for one in losses) / len(losses)

    def passes(self, selection: Selection, quality: Quality, margin: float = 1.0) -> bool:
        """Whether the configuration truly is within ``margin`` of both limits."""
        lost = self.lost(selection) <= margin * quality.lost_max
        return lost and self.mean(selection) <= margin * quality.loss_max

    def at_limit(self, selection: Selection, quality: Quality) -> list[list[float]]:
        """Losses exactly at one limit: of lost answers, where total losses or none are mixed in, and of the
        mean, where answers at three quarters of the cap are, or none."""
        losses = self.losses[selection]
        return [
            _mixed(losses, self.lost(selection), quality.lost_max, 1.0),
            _mixed(losses, self.mean(selection), quality.loss_max, 0.75),
        ]


def _mixed(losses: Sequence[float], share: float, limit: float, extra: float) -> list[float]:
    """Return ``losses``, whose measure is ``share``, mixed with ``extra`` or 0 so that it is ``limit``."""
    count = 20 * len(losses)
    worse = (limit - share) / (extra - share) if share < limit else 0.0
    clean = 0.0 if share <= limit else 1 - limit / share
    more = [extra] * round(count * worse) + [0.0] * round(count * clean)
    return [*(losses[index % len(losses)] for index in range(count - len(more))), *more]


def log_wealths(losses: Floats, quality: Quality) -> Floats:
    """Return the logarithm of the wealth after each pair, along the last axis, as `Tally.log_wealth`."""
    rounded = np.ceil(losses * STEPS - 1e-9) / STEPS
    lost = (rounded >= 1).astype(np.float64)
    return np.minimum(_bet(rounded, quality.loss_max), _bet(lost, quality.lost_max))


def _bet(values: Floats, limit: float) -> Floats:
    parts = []
    for share, weight in BETS.items():
        gains = np.log1p(share / (1 - limit) * (limit - values))
        parts.append(math.log(weight) + np.cumsum(gains, axis=-1))
    total: Floats = np.logaddexp.reduce(np.stack(parts), axis=0)
    return total


def count_false_opens(
    losses: Sequence[float], quality: Quality, streams: int, tenants: int, seed: int
) -> int:
    """Return how many streams open for a configuration whose losses are at the limit: for one of their
    tenants on its own evidence, or for others on the evidence of all."""
    generator = np.random.default_rng(seed)
    opened = 0
    each = LIFE // tenants
    for _ in range(streams):
        drawn = generator.choice(np.asarray(losses), size=(tenants, each))
        wealths = log_wealths(drawn, quality)
        own = [
            -math.log(ERROR * (1 - COMMON_SHARE) * share_of_slot(slot) * FIRST_EPOCH)
            for slot in range(1, tenants + 1)
        ]
        found = any(wealths[index].max() >= enough for index, enough in enumerate(own))
        if tenants >= NAMESPACES_MIN:
            enough = -math.log(ERROR * COMMON_SHARE * share_of_slot(1) * FIRST_EPOCH)
            common = np.minimum(wealths, enough / NAMESPACES_MIN).sum(axis=0)
            found = found or common.max() >= enough
        opened += bool(found)
    return opened


def count_foreign_opens(
    good: Sequence[float], bad: Sequence[float], quality: Quality, streams: int, seed: int
) -> int:
    """Return how many of the streams with five tenants open for all because of one tenant's easy prompts:
    its losses are ``good``, those of the four others ``bad``, at the limit."""
    generator = np.random.default_rng(seed)
    enough = -math.log(ERROR * COMMON_SHARE * share_of_slot(1) * FIRST_EPOCH)
    opened = 0
    for _ in range(streams):
        easy = generator.choice(np.asarray(good), size=(1, LIFE // 5))
        hard = generator.choice(np.asarray(bad), size=(4, LIFE // 5))
        wealths = log_wealths(np.concatenate([easy, hard]), quality)
        opened += bool(np.minimum(wealths, enough / NAMESPACES_MIN).sum(axis=0).max() >= enough)
    return opened


@dataclass(frozen=True)
class Search:
    """The result of one stream."""

    first_open: int | None
    """Pairs until anything passed."""
    passed: tuple[Selection, ...]
    """Configurations that passed within `PAIRS` prompts."""


def run_search(world: World, quality: Quality, seed: int) -> Search:
    """Let the product decide on a stream of recorded prompts, with time for all configurations."""
    picks = random.Random(seed)
    keeper = ReportKeeper(None, BINDING, VERSIONS, quality)
    cell, source = Cell.of(False, 1000), source_of("replayed")
    count, first = len(world.deviations[LADDER[0]]), None
    for number in range(1, PAIRS + 1):
        index = picks.randrange(count)
        state = GateState(report=keeper.report, quality=quality, versions=VERSIONS)
        chosen = choose_trials(state, cell, source)
        if not chosen:
            break
        for selection in chosen:
            tally = Tally.of(world.deviations[selection][index], world.costs[selection], [200] * 6)
            if keeper.record(cell, source, selection, tally):
                first = first or number
    return Search(first, keeper.report.standing(cell, source, quality).passed)


def cheapest_passes(world: World, quality: Quality) -> list[Selection]:
    """Return up to three of the cheapest configurations that truly pass with half of the limit's margin."""
    true = [one for one in LADDER if world.passes(one, quality, 0.5)]
    return sorted(true, key=lambda one: world.costs[one])[:3]


class TripReplay:
    """The trip test of one namespace, as the stream runs it."""

    def __init__(self, quality: Quality) -> None:
        self._quality = quality
        self._tally = Tally()
        self._limits = Levels.limits(quality.loss_max)
        self._test = TripTest()

    def observe(self, deviation: Deviation) -> bool:
        if self._tally.pairs < TALLY_MAX:
            self._tally += Tally.of(deviation, 0.5, [200])
        if self._tally.pairs >= TRIP_PAIRS_MIN and self._tally.pairs % TRIP_STEP == 0:
            found = trip_limits(self._tally, self._quality.loss_max)
            self._limits = found.lowest(self._limits)
        return self._test.observe(Levels.of(deviation), self._limits) is not None


def count_false_trips(clean: Sequence[Deviation], quality: Quality, seed: int) -> int:
    """Return how often `CLEAN` pairs of recorded blends trip. Each trip starts anew."""
    picks, replay, trips = random.Random(seed), TripReplay(quality), 0
    for _ in range(CLEAN):
        if replay.observe(picks.choice(clean)):
            trips, replay = trips + 1, TripReplay(quality)
    return trips


def pairs_until_trip(
    clean: Sequence[Deviation], damage: Callable[[Deviation], Deviation], quality: Quality, seed: int
) -> int:
    """Return the pairs until blends that changed after 300 clean ones are tripped; 10 * `PAIRS` if never."""
    picks, replay = random.Random(seed), TripReplay(quality)
    for _ in range(PAIRS):
        replay.observe(picks.choice(clean))
    for number in range(1, 10 * PAIRS):
        if replay.observe(damage(picks.choice(clean))):
            return number
    return 10 * PAIRS


def less_agreement(other: Sequence[Deviation], drop: float, seed: int) -> Callable[[Deviation], Deviation]:
    """Return a damage that lowers the mean agreement by ``drop``: some pairs become changed ones of
    ``other``, the records of full KV reuse."""
    changed = [one for one in other if one.changed]
    mean = sum(one.changed for one in changed) / max(1, len(changed))
    picks = random.Random(seed)

    def damage(one: Deviation) -> Deviation:
        return picks.choice(changed) if changed and picks.random() < drop / mean else one

    return damage


def survives_upgrade(quality: Quality) -> bool:
    """Test whether a report that opened under other versions still opens on probation, and whether 32 pairs
    end the probation."""
    keeper = ReportKeeper(None, BINDING, "kintsugi 0.1.0, vllm 0.32.0", quality)
    cell, source = Cell.of(False, 1000), source_of("replayed")
    good = Tally.of(Deviation(0.0005, 0.0), 0.5, [200] * 6)
    for _ in range(60):
        keeper.record(cell, source, LADDER[0], good)
    document = keeper.report.to_bytes()
    report = Report.from_bytes(document)
    before = report.allowance(cell, source, quality, "kintsugi 0.1.1, vllm 0.32.1")
    part = ReportPart("other", "kintsugi 0.1.1, vllm 0.32.1", keeper.now)
    later = ReportKeeper(None, BINDING, part.versions, quality)
    later.report = report
    for _ in range(32):
        later.record(cell, source, LADDER[0], good)
    after = later.report.allowance(cell, source, quality, part.versions)
    return bool(before and before.on_probation and after and not after.on_probation)
