"""Runs vLLM's decoder layers over chosen tokens, with attention over the paged cache.

A layer is called as the model calls it, under a separate forward context: its attention writes the tokens' K
and V into their slots and reads the sequence's blocks. Scattered tokens become pseudo-requests, one per run
of consecutive places, with a context that ends at the run's last token: so the mask is strictly ``kv_place <=
query_place``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from vllm.distributed import (
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kintsugi.core.layout import Part
from kintsugi.engine.worker.attention.latent import LatentRows, replace_latent_attention
from kintsugi.engine.worker.attention.scattered import ScatteredRows, replace_attention_impl, runs_min
from kintsugi.engine.worker.calls import replace_forward
from kintsugi.engine.worker.model import CacheGroup, HeadsKV, LatentKV, Layer, LoadedModel
from kintsugi.engine.worker.ranks import Call, RankPart, is_so_on_any_rank, rank_and_size
from kintsugi.engine.worker.recurrence import RecurrentKV, replace_operation
from kintsugi.engine.worker.states import NULL_BLOCK, RecurrentStates, StateSpan, one_sequence
from kintsugi.fusor.stack import AttentionRule, FreshKV, Hidden, LayerBatch, Slots
from kintsugi.fusor.staging import upload

T = TypeVar("T")


class LeftAtAttention(Exception):
    """Ends a layer call as soon as its K and V are captured."""


@dataclass
class CapturedKV:
    """Attention's inputs in one layer call, `[tokens, heads, width]`, and the key before its rotation if a
    module rotated it."""

    query: Tensor = field(default_factory=lambda: torch.empty(0))
    key: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    key_before_rope: Tensor | None = None


@contextlib.contextmanager
def capture_kv(layer: Layer, captured: CapturedKV, leave: bool) -> Iterator[None]:
    """Capture K and V of one layer call. With ``leave``, end the call before its attention."""
    attention, source, kv = layer.attention, layer.rotation.source, layer.kv
    assert isinstance(kv, HeadsKV)
    attend = attention.forward

    def note(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Parameters are named as in plain attention; latent attention gets the latent first.
        captured.query, captured.key, captured.value = kv.tell_apart(query, key, value)
        if leave:
            raise LeftAtAttention
        return attend(query, key, value, *args, **kwargs)

    def note_key(_module: object, args: Any, kwargs: Any) -> None:
        assert source is not None
        key = pytree.tree_leaves((args, kwargs))[source.key].clone()  # rotated in place
        captured.key_before_rope = key.view(len(key), kv.heads, kv.key_width)

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(LeftAtAttention))
        stack.enter_context(replace_forward(attention, note))
        if source is not None:
            hook = source.module.register_forward_pre_hook(note_key, with_kwargs=True)
            stack.callback(hook.remove)
        yield


def lacks_blocks(block_ids: Sequence[int], count: int) -> bool:
    """Return whether vLLM holds no block for some of a sequence's first ``count`` blocks."""
    return len(block_ids) < count or NULL_BLOCK in block_ids[:count]


