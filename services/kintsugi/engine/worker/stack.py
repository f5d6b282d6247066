"""vLLM's decoder layers over chosen tokens, with attention over its paged cache.

A layer is called as the model calls it, under a forward context of our own: its attention writes the
tokens' K and V into their slots and reads the sequence's blocks. Scattered tokens become
pseudo-requests, one per run of consecutive positions, each as long as the run and with a context that
ends at the run's last token: so the mask is strictly ``kv_position <= query_position``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kintsugi.engine.worker.model import CacheGroup, Layer, LoadedModel
from kintsugi.engine.worker.native import mass_kernel
from kintsugi.engine.worker.scattered import ScatteredRows, replace_attention_impl, runs_min
from kintsugi.fusor.stack import AttentionRule, FreshKV, Hidden, LayerBatch, Slots
from kintsugi.fusor.staging import upload

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that a sliding window has left behind."""


class _Projected(Exception):
    """Leaves a layer call once its K and V are known."""


class _Captured:
    """What the hooks of one layer call saw, `[tokens, heads · head_dim]` or `[tokens, heads, head_dim]`."""

    query: Tensor
    key_before_rope: Tensor
    key: Tensor
    value: Tensor

    def fresh(self, num_heads: int, head_dim: int) -> FreshKV:
        shape = (-1, num_heads, head_dim)
        return FreshKV(
            self.query.view(len(self.query), -1, head_dim),
            self.key_before_rope.view(shape),
            self.key.view(shape),
            self.value.view(shape),
        )


