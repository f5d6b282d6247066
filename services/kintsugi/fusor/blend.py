"""The blend pass: merge loaded chunk KV with freshly computed KV, layer by layer.

For each layer: `fetch_kv` (the loader has already started it), write the loaded K and V into the cache, let
the selector filter the hit tokens, and `prefill_layer` for the tokens that are active. The question and
missed tokens are always active; hit tokens that are exact as loaded are active only at a ratio of 1. If the
selector needs to know what the question attends to, the question first runs alone through the first layers
(`fusor.question`). The pass is cut into units of bounded work, so that an engine can run a few of them
between two decode steps.

Cost, in token-layers: the active tokens of every layer; plus, at each layer that filters by deviation,
`projection_share` of every token that was active before (including the question, whose K and V are projected
with the others); plus the question's own pass. `fusor.control.cost` predicts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from kintsugi.core.accounting import LayerTiming
from kintsugi.core.plan import BlendPlan
from kintsugi.core.spaces import ChunkKey
from kintsugi.fusor.loader import LayerLoader, LoadedLayer, LoadFailed
from kintsugi.fusor.question import QuestionPass
from kintsugi.fusor.selectors import Candidates, Selector, Signal, make_selector
from kintsugi.fusor.sliced import WAITING, Cut, PassStatus, SlicedWork, Units, run_in_units
from kintsugi.fusor.stack import DecoderStack, Hidden

T = TypeVar("T")

POLL_S = 0.002
"""How long one poll for the next layer may block the engine: long enough not to spin, short enough not to
delay a concurrent decode step."""


@dataclass(frozen=True)
class PassRegion:
    """The part of a prompt that a pass computes or loads: positions `[start, end)`."""

    token_ids: Tensor
    """int64 `[end - start]`."""
    start: int
    next_token_id: int
    """The token right after the region. The engine computes it; the pass only uses it as a query
    (`fusor.question`)."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass
class Tally:
    """What the pass has done so far; `engine.worker.side` turns it into the request's accounting."""

    token_layers: float = 0.0
    bytes_loaded: int = 0
    load_wait_s: float = 0.0
    polled_s: float = 0.0
    """Part of `load_wait_s` that was spent inside the pass rather than between two slices."""
    compute_s: float = 0.0
    restarts: int = 0
    failure: str | None = None
    tokens_hit: int = 0
    tokens_recomputed: int = 0
    started_s: float = field(default_factory=time.perf_counter)
    finished_s: float = 0.0
    timeline: list[LayerTiming] = field(default_factory=list)
    active_positions: dict[int, list[int]] = field(default_factory=dict)


OpenLoader = Callable[[BlendPlan], LayerLoader]


