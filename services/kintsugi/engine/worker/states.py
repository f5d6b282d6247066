"""States of recurrent layers during a pass.

A pass never works on vLLM's states. For each layer it copies the states after the computed prefixes into a
scratch cache, scans there, and writes the final states into vLLM's blocks when the whole pass has succeeded:
so a pass can restart or fail at any layer, and a prefix's state stays what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kintsugi.engine.worker.model import CacheGroup, Layer
from kintsugi.engine.worker.recurrence import RecurrentKV
from kintsugi.fusor.staging import upload

NULL_BLOCK = 0
"""vLLM's placeholder for a block without content."""


@dataclass(frozen=True)
class StateSpan:
    """One sequence of a pass in one cache group of recurrent layers."""

    start: int
    """First position of the pass. The state after the positions before it is in a block."""
    end: int
    """The state after the token at `end` - 1 is written to a block when the pass ends."""
    places: int
    """Number of places of the sequence: `end`, or more if further tokens pass."""
    before: int | None
    """Block of the state after the positions before `start`; None if there are none."""
    after: int | None
    """Block of the final state; None if it is not kept."""

    @staticmethod
    def of(block_ids: Sequence[int], block_size: int, start: int, end: int, places: int) -> StateSpan:
        """The state after c tokens lies in block ``(c - 1) // block_size`` of the sequence."""
        after = (end - 1) // block_size
        has_block = after < len(block_ids) and block_ids[after] != NULL_BLOCK
        before = block_ids[(start - 1) // block_size] if start else None
        return StateSpan(start, end, places, before, block_ids[after] if has_block else None)


@dataclass
class _Scan:
    """The layer that a pass is at."""

    states: tuple[Tensor, ...]
    """The layer's scratch cache: block i + 1 is that of sequence i."""
    reached: list[int]
    """For each sequence, the places that are scanned."""


@dataclass
class RecurrentStates:
    """The states, and the inputs of the current layer, of a pass in one cache group. vLLM's metadata is made
    for one sequence at a time."""

    group: CacheGroup
    vllm_config: VllmConfig
    spans: Sequence[StateSpan]
    device: torch.device
    keeps: bool
    _scan: _Scan | None = None
    _inputs: tuple[Tensor, Tensor] | None = None
    _metadata: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    _final: dict[str, tuple[Layer, tuple[Tensor, ...]]] = field(default_factory=dict)
    """Layers with their states after the last place."""

    @property
    def _firsts(self) -> list[int]:
        """First row of each sequence in the inputs, and the end of the last."""
        firsts = [0]
        for span in self.spans:
            firsts.append(firsts[-1] + span.places - span.start)
        return firsts

    def slots(self, places: Tensor, owners: Tensor) -> Tensor:
        """Return the row of each place in the inputs, int64 on the device."""
        shifts = [first - span.start for first, span in zip(self._firsts, self.spans, strict=False)]
        return places + upload(torch.tensor(shifts), self.device)[owners]

    def begin(self, layer: Layer) -> None:
        """Begin a layer from the states before the pass."""
        states = []
        for real in layer.attention.kv_cache:
            scratch = real.new_zeros((len(self.spans) + 1, *real.shape[1:]))
            for index, span in enumerate(self.spans):
                if span.before is not None:
                    scratch[index + 1] = real[span.before]
            states.append(scratch)
        self._scan = _Scan(tuple(states), [span.start for span in self.spans])

    def write(self, slots: Tensor, inputs: Tensor, gates: Tensor) -> None:
        """Write inputs and gates `[tokens, width]` or `[tokens, 1, width]` of the current layer."""
        if self._inputs is None or self._inputs[0].shape[1:] != inputs.shape[-1:]:
            rows = self._firsts[-1]
            self._inputs = inputs.new_empty(rows, inputs.shape[-1]), gates.new_empty(rows, gates.shape[-1])
        for mine, new in zip(self._inputs, (inputs, gates), strict=True):
            mine[slots] = new.flatten(1)

    def advance(
        self, layer: Layer, operation: Any, name: object, rows: Sequence[tuple[int, Tensor]], outputs: Tensor
    ) -> None:
        """Scan up to the last of the computed tokens, whose inputs are written. ``rows``: each sequence with
        the places of its tokens, on the host; ``outputs``: `[tokens, width]` of them, filled."""
        first_row = 0
        for owner, places in rows:
            start = self._reached[owner]
            scanned = self._run(layer, operation, name, owner, int(places[-1]) + 1)
            picked = upload(places - start, self.device)
            outputs[first_row : first_row + len(places)] = scanned[picked]
            first_row += len(places)

    def end(self, layer: Layer) -> None:
        """Scan the places after the last computed token, and keep the final states."""
        assert self._scan is not None
        kv = layer.kv
        assert isinstance(kv, RecurrentKV)
        operation = getattr(torch.ops.vllm, kv.operation)
        for owner, span in enumerate(self.spans):
            if self._reached[owner] < span.end:
                with set_forward_context({}, self.vllm_config, num_tokens=span.end - self._reached[owner]):
                    self._run(layer, operation, layer.name, owner, span.end)
        if self.keeps:
            self._final[layer.name] = (layer, self._scan.states)
        self._scan = None

    def keep(self) -> None:
        """Write the final states of all layers into vLLM's blocks. Call when the pass has succeeded."""
        for layer, states in self._final.values():
            for real, scratch in zip(layer.attention.kv_cache, states, strict=True):
                for index, span in enumerate(self.spans):
                    if span.after is not None:
                        real[span.after] = scratch[index + 1]
        self._final.clear()

    @property
    def _reached(self) -> list[int]:
        assert self._scan is not None
        return self._scan.reached

    def _run(self, layer: Layer, operation: Any, name: object, owner: int, end: int) -> Tensor:
        """Scan a sequence up to the place ``end``. Returns the outputs of these tokens."""
        kv = layer.kv
        assert self._inputs is not None
        assert isinstance(kv, RecurrentKV)
        start, span = self._reached[owner], self.spans[owner]
        first = self._firsts[owner] - span.start
        inputs, gates = (part[first + start : first + end] for part in self._inputs)
        outputs = inputs.new_empty(end - start, kv.output_width)
        with self._bound(layer, self._metadata_of(owner, start, end)):
            kv.scan(operation, name, inputs, gates, outputs)
        self._reached[owner] = end
        return outputs

    @contextlib.contextmanager
    def _bound(self, layer: Layer, metadata: Any) -> Iterator[None]:
        """Let vLLM's operation read this metadata and the scratch cache."""
        assert self._scan is not None
        context, mixer = get_forward_context(), layer.attention
        before, real = context.attn_metadata, mixer.kv_cache
        context.attn_metadata, mixer.kv_cache = {layer.name: metadata}, self._scan.states
        try:
            yield
        finally:
            context.attn_metadata, mixer.kv_cache = before, real

    def _metadata_of(self, owner: int, start: int, end: int) -> Any:
        if (owner, start, end) not in self._metadata:
            one = one_sequence(start, end, owner + 1, self.device)
            self._metadata[owner, start, end] = self.group.build_metadata(one)
        return self._metadata[owner, start, end]


def one_sequence(start: int, end: int, block: int, device: torch.device) -> CommonAttentionMetadata:
    """Return vLLM's metadata of the tokens `[start, end)` of one sequence, whose state is in one block."""
    count = end - start
    query_start, seq_lens = (
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32),
    )
    table = torch.tensor([[block]], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=upload(query_start, device),
        query_start_loc_cpu=query_start,
        seq_lens=upload(seq_lens, device),
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=end,
        block_table_tensor=upload(table, device),
        slot_mapping=torch.zeros(count, dtype=torch.int64, device=device),
        causal=True,
        seq_lens_cpu_upper_bound=seq_lens,
        is_prefilling=torch.tensor([True]),
    )
