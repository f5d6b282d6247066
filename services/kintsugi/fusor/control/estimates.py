"""Recent measurements for the loading controller: how fast bytes arrive and what computing costs.

A `Meter` measures a stream; everything else is reported by callers. Every estimate forgets old values, so it
follows a store that became slow or a machine that became busy. Cost: an exponential mean per transfer; about
0.2 ms per observed step or blend for a fit of at most five terms; a snapshot copies one small dictionary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kintsugi.core.exchange import ChunkLost, LayerFrame
from kintsugi.core.plan import ChunkSource

RECENT_SHARE = 0.25
"""Weight of the newest value in a mean; the first values have equal weight."""
OUTLIER_FACTOR = 4.0
"""A measurement counts as at most this many times the estimate, because one pause of the machine is not a
slow store. A second outlier in a row is taken at face value."""
BELIEVED_SHARE = 0.5
"""Weight of a second outlier in a row."""
OUTLIER_FLOOR_S = 1e-3
"""Estimates below this value count as this value when outliers are detected."""
FORGETTING = 0.98
"""Factor by which each new observation multiplies the weight of a fit's earlier ones."""
PRIOR_OBSERVATIONS = 0.5
"""Weight of a fit's prior, per term, in observations. It does not shrink with more observations, because a
service's prompts are similar, and their differences reveal little about single terms."""
SWEEPS = 40
"""Maximum number of coordinate descent sweeps."""
CONVERGED_SHARE = 1e-7
"""Sweeps end when none of the coefficients changed by more than this share."""
BLENDS_MIN = 2
"""Passes needed before their fit is used; an engine's first pass, which prepares kernels, does not count."""
STEPS_MIN = 2
"""Engine steps needed before their fit is used."""
STEP_TOKENS_MIN = 16
"""Steps with fewer new tokens are ignored: they show the cost of a decode, not of a prefill."""
EXTRAPOLATION_MAX = 8.0
"""A step is predicted only from steps that had at least 1 / `EXTRAPOLATION_MAX` of its tokens."""


@dataclass
class Transfer:
    """The part of one stream that came from one source."""

    source: ChunkSource
    opening_s: float
    """Time until the first frame arrived: the network round trip, the shard's queue, and the frame itself."""
    opening_bytes: int
    wait_s: float = 0.0
    """Time spent waiting for the other measured frames."""
    num_bytes: int = 0
    """Bytes of the other measured frames."""


Frames = Iterator[LayerFrame | ChunkLost]


@dataclass
class Meter:
    """Measures, where the loader reads a stream, how long each source kept it waiting.

    Only the layers that the loader takes without waiting for room are measured: later ones may have arrived
    while it waited and would make the source look faster than it is. The loader's thread writes the meter;
    others read it after that thread or the pass has ended, and may miss the newest frame. Cost: two clock
    readings per frame.
    """

    sources: Sequence[ChunkSource]
    """The source of each chunk of the stream."""
    layers_max: int
    clock: Callable[[], float] = time.perf_counter
    decode_s: float = 0.0
    """Seconds that the consumer spent on the frames."""
    decode_bytes: int = 0
    _transfers: dict[ChunkSource, Transfer] = field(default_factory=dict)

    def measure(self, frames: Frames) -> Frames:
        """Yield the same frames, measured. Closes `frames`."""
        try:
            asked = self.clock()
            for item in frames:
                arrived = self.clock()
                yield item
                if isinstance(item, LayerFrame) and item.layer < self.layers_max:
                    self._add(self.sources[item.chunk], arrived - asked, len(item.data))
                    if item.layer < self.layers_max - 1:  # then the loader may wait for room
                        self.decode_s += self.clock() - arrived
                        self.decode_bytes += len(item.data)
                asked = self.clock()
        finally:
            close = getattr(frames, "close", None)
            if close is not None:
                close()

    def _add(self, source: ChunkSource, seconds: float, num_bytes: int) -> None:
        known = self._transfers.get(source)
        if known is None:
            self._transfers[source] = Transfer(source, seconds, num_bytes)
        else:
            known.wait_s += seconds
            known.num_bytes += num_bytes

    @property
    def transfers(self) -> list[Transfer]:
        return [replace(transfer) for transfer in self._transfers.values()]


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of a source."""

    opening_s: float
    """Seconds until bytes arrive: the network round trip and the shard's queue."""
    s_per_byte: float


