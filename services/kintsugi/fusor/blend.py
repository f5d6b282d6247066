"""The blend pass: merges loaded chunk KV with freshly computed KV, layer by layer.

For each layer: fetch the loaded K and V (the loader has already started), write them into the cache, let the
selector filter the hit tokens, and prefill the active tokens. The question and missed tokens are always
active; hit tokens that are exact as loaded are active only at a ratio of 1. If the selector uses the
question's attention, the question first runs alone through the first layers (`fusor.question`). The pass is
cut into units of bounded work, so that an engine can run a few of them between two decode steps.

Cost, in token-layers: the active tokens of every layer; plus, at each layer that filters by deviation,
`projection_share` of every token that was active before (including the question's tokens); plus the
question's own pass. `fusor.control.cost` predicts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kintsugi.core.accounting import LayerTiming
from kintsugi.core.plan import BlendPlan
from kintsugi.fusor.gaps import find_left_out, find_question
from kintsugi.fusor.loader import LayerLoader, LoadedLayer, LoadFailed
from kintsugi.fusor.question import QuestionPass
from kintsugi.fusor.selectors import Candidates, Selector, make_selector
from kintsugi.fusor.sliced import (
    WAITING,
    Cut,
    Mark,
    PassStatus,
    SlicedWork,
    Stopwatch,
    Units,
    reached_s,
    run_in_units,
)
from kintsugi.fusor.stack import DecoderStack, FreshKV, Hidden
from kintsugi.fusor.staging import upload

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
    """Counts of a pass. `engine.worker.side` turns them into the request's accounting."""

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