class _GroupTables:
    """Block tables of the sequences in one cache group.

    A sliding-window group has null blocks before the window. Tokens before the window's last position still
    need that KV while they are computed, so such a group works in a scratch cache of one layer and copies
    the live blocks in and out. The same holds for a group in which a sequence's last position, or every
    position, has no block: KV written there is dropped.
    """

    def __init__(
        self,
        group: CacheGroup,
        block_ids: Sequence[Sequence[int]],
        ends: Sequence[int],
        device: torch.device,
        keeps: bool = True,
    ) -> None:
        """Without ``keeps``, the group always works in a scratch cache."""
        self.group = group
        per_block = group.block_size // group.kernel_block_size
        tables = []
        for ids, end in zip(block_ids, ends, strict=True):
            count = -(-end // group.block_size)
            assert len(ids) >= count - 1 or not ids
            used = torch.tensor([*ids[:count], *[NULL_BLOCK] * (count - len(ids))], dtype=torch.int64)
            kernel_ids = used[:, None] * per_block + torch.arange(per_block)
            tables.append(torch.where(used[:, None] == NULL_BLOCK, NULL_BLOCK, kernel_ids).flatten())
        real = torch.cat(tables)
        self.needs_scratch = not keeps or any(
            lacks_blocks(ids, -(-end // group.block_size)) for ids, end in zip(block_ids, ends, strict=True)
        )
        if self.needs_scratch:
            live = (real != NULL_BLOCK).nonzero()[:, 0]
            self._scratch_live, self._real_live = upload(live + 1, device), upload(real[live], device)
            self._scratch_blocks = len(real) + 1
            first = torch.cumsum(torch.tensor([1] + [len(t) for t in tables[:-1]]), 0)
            tables = [torch.arange(int(f), int(f) + len(t)) for f, t in zip(first, tables, strict=True)]
        width = max(len(table) for table in tables)
        self.table = torch.zeros(len(tables), width, dtype=torch.int32)
        for row, table in enumerate(tables):
            self.table[row, : len(table)] = table
        self.on_device = upload(self.table, device)
        self._scratch: Tensor | None = None

    def slots(self, places: Tensor, owners: Tensor) -> Tensor:
        """Return the cache slot of each of ``places`` in its sequence, as int64. All tensors are on the
        device."""
        size = self.group.kernel_block_size
        return self.on_device[owners, places // size].long() * size + places % size

    def copy_in(self, real_cache: Tensor) -> None:
        if self._scratch is None:
            self._scratch = real_cache.new_zeros((self._scratch_blocks, *real_cache.shape[1:]))
        self._scratch[self._scratch_live] = real_cache[self._real_live]

    def copy_out(self, real_cache: Tensor) -> None:
        assert self._scratch is not None
        real_cache[self._real_live] = self._scratch[self._scratch_live]

    @contextlib.contextmanager
    def bound(self, attention: Any) -> Iterator[None]:
        """Set the layer's cache during one call. vLLM runs other requests between the calls."""
        if not self.needs_scratch:
            yield
            return
        real = attention.kv_cache
        attention.kv_cache = self._scratch
        try:
            yield
        finally:
            attention.kv_cache = real


@dataclass(frozen=True)
class Prepared:
    """Attention metadata of a batch, by layer name."""

    positions: Tensor
    metadata: dict[str, Any]
    """The backend's metadata; None for layers whose attention our own code computes."""
    slots: dict[str, Tensor]
    scattered: dict[str, ScatteredRows]
    """Rows of layers whose attention our own kernel computes."""
    latent: dict[str, list[LatentRows]]
    """Sequences of layers whose attention `engine.worker.attention.latent` computes."""
    scanned: list[tuple[int, Tensor]]
    """Each sequence with its places on the host, for recurrent layers; empty without such layers."""


class VllmStack:
    """A `fusor.stack.DecoderStack` over a vLLM model, for the sequences of one pass."""

    def __init__(
        self,
        model: LoadedModel,
        block_ids: Sequence[tuple[Sequence[int], ...]],
        ends: Sequence[int],
        before_end: Callable[[], None] | None = None,
        keeps: bool = True,
        starts: Sequence[int] | None = None,
        beyond: int = 0,
    ) -> None:
        """``block_ids[sequence][group]`` are vLLM's; ``[starts[sequence], ends[sequence])`` are the positions
        of the pass, from 0 on by default. ``beyond``: number of positions after them that a question's pass
        uses. ``before_end`` queues work on a GPU that belongs to the pass. Without ``keeps``, nothing is
        written to vLLM's blocks: a layer's scratch cache is dropped at the layer's end."""
        self._model = model
        self._block_ids = block_ids
        self._before_end = before_end
        self._keeps = keeps
        self._part = RankPart()
        self._tables: dict[int, _GroupTables] = {}
        self._states: dict[int, RecurrentStates] = {}
        starts, places = starts or [0] * len(ends), [end + beyond for end in ends]
        for index, group in {layer.group.index: layer.group for layer in model.layers}.items():
            tables = [ids[group.tables] for ids in block_ids]
            if not group.is_recurrent:
                self._tables[index] = _GroupTables(group, tables, places, model.device, keeps)
                continue
            spans = [
                StateSpan.of(ids, group.block_size, start, end, end + beyond)
                for ids, start, end in zip(tables, starts, ends, strict=True)
            ]
            self._states[index] = RecurrentStates(group, model.vllm_config, spans, model.device, keeps)
        self._tails = {
            index: _tails_of(tables, ends, model.device)
            for index, tables in self._tables.items()
            if model.zeroes_blocks
        }

    @property
    def sees_order_alone(self) -> bool:
        return self._model.sees_order_alone

    def with_own_cache(self, start: int, end: int) -> VllmStack:
        (block_ids,) = self._block_ids
        own: list[Sequence[int]] = [()] * len(block_ids)
        for layer in self._model.layers:
            tables, size = layer.group.tables, layer.group.block_size
            cached = block_ids[tables][: -(-start // size)]
            own[tables] = [*cached, *[NULL_BLOCK] * (-(-end // size) - len(cached))]
        stack = VllmStack(self._model, [tuple(own)], [end], keeps=False, starts=[start])
        stack._part = self._part
        return stack

    @property
    def failure(self) -> str | None:
        return self._part.failure

    @property
    def num_layers(self) -> int:
        return len(self._model.layers)

    @property
    def world_size(self) -> int:
        return rank_and_size()[1]

    @property
    def projection_share(self) -> float:
        return self._model.projection_share

    @property
    def device(self) -> torch.device:
        return self._model.device

    def batch(
        self, positions: Tensor, owners: Tensor | None = None, places: Tensor | None = None
    ) -> LayerBatch:
        count = len(positions)
        return LayerBatch(
            count, self.contain(partial(self._prepare, positions, owners, places), lambda: None)
        )

    def _prepare(self, positions: Tensor, owners: Tensor | None, places: Tensor | None) -> Prepared:
        places = positions if places is None else places
        on_host = places if places.device.type == "cpu" else None
        owners = torch.zeros(len(positions), dtype=torch.int64) if owners is None else owners
        owners_there = upload(owners, self.device)
        prepared = Prepared(self._there(positions), {}, {}, {}, {}, [])
        places_there = prepared.positions if places is positions else self._there(places)
        for states in self._states.values():
            # A scan ends at a token that the host knows: for tokens selected on a GPU, it waits here.
            on_host = places.cpu() if on_host is None else on_host
            prepared.scanned[:] = _by_owner(on_host, owners)
            slots = states.slots(places_there, owners_there)
            prepared.slots.update(dict.fromkeys(states.group.layer_names, slots))
        for tables in self._tables.values():
            names = tables.group.layer_names
            slots = tables.slots(places_there, owners_there)
            prepared.slots.update(dict.fromkeys(names, slots))
            if self._kernel_serves(tables, on_host):
                rows = ScatteredRows(places_there.to(torch.int32), tables.on_device[0])
                prepared.scattered.update(dict.fromkeys(names, rows))
                prepared.metadata.update(dict.fromkeys(names))
                continue
            # The backend's metadata depends on the runs: for tokens selected on a GPU, the host waits here.
            on_host = places.cpu() if on_host is None else on_host
            if tables.group.needs_latent_rows and _reads_cache(on_host, owners):
                prepared.latent.update(dict.fromkeys(names, _latent_rows(on_host, owners, tables)))
                prepared.metadata.update(dict.fromkeys(names))
                continue
            common = _common_metadata(on_host, owners, tables, places_there, slots)
            prepared.metadata.update(dict.fromkeys(names, tables.group.build_metadata(common)))
        return prepared

    def _there(self, positions: Tensor) -> Tensor:
        """Return ``positions`` on the device."""
        return positions if positions.device.type == self.device.type else upload(positions, self.device)

    def _kernel_serves(self, tables: _GroupTables, on_host: Tensor | None) -> bool:
        """Return whether our own kernel computes these tokens' attention. Tokens that a GPU selected count as
        scattered: the host does not know their runs."""
        if not tables.group.kernel_serves or len(tables.table) > 1:
            return False
        return on_host is None or int((on_host.diff() != 1).sum()) + 1 >= runs_min(self.device)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        def embed() -> tuple[Tensor, ...]:
            hidden = self._model.embed(token_ids, positions)
            return hidden.states, *hidden.beside

        states, *beside = self._in_step("embed", len(token_ids), embed)
        return Hidden(states, None, tuple(beside))

    def slots(self, places: Tensor) -> Slots:
        places = self._there(places)
        first = torch.zeros_like(places)
        every = (self._tables | self._states).items()
        return Slots({index: tables.slots(places, first) for index, tables in every})

    def begin_layer(self, layer: int) -> None:
        self.contain(partial(self._begin_layer, layer), lambda: None)

    def _begin_layer(self, layer: int) -> None:
        tables, target = self._tables_of(layer), self._model.layers[layer]
        if isinstance(tables, RecurrentStates):
            tables.begin(target)
            return
        if tables.needs_scratch:
            tables.copy_in(target.attention.kv_cache)
        tail = self._tails.get(target.group.index)
        if tail is not None:
            kv = target.kv
            key = target.attention.kv_cache.new_zeros(
                len(tail), kv.heads, kv.key_width, dtype=self._model.dtype
            )
            self._write(target, tables, tail, key, key.new_zeros(len(tail), kv.heads, kv.value_width))

    def end_layer(self, layer: int) -> None:
        self.contain(partial(self._end_layer, layer), lambda: None)

    def _end_layer(self, layer: int) -> None:
        tables, target = self._tables_of(layer), self._model.layers[layer]
        if isinstance(tables, RecurrentStates):
            tables.end(target)
        elif tables.needs_scratch and self._keeps:
            tables.copy_out(target.attention.kv_cache)

    def keeps_layer(self, layer: int) -> bool:
        tables = self._tables_of(layer)
        return isinstance(tables, _GroupTables) and not tables.needs_scratch

    def write_kv(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        if len(key):
            self.contain(partial(self._write_kv, layer, slots, key, value), lambda: None)

    def _write_kv(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        target, tables = self._model.layers[layer], self._tables_of(layer)
        prepared = slots.prepared[target.group.index]
        if isinstance(tables, RecurrentStates):
            tables.write(prepared, key, value)
        else:
            self._write(target, tables, prepared, key, value)

    def _write(self, target: Layer, tables: _GroupTables, slots: Tensor, key: Tensor, value: Tensor) -> None:
        kv = target.kv
        assert isinstance(kv, HeadsKV)
        with tables.bound(target.attention):
            kv.write(slots, key, value)

    def project_kv(self, layer: int, hidden: Hidden, batch: LayerBatch) -> FreshKV:
        # Layers normalise in place, so the projection works on a copy.
        target, captured = self._model.layers[layer], CapturedKV()

        def project() -> tuple[Tensor, ...]:
            self._call(target, hidden.copy(), batch, captured, leave=True)
            return captured.query, captured.key, captured.value

        query, key, value = self._in_step((layer, "project"), batch.num_tokens, project)
        return FreshKV(query, None, key, value)

    def _in_step(self, key: Hashable, num_tokens: int, call: Call) -> tuple[Tensor, ...]:
        """Run a call with collective operations; of several ranks, one that fails goes on with zeros."""
        if self.world_size == 1:
            return call()
        return self._model.lock_step.run(key, num_tokens, call, self._part)

    def contain(self, act: Callable[[], T], otherwise: Callable[[], T]) -> T:
        return self._part.contain(act, otherwise)

    def run_layer(
        self, layer: int, hidden: Hidden, batch: LayerBatch, capture: bool = False
    ) -> FreshKV | None:
        target = self._model.layers[layer]
        captured = CapturedKV()

        def run() -> tuple[Tensor, ...]:
            self._call(target, hidden, batch)
            return ()

        def run_and_capture() -> tuple[Tensor, ...]:
            self._call(target, hidden, batch, captured)
            plain = captured.key_before_rope
            if plain is None:
                rotary = target.rotation.rotary
                positions = batch.prepared.positions
                plain = captured.key if rotary is None else rotary.unrotate(captured.key, positions)
            return captured.query, plain, captured.key, captured.value

        if not capture:
            self._in_step((layer, "run"), batch.num_tokens, run)
            return None
        return FreshKV(*self._in_step((layer, "capture"), batch.num_tokens, run_and_capture))

    @property
    def attending(self) -> tuple[int, ...]:
        return self._model.attending

    def parts(self, layer: int) -> tuple[Part, ...]:
        return self._model.layers[layer].kv.parts

    def attention_rule(self, layer: int) -> AttentionRule:
        attention, kv = self._model.layers[layer].attention, self._model.layers[layer].kv
        slopes = getattr(attention.impl, "alibi_slopes", None)
        return AttentionRule(
            attention.impl.scale,
            attention.sliding_window,
            getattr(attention.impl, "logits_soft_cap", None) or None,
            self._model.mass_kernel,
            getattr(attention.impl, "sinks", None),
            None if slopes is None else torch.as_tensor(slopes, device=self._model.device),
            kv.absorb if isinstance(kv, LatentKV) else None,
        )

    def own_states(self, positions: Tensor) -> dict[str, Any]:
        """Return vLLM's metadata of recurrent layers, by layer name, for its own forward pass over
        consecutive positions of sequence 0, from the states in its blocks."""
        first, end = int(positions[0]), int(positions[-1]) + 1
        metadata: dict[str, Any] = {}
        for states in self._states.values():
            block, group = states.spans[0].after, states.group
            assert block is not None
            one = one_sequence(first, end, block, self.device)
            metadata.update(dict.fromkeys(group.layer_names, group.build_metadata(one)))
        return metadata

    def end_pass(self) -> Callable[[], bool]:
        for states in self._states.values():
            states.keep()
        if self.device.type != "cuda":
            return lambda: True
        if self._before_end is not None:
            self._before_end()
        end = torch.cuda.current_stream(self.device).record_event()
        return lambda: not is_so_on_any_rank(not end.query())

    def gather_heads(self, layer: int, values: Tensor) -> Tensor:
        if self.world_size == 1:
            return values
        gather = partial(tensor_model_parallel_all_gather, dim=1)
        key, count = ("gather", values.shape[1:]), len(values)
        (gathered,) = self._in_step(key, count, lambda: (gather(values.contiguous()),))
        # If ranks outnumber heads, neighbouring ranks hold the same head.
        return gathered[:, :: gathered.shape[1] // self._model.kv_heads[layer]]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.world_size == 1:
            return values
        if values.device.type != self.device.type:
            torch.distributed.all_reduce(values, group=get_tp_group().cpu_group)
            return values
        # Not in `_in_step`: by it a rank that has failed tells the others.
        summed: Tensor = tensor_model_parallel_all_reduce(values)
        return summed

    def _tables_of(self, layer: int) -> _GroupTables | RecurrentStates:
        index = self._model.layers[layer].group.index
        return self._states[index] if index in self._states else self._tables[index]

    def _call(
        self,
        layer: Layer,
        hidden: Hidden,
        batch: LayerBatch,
        captured: CapturedKV | None = None,
        leave: bool = False,
    ) -> None:
        """Call a layer, and note what it stores in ``captured``. With ``leave``, the call ends there."""
        prepared: Prepared = batch.prepared
        context = set_forward_context(
            prepared.metadata,
            self._model.vllm_config,
            num_tokens=batch.num_tokens,
            slot_mapping=prepared.slots,
        )
        tables = self._tables_of(layer.index)
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            if isinstance(tables, RecurrentStates):
                stack.enter_context(_scan_in_place(layer, tables, prepared, captured, leave))
            else:
                stack.enter_context(tables.bound(layer.attention))
                if captured is not None:
                    stack.enter_context(capture_kv(layer, captured, leave))
            if layer.name in prepared.scattered:
                stack.enter_context(replace_attention_impl(layer.attention, prepared.scattered[layer.name]))
            if layer.name in prepared.latent:
                stack.enter_context(replace_latent_attention(layer.attention, prepared.latent[layer.name]))
            # Without it, vLLM assumes that expert layers run in the order of a whole forward pass.
            get_forward_context().all_moe_layers = None
            self._model.run_layer(layer, hidden)


@contextlib.contextmanager
def _scan_in_place(
    layer: Layer, states: RecurrentStates, prepared: Prepared, captured: CapturedKV | None, leave: bool
) -> Iterator[None]:
    """Replace a recurrent layer's operation in the block: it merges the tokens' inputs with the loaded ones
    and scans all of them. ``captured`` and ``leave``: as in `capture_kv`."""
    kv = layer.kv
    assert isinstance(kv, RecurrentKV)

    def core(operation: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        inputs, gates = kv.tell_apart(arguments)
        if captured is not None:
            captured.key, captured.value = inputs[:, None], gates[:, None]
        if leave:
            raise LeftAtAttention
        states.write(prepared.slots[layer.name], inputs, gates)
        outputs = inputs.new_empty(len(inputs), kv.output_width)
        states.advance(layer, operation, arguments[-1], prepared.scanned, outputs)
        kv.finish(arguments, outputs)

    with contextlib.suppress(LeftAtAttention), replace_operation(kv.operation, core):
        yield


def _tails_of(tables: _GroupTables, ends: Sequence[int], device: torch.device) -> Tensor:
    """Return the slots after each sequence's last token in its last block."""
    size = tables.group.block_size
    places = [torch.arange(end, -(-end // size) * size) for end in ends]
    owners = [torch.full_like(one, owner) for owner, one in enumerate(places)]
    return tables.slots(upload(torch.cat(places), device), upload(torch.cat(owners), device))


def _run_starts(places: Tensor, owners: Tensor) -> Tensor:
    """Return the first row of each run of consecutive places of one owner, all on the host."""
    breaks = (places[1:] != places[:-1] + 1) | (owners[1:] != owners[:-1])
    return torch.cat((torch.zeros(1, dtype=torch.int64), breaks.nonzero()[:, 0] + 1))


def _reads_cache(places: Tensor, owners: Tensor) -> bool:
    """Return whether some run of several tokens follows cached tokens; a single token is a decode."""
    starts = _run_starts(places, owners)
    return len(starts) < len(places) and bool((places[starts] != 0).any())


def _by_owner(places: Tensor, owners: Tensor) -> list[tuple[int, Tensor]]:
    """Return each owner with its places, which are adjacent."""
    bounds = [0, *((owners.diff() != 0).nonzero()[:, 0] + 1).tolist(), len(owners)]
    return [(int(owners[first]), places[first:last]) for first, last in pairwise(bounds)]


def _latent_rows(places: Tensor, owners: Tensor, tables: _GroupTables) -> list[LatentRows]:
    """Return the rows of each owner, which are adjacent."""
    sequences, first = [], 0
    for owner, mine in _by_owner(places, owners):
        every = torch.arange(int(mine[-1]) + 1)
        slots = tables.slots(every, torch.tensor(owner).expand(len(every)))
        sequences.append(LatentRows(slice(first, first + len(mine)), mine, slots))
        first += len(mine)
    return sequences


def _common_metadata(
    places: Tensor, owners: Tensor, tables: _GroupTables, places_there: Tensor, slots: Tensor
) -> CommonAttentionMetadata:
    """Return vLLM's metadata with one pseudo-request per run of consecutive places of one owner. ``places``
    and ``owners`` are on the host, ``places_there`` and ``slots`` on the device."""
    device, starts = slots.device, _run_starts(places, owners)
    ends = torch.cat((starts[1:], torch.tensor([len(places)])))
    query_start = torch.cat((starts, ends[-1:])).to(torch.int32)
    seq_lens = (places[ends - 1] + 1).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=upload(query_start, device),
        query_start_loc_cpu=query_start,
        seq_lens=upload(seq_lens, device),
        num_reqs=len(starts),
        num_actual_tokens=len(places),
        max_query_len=int((ends - starts).max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=upload(tables.table[owners[starts]], device),
        slot_mapping=slots,
        causal=True,
        positions=places_there,  # backends look them up in the block table
        seq_lens_cpu_upper_bound=seq_lens,
    )
