"""What was measured lately, for the loading controller: how fast bytes come and what computing costs.

Stateful, but without clock and I/O: who observes also measures. Every estimate forgets, so that it follows a
store that became slow and a machine that became busy. Cost: an exponential mean per transfer; about 0.2 ms
per observed step or blend for a fit of at most five terms; a snapshot copies one small dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kintsugi.core.plan import ChunkSource

RECENT_SHARE = 0.25
"""Weight of the newest transfer; the first ones count alike."""
OUTLIER_FACTOR = 4.0
"""A measurement counts as at most so many times the estimate: one pause of the machine is not a slow store.
The second in a row is believed."""
BELIEVED_SHARE = 0.5
OUTLIER_FLOOR_S = 1e-3
"""An estimate of no time at all counts as so much when a pause is told from a change."""
FORGETTING = 0.98
"""What a fit keeps of its past with each observation."""
PRIOR_OBSERVATIONS = 0.5
"""How many observations a fit's prior is worth, term by term, however many there are: a service's prompts are
alike, and what their differences say of single terms is mostly noise."""
SWEEPS = 40
CONVERGED_SHARE = 1e-7
"""A sweep that changes no coefficient by more is the last."""
BLENDS_MIN = 2
"""Passes before a fit of them counts; the first of an engine, which prepares kernels, is not among them."""
STEPS_MIN = 2
STEP_TOKENS_MIN = 16
"""Steps with fewer new tokens say what a decode costs, not what a prefill does."""
EXTRAPOLATION_MAX = 8.0
"""A step is predicted from steps that had at least this part of its tokens."""


@dataclass(frozen=True)
class Transfer:
    """What one stream read from one source."""

    source: ChunkSource
    opening_s: float
    """Wait for the first frame: the way there, the shard's queue, and the frame itself."""
    opening_bytes: int
    wait_s: float
    """Wait for the other frames that count."""
    num_bytes: int
    """Of those other frames."""


@dataclass(frozen=True)
class Link:
    """How a source answers."""

    opening_s: float
    """Until bytes come: the way there and the shard's queue."""
    s_per_byte: float

    @property
    def bytes_per_s(self) -> float:
        return 1 / self.s_per_byte if self.s_per_byte else float("inf")


Terms = tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """Everything known at one moment. Seconds; None where nothing is known yet."""

    links: Mapping[ChunkSource, Link] = field(default_factory=lambda: MappingProxyType({}))
    decode_s_per_byte: float = 0.0
    """Decoding and rotating, on the loader's thread."""
    step: Terms | None = None
    """Of an engine step: constant, per new token, per attended pair of tokens."""
    step_tokens_seen: int = 0
    """The most new tokens of a step that was measured lately."""
    blend: Terms | None = None
    """Of a pass: constant, per token-layer, per pair in runs of tokens, per pair of scattered tokens, per
    row that is written."""
    tail_s: float = 0.0
    """From the end of a pass to the first token, and what lies between its slices."""


class Estimates:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._links: dict[ChunkSource, tuple[_Mean, _Mean]] = {}
        self._decode = _Mean()
        self._step = Fit(3)
        self._step_tokens_seen = 0.0
        self._blend = Fit(5)
        self._blends_seen = 0
        self._tail = _Mean(OUTLIER_FLOOR_S)

    def observe_transfer(self, transfer: Transfer) -> None:
        opening, rate = self._links.setdefault(transfer.source, (_Mean(OUTLIER_FLOOR_S), _Mean()))
        if transfer.num_bytes:
            rate.add(transfer.wait_s / transfer.num_bytes)
            opening.add(max(0.0, transfer.opening_s - rate.value * transfer.opening_bytes))
        elif transfer.opening_bytes:
            rate.add(transfer.opening_s / transfer.opening_bytes)

    def observe_decode(self, seconds: float, num_bytes: int) -> None:
        if num_bytes and self._blends_seen:  # the first pass prepared kernels
            self._decode.add(seconds / num_bytes)

    def observe_step(self, tokens: int, pairs: float, seconds: float) -> None:
        """One engine step that forwarded `tokens` new tokens and did nothing of ours beside it."""
        if tokens < STEP_TOKENS_MIN or seconds <= 0:
            return
        self._step.add((1.0, float(tokens), pairs), seconds)
        self._step_tokens_seen = max(FORGETTING * self._step_tokens_seen, tokens)

    def observe_blend(self, terms: Terms, num_layers: int, seconds: float) -> None:
        """One pass: its terms, as `Measured.blend` has them, and the seconds that it computed."""
        self._blends_seen += 1
        if self._blends_seen == 1 or seconds <= 0:
            return
        step = self._known_step
        self._blend.add(terms, seconds, None if step is None else blend_prior(step, num_layers))

    def observe_tail(self, seconds: float) -> None:
        if self._blends_seen != 1:  # that one prepared kernels
            self._tail.add(max(0.0, seconds))

    @property
    def _known_step(self) -> Terms | None:
        return self._step.value if self._step.count >= STEPS_MIN else None

    def snapshot(self) -> Measured:
        return Measured(
            links={
                source: Link(opening.value, rate.value) for source, (opening, rate) in self._links.items()
            },
            decode_s_per_byte=self._decode.value,
            step=self._known_step,
            step_tokens_seen=round(self._step_tokens_seen),
            blend=self._blend.value if self._blend.count >= BLENDS_MIN else None,
            tail_s=self._tail.value,
        )