class BlendPass(SlicedWork):
    """One prompt's blend."""

    def __init__(
        self,
        region: PassRegion,
        plan: BlendPlan,
        stack: DecoderStack,
        open_loader: OpenLoader,
        unit_tokens_max: int,
        explain: bool = False,
    ) -> None:
        self.region = region
        self.plan = plan
        self.tally = Tally()
        self.status = PassStatus.RUNNING
        self._stack = stack
        self._open_loader = open_loader
        self._unit_tokens_max = unit_tokens_max
        self._explain = explain
        self._loader: LayerLoader | None = None
        self._fetched: dict[int, LoadedLayer] = {}
        """Layers that the question's pass has fetched and the blend has not reached yet."""
        self._start()

    def abandon(self, reason: str) -> None:
        """End as FAILED."""
        self.tally.failure = reason
        self._finish(PassStatus.FAILED)

    def close(self) -> None:
        self._fetched.clear()
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _start(self) -> None:
        """Begin at layer 0 with the plan as it stands."""
        self.close()
        self._loader = self._open_loader(self.plan)
        self.tally.timeline.clear()
        self.tally.active_positions.clear()
        self._place_tokens()
        self._units = self._layers()

    def next_unit(self) -> float:
        try:
            cost = next(self._units)
        except StopIteration:
            self._finish(PassStatus.DONE)
            return 0.0
        except LoadFailed as failure:
            self._recover(failure)
            return 0.0
        if cost > 0:
            self.tally.token_layers += cost
        return cost

    def _recover(self, failure: LoadFailed) -> None:
        """Restart from layer 0 with the lost chunks counted as missed; fail the second time. Tokens dropped
        by selection have no hidden state at the layer that failed, so no later layer can be resumed."""
        self.tally.failure = failure.reason
        remaining = self.plan.without(failure.keys)
        if self.tally.restarts or not remaining.hits:
            self._finish(PassStatus.FAILED)
            return
        self.tally.restarts = 1
        self.plan = remaining
        self._start()

    def _finish(self, status: PassStatus) -> None:
        self.status = status
        self.tally.finished_s = time.perf_counter()
        self.close()

    def _place_tokens(self) -> None:
        """Split the region into tokens of hit chunks and tokens that are always computed."""
        region = self.region
        is_hit = torch.zeros(len(region.token_ids), dtype=torch.bool)
        self._offsets = torch.zeros(len(region.token_ids), dtype=torch.int64)
        for hit in self.plan.hits:
            rows = slice(max(hit.start - region.start, 0), max(hit.end - region.start, 0))
            is_hit[rows] = True
            self._offsets[rows] = torch.arange(region.start, region.end)[rows] - hit.start
        self._hit_positions = is_hit.nonzero()[:, 0] + region.start
        self._must_positions = (~is_hit).nonzero()[:, 0] + region.start
        self._is_hit = is_hit
        self._is_candidate = is_hit.clone()
        self._is_candidate[: max(self.plan.exact_end - region.start, 0)] = False
        self._num_candidates = int(self._is_candidate.sum())
        self.tally.tokens_hit = len(self._hit_positions)

    def _layers(self) -> Units[None]:
        """Run the whole pass; yields the cost of each unit."""
        num_layers = self._stack.num_layers
        selector = make_selector(self.plan.selection, num_layers)
        ratio = self.plan.selection.ratio
        filters = 0 < ratio < 1 and self._num_candidates > 0
        everything = torch.arange(self.region.start, self.region.end)
        if filters:
            self._activate(everything[~self._is_hit | self._is_candidate])
        else:
            self._activate(everything if ratio == 1 else self._must_positions)
        self._attention = None
        written = 0
        if filters and selector.query_layers:
            self._attention = yield from self._ask(selector.query_layers)
            written = max(selector.query_layers)  # which itself was only projected
        hidden = self._embed()
        began = self.tally.started_s
        for layer in range(num_layers):
            loaded = yield from self.fetch_kv(layer)
            self._stack.begin_layer(layer)
            computing = time.perf_counter()
            if layer >= written or not self._stack.keeps_layer(layer):
                self._stack.write_kv(layer, self._hit_positions, loaded.key, loaded.value)
            if filters:
                hidden = yield from self._filter(layer, hidden, loaded, selector)
            yield from self.prefill_layer(layer, hidden)
            self._stack.end_layer(layer)
            now = time.perf_counter()
            self.tally.timeline.append(
                LayerTiming(
                    *(
                        round((moment - began) * 1e3, 3)
                        for moment in (loaded.started_s, loaded.finished_s, computing, now)
                    )
                )
            )
            if self._explain:
                self.tally.active_positions[layer] = self._active.tolist()
        self.tally.tokens_recomputed = int(self._is_hit[self._active - self.region.start].sum())
        yield from self.synchronize()

    def _embed(self) -> Hidden:
        if not len(self._active):
            return Hidden(torch.empty(0), None)
        return self._stack.embed(self.region.token_ids[self._active - self.region.start])

    def _ask(self, query_layers: tuple[int, ...]) -> Units[Tensor]:
        """Run the question's pass. Returns its attention to the hit tokens, fp32 `[hit tokens]`, the same on
        every rank."""
        tokens = torch.cat((self._must_positions, torch.tensor([self.region.end])))
        every_id = torch.cat((self.region.token_ids, torch.tensor([self.region.next_token_id])))
        question = QuestionPass(
            self._stack,
            self._hit_positions,
            tokens,
            self._stack.embed(every_id[tokens - self.region.start]),
            query_layers,
            self._unit_tokens_max,
            self.plan.exact_end,
        )
        for layer in range(question.num_layers):
            loaded = yield from self.fetch_kv(layer)
            yield from self._time_units(question.pass_layer(layer, loaded))
            self._fetched[layer] = loaded
        return self._stack.sum_over_ranks(question.attention)

    def _time_units(self, units: Units[T]) -> Units[T]:
        """Add the time spent in `units` to `compute_s`."""
        while True:
            started = time.perf_counter()
            try:
                cost = next(units)
            except StopIteration as end:
                value: T = end.value
                return value
            finally:
                self.tally.compute_s += time.perf_counter() - started
            yield cost

    def fetch_kv(self, layer: int) -> Units[LoadedLayer]:
        """Take the layer that the loader has prepared; yields `WAITING` while it has not arrived."""
        if layer in self._fetched:
            return self._fetched.pop(layer)
        assert self._loader is not None
        asked = time.perf_counter()
        while True:
            looked = time.perf_counter()
            loaded, lost = self._poll_loader(layer, looked - asked)
            self.tally.polled_s += time.perf_counter() - looked
            if lost:
                raise LoadFailed(lost[0], lost[1])
            if loaded is not None:
                self.tally.load_wait_s += time.perf_counter() - asked
                self.tally.bytes_loaded += loaded.num_bytes
                return loaded
            yield WAITING

    def _poll_loader(
        self, layer: int, waited_s: float
    ) -> tuple[LoadedLayer | None, tuple[frozenset[ChunkKey], str] | None]:
        """Poll the loader once: the layer if it has arrived, and the lost chunks with the reason. Ranks agree
        before any of them goes on: a rank alone in a layer would wait forever for the others' all-reduce."""
        assert self._loader is not None
        loaded, failure = None, None
        alone = self._stack.world_size == 1
        try:
            loaded = self._loader.take(layer, POLL_S if alone else self._loader.patience_s)
        except LoadFailed as error:
            failure = error
        if alone and loaded is None and failure is None and waited_s > self._loader.patience_s:
            # Stores enforce a deadline of their own; one that does not must not hold a request forever.
            every_key = frozenset(hit.key for hit in self.plan.hits)
            failure = LoadFailed(
                every_key, f"load_timeout: layer {layer} did not arrive within {self._loader.patience_s:g} s"
            )
        if alone:
            return loaded, None if failure is None else (failure.keys, failure.reason)
        lost_here = [hit.key in failure.keys if failure else loaded is None for hit in self.plan.hits]
        lost_anywhere = self._stack.sum_over_ranks(torch.tensor(lost_here, dtype=torch.float32))
        keys = frozenset(hit.key for hit, lost in zip(self.plan.hits, lost_anywhere, strict=True) if lost > 0)
        if failure:
            reason = failure.reason
        elif loaded is None:
            reason = f"load_timeout: layer {layer} did not arrive within {self._loader.patience_s:g} s"
        else:
            reason = f"other_rank: layer {layer} could not be loaded there"
        return loaded, (keys, reason) if keys else None

    def _filter(self, layer: int, hidden: Hidden, loaded: LoadedLayer, selector: Selector) -> Units[Hidden]:
        """Let the selector drop hit tokens from the active set. Returns the hidden states of those that stay.

        Tokens whose K and V were projected to measure their deviation keep the fresh K and V at this layer.
        """
        signal = selector.signal_at(layer)
        if signal is None:
            return hidden
        candidate = self._is_candidate[self._active - self.region.start]
        positions = self._active[candidate]
        deviation = None
        if signal:
            measuring = self._measure_deviation(layer, hidden, loaded, candidate, signal)
            deviation = yield from self._time_units(measuring)
        attention = self._attention
        if attention is not None:
            attention = attention[torch.searchsorted(self._hit_positions, positions)]
        offsets = self._offsets[positions - self.region.start]
        kept = selector.keep(
            layer, Candidates(positions, offsets, self._num_candidates, attention, deviation)
        )
        stays = ~candidate
        stays[candidate.nonzero()[:, 0][kept]] = True
        index = stays.nonzero()[:, 0]
        self._activate(self._active[index])
        return hidden.take(index)

    def _measure_deviation(
        self, layer: int, hidden: Hidden, loaded: LoadedLayer, candidate: Tensor, signal: Signal
    ) -> Units[Tensor]:
        """Squared distance between loaded and fresh K and V, fp32 `[candidates]`, summed over heads."""
        parts: list[Tensor] = []
        for rows, batch in self._cut.units:
            wanted = candidate[rows]
            fresh = self._stack.project_kv(layer, hidden.take(rows), batch)
            positions = self._active[rows][wanted]
            key, value = fresh.key[wanted], fresh.value[wanted]
            row = torch.searchsorted(self._hit_positions, positions)
            part = torch.zeros(len(positions), dtype=torch.float32, device=key.device)
            if Signal.K in signal:
                part += _square_distance(key, loaded.key[row])
            if Signal.V in signal:
                part += _square_distance(value, loaded.value[row])
            parts.append(part)
            self._stack.write_kv(layer, positions, key, value)
            yield batch.num_tokens * self._stack.projection_share
        return self._stack.sum_over_ranks(torch.cat(parts)).cpu()

    def prefill_layer(self, layer: int, hidden: Hidden) -> Units[None]:
        """Run one layer over the active tokens; `hidden` becomes the layer's output."""
        yield from self._time_units(run_in_units(self._stack, layer, hidden, self._cut))

    def synchronize(self) -> Units[None]:
        """Wait until everything that the pass queued on the device is done."""
        started = time.perf_counter()
        self._stack.synchronize()
        self.tally.compute_s += time.perf_counter() - started
        yield 0.0

    def _activate(self, positions: Tensor) -> None:
        """Make `positions` the active set."""
        self._active = positions
        self._prepared: Cut | None = None

    @property
    def _cut(self) -> Cut:
        """The active set cut into units. Prepared on first use, because a set may be filtered before it
        is."""
        if self._prepared is None:
            self._prepared = Cut.of(self._stack, self._active, self._unit_tokens_max)
        return self._prepared


def _square_distance(fresh: Tensor, loaded: Tensor) -> Tensor:
    """`[tokens, heads, head_dim]` twice -> fp32 `[tokens]`."""
    return (fresh.float() - loaded.float()).square().sum((1, 2))