Terms = tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """A snapshot of all estimates. Seconds; None where nothing is known yet."""

    links: Mapping[ChunkSource, Link] = field(default_factory=lambda: MappingProxyType({}))
    decode_s_per_byte: float = 0.0
    """Cost of decoding and rotating, on the loader's thread."""
    step: Terms | None = None
    """Coefficients of an engine step: constant, per new token, per attended pair of tokens."""
    step_tokens_seen: int = 0
    """Largest number of new tokens in a recently measured step."""
    blend: Terms | None = None
    """Coefficients of a pass: constant, per token-layer, per attended pair in runs of tokens, per attended
    pair of scattered tokens, per row written."""
    tail_s: float = 0.0
    """Time from the end of a pass to the first token, plus the time between the pass's slices."""


class Estimates:
    """Collects observations and estimates from them. Not thread-safe."""

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
        """Observe an engine step that forwarded `tokens` new tokens and ran none of our passes."""
        if tokens < STEP_TOKENS_MIN or seconds <= 0:
            return
        self._step.add((1.0, float(tokens), pairs), seconds)
        self._step_tokens_seen = max(FORGETTING * self._step_tokens_seen, tokens)

    def observe_blend(self, terms: Terms, num_layers: int, seconds: float) -> None:
        """Observe a pass: its terms, in the order of `Measured.blend`, and the seconds that it computed."""
        self._blends_seen += 1
        if self._blends_seen == 1 or seconds <= 0:
            return
        step = self._known_step
        self._blend.add(terms, seconds, None if step is None else blend_prior(step, num_layers))

    def observe_tail(self, seconds: float) -> None:
        if self._blends_seen != 1:  # the first pass prepared kernels
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
    """Coefficients of a pass if each of its layers cost as much as in an engine step."""
    constant, per_token, per_pair = step
    return constant, per_token / num_layers, per_pair / num_layers, per_pair / num_layers, 0.0


class _Mean:
    """Exponentially weighted mean; a plain mean while there are few values. Of the first two values the
    smaller counts, because the first pays for connections and kernels. Values below the mean are averaged
    geometrically: a store that became a hundred times faster is read rarely and must be noticed after a few
    reads."""

    def __init__(self, floor: float = 0.0) -> None:
        """`floor`: the mean counts as at least this much when an outlier is detected."""
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
    """Least squares of relative errors, with forgetting and a prior; coefficients are never negative.

    Errors are relative, so that long prompts do not outweigh short ones, and an observation that a pause made
    slow weighs little. One that is too fast would weigh too much (a step seems short if the end of the
    previous step was noticed late): it counts as the forecast ÷ `OUTLIER_FACTOR`, unless it is the second in
    a row.

    Similar prompts reveal their total cost but not the cost of each term. The prior supplies the proportions,
    which are scaled to the observed total. Without a prior all cost is attributed to the second term, the
    work: half the work takes half the time.

    Solved by coordinate descent from the last solution; the problem is convex.
    """

    def __init__(self, size: int) -> None:
        self.value: Terms = (0.0,) * size
        self.count = 0
        self._weight = 0.0
        self._was_fast = False
        self._gram = [[0.0] * size for _ in range(size)]
        self._right = [0.0] * size

    def add(self, terms: Sequence[float], seconds: float, prior: Sequence[float] | None = None) -> None:
        """Add an observation. `prior`: the current proportions of the coefficients, if another source knows
        them."""
        seconds = self._clip_outlier(terms, seconds)
        rows = [term / seconds for term in terms]
        self.count += 1
        self._weight = FORGETTING * self._weight + 1.0
        for index, row in enumerate(rows):
            self._right[index] = FORGETTING * self._right[index] + row
            for other, column in enumerate(rows):
                self._gram[index][other] = FORGETTING * self._gram[index][other] + row * column
        work_only = (0.0, 1.0, *(0.0,) * (len(rows) - 2))
        self.value = self._solve_coefficients(self._scale_prior(work_only if prior is None else prior))

    def _scale_prior(self, prior: Sequence[float]) -> Terms:
        """Multiply the prior by the factor that fits the observations best."""
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