class _GroupTables:
    """Where the sequences' tokens lie in one cache group.

    A sliding-window group has null blocks where the window has moved on. Tokens before the window's last
    position still need those layers' KV while they are computed, so such a group works in a scratch
    cache of one layer and copies the live blocks in and out. So does any group where a sequence's last
    position has no block yet, or no position has one: what is written there is dropped.
    """

    def __init__(
        self,
        group: CacheGroup,
        block_ids: Sequence[Sequence[int]],
        ends: Sequence[int],
        device: torch.device,
    ) -> None:
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
        self.needs_scratch = bool((real == NULL_BLOCK).any())
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

    def slots(self, positions: Tensor, owners: Tensor) -> Tensor:
        """int64 cache slots of `positions`; all on the device."""
        size = self.group.kernel_block_size
        return self.on_device[owners, positions // size].long() * size + positions % size

    def copy_in(self, real_cache: Tensor) -> None:
        if self._scratch is None:
            self._scratch = real_cache.new_zeros((self._scratch_blocks, *real_cache.shape[1:]))
        self._scratch[self._scratch_live] = real_cache[self._real_live]

    def copy_out(self, real_cache: Tensor) -> None:
        assert self._scratch is not None
        real_cache[self._real_live] = self._scratch[self._scratch_live]

    @contextlib.contextmanager
    def bound(self, attention: Any) -> Iterator[None]:
        """The layer's cache for the length of one call: other requests run between our calls."""
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
    """Attention metadata of a batch by layer name, for every cache group."""

    positions: Tensor
    metadata: dict[str, Any]
    """The backend's own; None for each layer whose attention our own kernel computes."""
    slots: dict[str, Tensor]
    scattered: dict[str, ScatteredRows]
    """Rows by the name of each layer whose attention our own kernel computes."""


class VllmStack:
    """`fusor.stack.DecoderStack` on a vLLM model, for the sequences of one pass."""

    def __init__(
        self, model: LoadedModel, block_ids: Sequence[tuple[Sequence[int], ...]], ends: Sequence[int]
    ) -> None:
        """`block_ids[sequence][group]` as vLLM gives them; `ends[sequence]` is the last position + 1 used."""
        self._model = model
        groups = {layer.group.index: layer.group for layer in model.layers}
        self._tables = {
            index: _GroupTables(group, [ids[index] for ids in block_ids], ends, model.device)
            for index, group in groups.items()
        }

    @staticmethod
    def without_blocks(model: LoadedModel, ends: Sequence[int]) -> VllmStack:
        """A stack for sequences that no cache block holds: a layer's KV is gone once the layer ends."""
        num_groups = 1 + max(layer.group.index for layer in model.layers)
        return VllmStack(model, [((),) * num_groups for _ in ends], ends)

    @property
    def num_layers(self) -> int:
        return len(self._model.layers)

    @property
    def world_size(self) -> int:
        return int(get_tensor_model_parallel_world_size())

    @property
    def projection_share(self) -> float:
        return self._model.projection_share

    @property
    def device(self) -> torch.device:
        return self._model.device

    def batch(self, positions: Tensor, owners: Tensor | None = None) -> LayerBatch:
        on_host = positions if positions.device.type == "cpu" else None
        owners = torch.zeros(len(positions), dtype=torch.int64) if owners is None else owners
        owners_there = upload(owners, self.device)
        prepared = Prepared(upload(positions, self.device) if on_host is not None else positions, {}, {}, {})
        for tables in self._tables.values():
            names = tables.group.layer_names
            slots = tables.slots(prepared.positions, owners_there)
            prepared.slots.update(dict.fromkeys(names, slots))
            if self._kernel_serves(tables, on_host):
                rows = ScatteredRows(prepared.positions.to(torch.int32), tables.on_device[0])
                prepared.scattered.update(dict.fromkeys(names, rows))
                prepared.metadata.update(dict.fromkeys(names))
                continue
            # Its runs size the backend's metadata: for tokens that were selected there, the host waits here.
            on_host = positions.cpu() if on_host is None else on_host
            common = _common_metadata(on_host, owners, tables, prepared.positions, slots)
            prepared.metadata.update(dict.fromkeys(names, tables.group.builder.build(0, common)))
        return LayerBatch(len(positions), prepared)

    def _kernel_serves(self, tables: _GroupTables, on_host: Tensor | None) -> bool:
        """Whether our own kernel computes these tokens' attention. Of selected tokens the host knows no runs:
        they are scattered."""
        if not tables.group.kernel_serves or len(tables.table) > 1:
            return False
        return on_host is None or int((on_host.diff() != 1).sum()) + 1 >= runs_min(self.device)

    def embed(self, token_ids: Tensor) -> Hidden:
        trunk: Any = self._model.trunk
        return Hidden(trunk.embed_input_ids(upload(token_ids, self.device)), None)

    def slots(self, positions: Tensor) -> Slots:
        if positions.device.type != self.device.type:
            positions = upload(positions, self.device)
        first = torch.zeros_like(positions)
        return Slots({index: tables.slots(positions, first) for index, tables in self._tables.items()})

    def begin_layer(self, layer: int) -> None:
        tables = self._tables_of(layer)
        if tables.needs_scratch:
            tables.copy_in(self._model.layers[layer].attention.kv_cache)

    def end_layer(self, layer: int) -> None:
        tables = self._tables_of(layer)
        if tables.needs_scratch:
            tables.copy_out(self._model.layers[layer].attention.kv_cache)

    def keeps_layer(self, layer: int) -> bool:
        return not self._tables_of(layer).needs_scratch

    def write_kv(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        if not len(key):
            return
        target, tables = self._model.layers[layer], self._tables_of(layer)
        attention = target.attention
        with tables.bound(attention):
            attention.impl.do_kv_cache_update(
                attention, key, value, attention.kv_cache, slots.prepared[target.group.index]
            )

    def project_kv(self, layer: int, hidden: Hidden, batch: LayerBatch) -> FreshKV:
        # Layers normalise in place, so the projection works on a copy.
        copy = Hidden(hidden.states.clone(), None if hidden.residual is None else hidden.residual.clone())
        captured = _Captured()
        with contextlib.suppress(_Projected), self._capture_kv(layer, captured, leave=True):
            self._call(self._model.layers[layer], copy, batch)
        return captured.fresh(self._model.num_kv_heads, self._model.head_dim)

    def run_layer(
        self, layer: int, hidden: Hidden, batch: LayerBatch, capture: bool = False
    ) -> FreshKV | None:
        if not capture:
            self._call(self._model.layers[layer], hidden, batch)
            return None
        captured = _Captured()
        with self._capture_kv(layer, captured, leave=False):
            self._call(self._model.layers[layer], hidden, batch)
        return captured.fresh(self._model.num_kv_heads, self._model.head_dim)

    def attention_rule(self, layer: int) -> AttentionRule:
        attention = self._model.layers[layer].attention
        return AttentionRule(
            attention.impl.scale,
            attention.sliding_window,
            getattr(attention.impl, "logits_soft_cap", None) or None,
            mass_kernel(self._model.device),
        )

    def synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def gather_heads(self, values: Tensor) -> Tensor:
        if self.world_size == 1:
            return values
        gathered: Tensor = tensor_model_parallel_all_gather(values.contiguous(), dim=1)
        # Where ranks outnumber heads, neighbouring ranks hold the same one.
        config = self._model.vllm_config.model_config
        return gathered[:, :: gathered.shape[1] // config.get_total_num_kv_heads()]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.world_size == 1:
            return values
        if values.device.type != self.device.type:
            torch.distributed.all_reduce(values, group=get_tp_group().cpu_group)
            return values
        summed: Tensor = tensor_model_parallel_all_reduce(values)
        return summed

    def _tables_of(self, layer: int) -> _GroupTables:
        return self._tables[self._model.layers[layer].group.index]

    def _call(self, layer: Layer, hidden: Hidden, batch: LayerBatch) -> None:
        prepared: Prepared = batch.prepared
        context = set_forward_context(
            prepared.metadata,
            self._model.vllm_config,
            num_tokens=batch.num_tokens,
            slot_mapping=prepared.slots,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            stack.enter_context(self._tables_of(layer.index).bound(layer.attention))
            if layer.name in prepared.scattered:
                stack.enter_context(replace_attention_impl(layer.attention, prepared.scattered[layer.name]))
            # Expert layers are otherwise taken in the order of a whole forward pass.
            get_forward_context().all_moe_layers = None
            hidden.states, hidden.residual = layer.module(prepared.positions, hidden.states, hidden.residual)

    @contextlib.contextmanager
    def _capture_kv(self, layer: int, captured: _Captured, leave: bool) -> Iterator[None]:
        """Capture K and V of one layer call; with `leave`, abandon the call before its attention."""
        target = self._model.layers[layer]

        def before_rope(_module: object, arguments: tuple[Tensor, ...]) -> None:
            captured.key_before_rope = arguments[2].clone()  # rotated in place

        def before_attention(_module: object, arguments: tuple[Tensor, ...]) -> None:
            captured.query, captured.key, captured.value = arguments[:3]
            if leave:
                raise _Projected

        handles = [
            target.rotary_module.register_forward_pre_hook(before_rope),
            target.attention.register_forward_pre_hook(before_attention),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def rank_and_size() -> tuple[int, int]:
    """This worker's tensor-parallel rank, and how many there are."""
    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def is_so_on_any_rank(flag: bool) -> bool:
    """Whether `flag` holds on some tensor-parallel rank. All ranks have to ask together."""
    return min_over_ranks(int(not flag)) == 0


def min_over_ranks(number: int) -> int:
    """The least `number` of all tensor-parallel ranks, which have to ask together. They ask on the host, so
    that no device has to finish its work first."""
    if rank_and_size()[1] == 1:
        return number
    numbers = torch.tensor([number])
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return int(numbers.item())


def _common_metadata(
    positions: Tensor, owners: Tensor, tables: _GroupTables, positions_there: Tensor, slots: Tensor
) -> CommonAttentionMetadata:
    """One pseudo-request per run of consecutive positions of one owner. `positions` and `owners` lie on the
    host, `positions_there` and `slots` on the device."""
    device = slots.device
    breaks = (positions[1:] != positions[:-1] + 1) | (owners[1:] != owners[:-1])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), breaks.nonzero()[:, 0] + 1))
    ends = torch.cat((starts[1:], torch.tensor([len(positions)])))
    query_start = torch.cat((starts, ends[-1:])).to(torch.int32)
    seq_lens = (positions[ends - 1] + 1).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=upload(query_start, device),
        query_start_loc_cpu=query_start,
        seq_lens=upload(seq_lens, device),
        num_reqs=len(starts),
        num_actual_tokens=len(positions),
        max_query_len=int((ends - starts).max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=upload(tables.table[owners[starts]], device),
        slot_mapping=slots,
        causal=True,
        positions=positions_there,
        seq_lens_cpu_upper_bound=seq_lens,
    )