def blend_prior(step: Terms, num_layers: int) -> Terms:
    """What a pass would cost if a layer of it cost what it does in a step."""
    constant, per_token, per_pair = step
    return constant, per_token / num_layers, per_pair / num_layers, per_pair / num_layers, 0.0


class _Mean:
    """Exponentially weighted; plain while there are few, and of the first two the smaller, as the first pays
    for connections and kernels. Downwards in ratios: a store that became a hundred times faster is read
    rarely, and is to be noticed after a few times."""

    def __init__(self, floor: float = 0.0) -> None:
        """Below `floor` nothing is an outlier."""
        self.value = 0.0
        self._floor = floor
        self._count = 0
        self._was_outlier = False

    def add(self, value: float) -> None:
        self._count += 1
        if self._count == 2:
            self.value = min(self.value, value)
            return
        share = max(RECENT_SHARE, 1 / self._count)
        if self._count > 2 and 0 < value < self.value:
            self._was_outlier = False
            self.value *= (value / self.value) ** share
            return
        limit = OUTLIER_FACTOR * max(self.value, self._floor)
        is_outlier = self._count > 2 and 0 < limit < value
        if is_outlier and self._was_outlier:
            share = BELIEVED_SHARE
        elif is_outlier:
            value = limit
        self._was_outlier = is_outlier
        self.value += share * (value - self.value)


class Fit:
    """Least squares of relative errors with forgetting, drawn to a prior; no coefficient is ever negative.

    Relative, so that long prompts do not drown short ones, and an observation that a pause made slow weighs
    little. One that is too fast would weigh all the more (a step seems short when the end of the one before
    was noticed late): it counts as the forecast ÷ `OUTLIER_FACTOR`, and the second in a row is believed.

    Prompts that are alike tell what they cost, not which term costs it. That the prior tells, made as dear as
    what was observed; without one the second term costs all, the work: half of it takes half the time.

    Solved by coordinate descent from the last solution: the problem is convex.
    """

    def __init__(self, size: int) -> None:
        self.value: Terms = (0.0,) * size
        self.count = 0
        self._weight = 0.0
        self._was_fast = False
        self._gram = [[0.0] * size for _ in range(size)]
        self._right = [0.0] * size

    def add(self, terms: Sequence[float], seconds: float, prior: Sequence[float] | None = None) -> None:
        """`prior`: how the coefficients compare, as far as that is known otherwise at this moment."""
        seconds = self._clip_outlier(terms, seconds)
        rows = [term / seconds for term in terms]
        self.count += 1
        self._weight = FORGETTING * self._weight + 1.0
        for index, row in enumerate(rows):
            self._right[index] = FORGETTING * self._right[index] + row
            for other, column in enumerate(rows):
                self._gram[index][other] = FORGETTING * self._gram[index][other] + row * column
        work_alone = (0.0, 1.0, *(0.0,) * (len(rows) - 2))
        self.value = self._solve_coefficients(self._as_dear(work_alone if prior is None else prior))

    def _as_dear(self, prior: Sequence[float]) -> Terms:
        """The prior times the factor at which it fits best."""
        products = [sum(cell * other for cell, other in zip(row, prior, strict=True)) for row in self._gram]
        itself = sum(one * product for one, product in zip(prior, products, strict=True))
        observed = sum(one * right for one, right in zip(prior, self._right, strict=True))
        factor = observed / itself if itself > 0 else 1.0
        return tuple(factor * one for one in prior)

    def _clip_outlier(self, terms: Sequence[float], seconds: float) -> float:
        known_s = sum(coefficient * term for coefficient, term in zip(self.value, terms, strict=True))
        is_fast = self.count > 0 and seconds < known_s / OUTLIER_FACTOR
        is_first, self._was_fast = is_fast and not self._was_fast, is_fast
        return known_s / OUTLIER_FACTOR if is_first else seconds

    def _solve_coefficients(self, prior: Sequence[float]) -> Terms:
        value, pull = list(self.value), PRIOR_OBSERVATIONS / self._weight
        for _ in range(SWEEPS):
            before = tuple(value)
            for index in range(len(value)):
                row = self._gram[index]
                if row[index] > 0:
                    rest = sum(row[other] * value[other] for other in range(len(value)) if other != index)
                    alone = (self._right[index] - rest) / row[index]
                    value[index] = max(0.0, (alone + pull * prior[index]) / (1 + pull))
                else:
                    value[index] = prior[index]
            if all(abs(new - old) <= CONVERGED_SHARE * old for new, old in zip(value, before, strict=True)):
                break
        return tuple(value)