@dataclass(frozen=True)
class ActiveSet:
    """The tokens that a layer computes: int64 tensors on the stack's device. The host knows the size of every
    set, so it need not wait for the device to drop tokens."""

    positions: Tensor
    """Ascending."""
    always: Tensor
    """Rows of `positions` that no selector may drop."""
    candidates: Tensor
    """Rows of `positions` that a selector may drop."""
    on_host: Tensor | None
    """The positions on the host; None if they were selected on the device."""

    @staticmethod
    def of(positions: Tensor, is_candidate: Tensor, device: torch.device) -> ActiveSet:
        """Create the set from positions and flags on the host."""
        always, candidates = (~is_candidate).nonzero()[:, 0], is_candidate.nonzero()[:, 0]
        return ActiveSet(
            upload(positions, device), upload(always, device), upload(candidates, device), positions
        )

    def keep(self, kept: Tensor) -> tuple[ActiveSet, Tensor]:
        """Drop all candidates except `kept`, ascending indices of `candidates`. Returns the set and the rows
        that stay."""
        candidates = self.candidates[kept]
        rows = torch.cat((self.always, candidates)).sort().values
        always, candidates = torch.searchsorted(rows, self.always), torch.searchsorted(rows, candidates)
        return ActiveSet(self.positions[rows], always, candidates, None), rows


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
        """Layers that the question's pass has fetched and that the blend has not reached yet."""
        self.watch = Stopwatch(stack.device)
        self._waits = Stopwatch(stack.device)
        """Runs on the device while the pass waits for a loaded layer."""
        self._layer_marks: list[Mark] = []
        """On a GPU: the begin and end of each layer."""
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
        """Begin at layer 0 with the current plan."""
        self.close()
        # Before the loader starts its threads, so that an error here leaves no threads behind.
        self._place_tokens()
        self._loader = self._stack.contain(lambda: self._open_loader(self.plan), lambda: None)
        self.tally.timeline.clear()
        self._layer_marks.clear()
        self.tally.active_positions.clear()
        self._units = self._layers()

    def next_unit(self) -> float:
        try:
            cost = next(self._units)
        except StopIteration:
            self._finish(PassStatus.DONE)
            return 0.0
        except LoadFailed as failure:
            self._recover(failure)
            return WAITING  # the new loader has only just begun
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
        offsets = torch.zeros(len(region.token_ids), dtype=torch.int64)
        for hit in self.plan.hits:
            rows = slice(max(hit.start - region.start, 0), max(hit.end - region.start, 0))
            is_hit[rows] = True
            offsets[rows] = torch.arange(region.start, region.end)[rows] - hit.start
        self._hit_positions = is_hit.nonzero()[:, 0] + region.start
        self._must_positions = (~is_hit).nonzero()[:, 0] + region.start
        self._is_candidate = is_hit.clone()
        self._is_candidate[: max(self.plan.exact_end - region.start, 0)] = False
        self._num_candidates = int(self._is_candidate.sum())
        self._offsets = upload(offsets[self._is_candidate], self._stack.device)
        self._hits = upload(self._hit_positions, self._stack.device)
        self._hit_slots = self._stack.slots(self._hits)
        self._lost: LoadFailed | None = None
        self.tally.tokens_hit = len(self._hit_positions)

    def _layers(self) -> Units[None]:
        """Run the whole pass; yields the cost of each unit."""
        num_layers = self._stack.num_layers
        selector = make_selector(self.plan.selection, num_layers, self._stack.attending)
        ratio = self.plan.selection.ratio
        filters = 0 < ratio < 1 and self._num_candidates > 0
        self._activate(self._initial_set(filters, ratio))
        self._attention = None
        written = 0
        if filters and selector.query_layers:
            self._attention = yield from self._ask(selector)
            written = max(selector.query_layers)  # its last layer was only projected
        hidden = self._embed()
        began = self.tally.started_s
        for layer in range(num_layers):
            loaded = yield from self.fetch_kv(layer)
            self._mark_layer()
            self._stack.begin_layer(layer)
            computing = time.perf_counter()
            if layer >= written or not self._stack.keeps_layer(layer):
                self._stack.write_kv(layer, self._hit_slots, loaded.key, loaded.value)
            if filters:
                hidden = yield from self._filter(layer, hidden, loaded, selector)
            yield from self.prefill_layer(layer, hidden)
            self._stack.end_layer(layer)
            self._mark_layer()
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
                self.tally.active_positions[layer] = self._active.positions.tolist()
        self._agree_on_losses()
        self.tally.tokens_recomputed = len(self._active.positions) - len(self._must_positions)
        yield from self.wait_for_device(self._stack)
        self._read_device_times()
        yield 0.0

    def _initial_set(self, filters: bool, ratio: float) -> ActiveSet:
        """The tokens that layer 0 computes before anything is selected."""
        everything = torch.arange(self.region.start, self.region.end)
        is_active = torch.ones_like(self._is_candidate)
        if ratio < 1:
            is_active[self._hit_positions - self.region.start] = False
        if filters:
            is_active |= self._is_candidate
        return ActiveSet.of(everything[is_active], self._is_candidate[is_active], self._stack.device)

    def _embed(self) -> Hidden:
        positions = self._active.on_host
        assert positions is not None
        if not len(positions):
            return Hidden(torch.empty(0), None)
        return self._stack.embed(self.region.token_ids[positions - self.region.start], positions)

    def _ask(self, selector: Selector) -> Units[Tensor]:
        """Run the question's pass. Returns its attention to the hit tokens, fp32 `[hit tokens]`, the same on
        every rank."""
        start, end, stack = self.region.start, self.region.end, self._stack
        plan, left_out = self.plan, list[range]()
        if stack.sees_order_alone:
            left_out = find_left_out(plan.hits, plan.chunks, start, plan.exact_end)
        tokens = torch.cat((self._must_positions, torch.tensor([end])))
        for gap in left_out:
            tokens = tokens[(tokens < gap.start) | (tokens >= gap.stop)]
        if left_out:
            stack = stack.with_own_cache(start, end + 1 - sum(map(len, left_out)))
        every_id = torch.cat((self.region.token_ids, torch.tensor([self.region.next_token_id])))
        question = QuestionPass(
            stack,
            self._hit_positions,
            tokens,
            stack.embed(every_id[tokens - start], tokens),
            selector.query_layers,
            self._unit_tokens_max,
            plan.exact_end,
            find_question(plan.hits, plan.chunks),
            left_out,
        )
        for layer in range(question.num_layers):
            loaded = yield from self.fetch_kv(layer)
            is_kept = self._stack.keeps_layer(layer)
            if left_out and is_kept and layer < question.num_layers - 1:
                self._write_hits(layer, loaded)
            yield from self._time_units(question.pass_layer(layer, loaded))
            is_needed = needs_loaded(selector, layer, is_kept)
            self._fetched[layer] = loaded if is_needed else loaded.without_kv()
        return self._stack.sum_over_ranks(question.attention)

    def _write_hits(self, layer: int, loaded: LoadedLayer) -> None:
        """Write a layer into the blend's cache, because the question's pass has its own."""
        self._stack.begin_layer(layer)
        self._stack.write_kv(layer, self._hit_slots, loaded.key, loaded.value)
        self._stack.end_layer(layer)

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
        loaded = yield from self._wait_for(lambda waited_s: self._poll_loader(layer, waited_s))
        self.tally.bytes_loaded += loaded.num_bytes
        return loaded

    def _wait_for(self, poll: Callable[[float], T | None]) -> Units[T]:
        """Poll until something has arrived; yields `WAITING` meanwhile. `poll` is called with the seconds
        waited so far."""
        asked = time.perf_counter()
        self.watch.stop()
        self._waits.start()
        while True:
            looked = time.perf_counter()
            arrived = poll(looked - asked)
            self.tally.polled_s += time.perf_counter() - looked
            if arrived is not None:
                self.tally.load_wait_s += time.perf_counter() - asked
                self._waits.stop()
                self.watch.start()
                return arrived
            yield WAITING
            self.watch.stop()

    def _poll_loader(self, layer: int, waited_s: float) -> LoadedLayer | None:
        """Poll the loader once. Raises `LoadFailed`."""
        if self._stack.world_size > 1:
            return self._take_in_step(layer)
        assert self._loader is not None
        loaded = self._loader.take(layer, POLL_S)
        if loaded is None and waited_s > self._loader.patience_s:
            # Stores enforce a deadline of their own; one that does not must not hold a request forever.
            raise self._time_out(self._loader, f"layer {layer}")
        return loaded

    def _take_in_step(self, layer: int) -> LoadedLayer:
        """Wait for the layer. A rank that has lost it continues with zeros, because the others wait for its
        part of every all-reduce. Ranks agree on losses after layer 0, where most losses are seen, and after
        the last layer: a round trip between hosts in every layer would cost more."""
        loaded, loader = None, self._loader
        if self._lost is None and loader is not None:
            try:
                loaded = loader.take(layer, loader.patience_s)
                self._lost = None if loaded is not None else self._time_out(loader, f"layer {layer}")
            except LoadFailed as failure:
                self._lost = failure
        if layer == 0:
            self._agree_on_losses()
        assert loader is not None, "a loader that did not open is a failure, on which the ranks have agreed"
        return loaded or loader.zeros(layer)

    def _time_out(self, loader: LayerLoader, missing: str) -> LoadFailed:
        every_key = frozenset(hit.key for hit in self.plan.hits)
        return LoadFailed(every_key, f"load_timeout: {missing} did not arrive within {loader.patience_s:g} s")

    def _agree_on_losses(self) -> None:
        """Raise `LoadFailed` on every rank if any rank has lost chunks."""
        if self._stack.world_size == 1:
            return
        if self._lost is None and self._stack.failure is not None:
            self._lost = LoadFailed(frozenset(hit.key for hit in self.plan.hits), self._stack.failure)
        lost_here = [float(self._lost is not None and hit.key in self._lost.keys) for hit in self.plan.hits]
        lost_anywhere = self._stack.sum_over_ranks(torch.tensor(lost_here)).tolist()
        keys = frozenset(hit.key for hit, lost in zip(self.plan.hits, lost_anywhere, strict=True) if lost > 0)
        if keys:
            reason = "other_rank: a chunk was lost, or a layer failed, on another tensor-parallel rank"
            if self._lost is not None:
                reason = self._lost.reason
            raise LoadFailed(keys, reason)

    def _filter(self, layer: int, hidden: Hidden, loaded: LoadedLayer, selector: Selector) -> Units[Hidden]:
        """Let the selector drop hit tokens from the active set. Returns the hidden states of the remaining
        tokens. If K and V were projected to measure deviation, the cache keeps the fresh K and V at this
        layer."""
        signal = selector.signal_at(layer)
        if signal is None:
            return hidden
        active = self._active
        deviation = None
        if signal:
            deviation = yield from self._time_units(self._measure_deviation(layer, hidden, loaded))
        positions = active.positions[active.candidates]
        attention = None
        if self._attention is not None:
            attention = self._attention[torch.searchsorted(self._hits, positions)]
        kept = selector.keep(
            layer, Candidates(positions, self._offsets, self._num_candidates, attention, deviation)
        )
        self._offsets = self._offsets[kept]
        active, rows = active.keep(kept)
        self._activate(active)
        return self._stack.contain(lambda: hidden.take(rows), lambda: hidden)

    def _measure_deviation(self, layer: int, hidden: Hidden, loaded: LoadedLayer) -> Units[Tensor]:
        """Return the squared distance between loaded and fresh K and V, fp32 `[candidates]`, summed over
        heads.

        Tokens that were not loaded are compared with an arbitrary token and excluded at the end: to exclude
        them from each unit, the host would have to wait for their number.
        """
        parts: list[Tensor] = []
        positions = self._active.positions
        loaded_rows = torch.searchsorted(self._hits, positions).clamp_(max=len(self._hits) - 1)
        for rows, batch in self._cut.units:
            fresh = self._stack.project_kv(layer, hidden.take(rows), batch)
            measure = partial(_square_distances, fresh, loaded, loaded_rows[rows])
            nothing = partial(torch.zeros, batch.num_tokens, device=loaded.key.device)
            parts.append(self._stack.contain(measure, nothing))
            self._stack.write_kv(layer, self._stack.slots(positions[rows]), fresh.key, fresh.value)
            yield batch.num_tokens * self._stack.projection_share
        return self._stack.sum_over_ranks(torch.cat(parts)[self._active.candidates])

    def prefill_layer(self, layer: int, hidden: Hidden) -> Units[None]:
        """Run one layer over the active tokens; `hidden` becomes the layer's output."""
        yield from self._time_units(run_in_units(self._stack, layer, hidden, self._cut))

    def _mark_layer(self) -> None:
        """Note where a layer begins or ends in a GPU's queue."""
        if self._stack.device.type == "cuda":
            self._layer_marks.append(Mark.of(self._stack.device))

    def _read_device_times(self) -> None:
        """Replace the host's times by the GPU's after it has finished the pass: the host launches work early,
        and may wait while the GPU still computes."""
        device_s, waited_s = self.watch.seconds(), self._waits.seconds()
        if device_s is None or waited_s is None:
            return
        self.tally.compute_s, self.tally.load_wait_s = device_s, waited_s
        began_s = self.tally.started_s
        ms = [round((moment_s - began_s) * 1e3, 3) for moment_s in reached_s(self._layer_marks)]
        for layer, (first, last) in enumerate(zip(ms[::2], ms[1::2], strict=True)):
            timing = self.tally.timeline[layer]
            self.tally.timeline[layer] = replace(timing, compute_start_ms=first, compute_end_ms=last)

    def _activate(self, active: ActiveSet) -> None:
        self._active = active
        self._prepared: Cut | None = None

    @property
    def _cut(self) -> Cut:
        """The active set, cut into units on first use, because a set may be filtered before it is used."""
        if self._prepared is None:
            active = self._active
            positions = active.positions if active.on_host is None else active.on_host
            self._prepared = Cut.of(self._stack, positions, self._unit_tokens_max)
        return self._prepared


def needs_loaded(selector: Selector, layer: int, is_kept: bool) -> bool:
    """Return whether the blend needs a layer's loaded K and V after the question's pass, to write them or to
    compare them with fresh ones. `is_kept`: whether the cache keeps what that pass has written."""
    is_written = is_kept and layer < max(selector.query_layers)  # the last query layer is only projected
    return not is_written or bool(selector.signal_at(layer))


def _square_distances(fresh: FreshKV, loaded: LoadedLayer, rows: Tensor) -> Tensor:
    """Return the squared distance of K and V from these rows of the loaded layer: fp32 `[tokens]`."""
    pairs = ((fresh.key, loaded.key), (fresh.value, loaded.value))
    by_key, by_value = ((new.float() - old[rows].float()).square().sum((1, 2)) for new, old in pairs)
    return by_key + by_value
