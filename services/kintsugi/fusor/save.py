"""The save pass: prefills several chunks at once, each alone after prefix and context, and captures their KV.

Every token passes through every layer; nothing is selected or loaded. The pass captures V, and K before RoPE,
of the chunks, not of prefix and context. It is the only source of stored chunk KV, so stored KV does not
depend on other chunks (isolated prefill).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kintsugi.core.layout import Codec
from kintsugi.fusor.codecs import as_frame, encode
from kintsugi.fusor.sliced import PassStatus, SlicedWork, Stopwatch, Units
from kintsugi.fusor.stack import DecoderStack, Hidden, LayerBatch
from kintsugi.fusor.staging import download


@dataclass(frozen=True)
class SaveItem:
    """One chunk after the prefix, or after prefix and context."""

    token_ids: Tensor
    """int64: the tokens to compute, at positions `[start, start + len)`."""
    start: int
    """First position to compute. The sequence's cache already holds earlier ones."""
    chunk_start: int
    chunk_end: int
    """KV of the positions `[chunk_start, chunk_end)` is kept."""


class SavePass(SlicedWork):
    """Saves `items`, the sequences of `stack`. When DONE, `frames[i]` holds the frames of `items[i]`, one per
    layer."""

    def __init__(
        self,
        items: Sequence[SaveItem],
        stack: DecoderStack,
        unit_tokens_max: int,
        codec: Codec,
    ) -> None:
        self.status = PassStatus.RUNNING
        self.watch = Stopwatch(stack.device)
        self.frames: list[list[memoryview]] = []
        self._encoded: list[list[Tensor]] = [[] for _ in items]
        self.token_layers = 0.0
        self._items = items
        self._stack = stack
        self._codec = codec
        self._unit_tokens_max = unit_tokens_max
        self._units = self._layers()

    @property
    def failure(self) -> str | None:
        """As `DecoderStack.failure`. If it is set, the frames are wrong on every rank."""
        return self._stack.failure

    def next_unit(self) -> float:
        try:
            cost = next(self._units)
        except StopIteration:
            self.status = PassStatus.DONE
            return 0.0
        if cost > 0:
            self.token_layers += cost
        return cost

    def close(self) -> None:
        self._units.close()

    def _layers(self) -> Units[None]:
        prefill = _Prefill(self._items, self._stack, self._unit_tokens_max)
        for layer in range(self._stack.num_layers):
            captured = yield from prefill.run_layer(layer)
            self._stack.contain(partial(self._encode, layer, captured, prefill.chunks), lambda: None)
        yield from self.wait_for_device(self._stack)
        self.frames = [[as_frame(encoded) for encoded in layers] for layers in self._encoded]

    def _encode(self, layer: int, captured: Sequence[tuple[Tensor, Tensor]], chunks: Sequence[slice]) -> None:
        """Encode K before RoPE and V of all units of a layer, `[tokens, heads, width]`, of all heads."""
        keys, values = (torch.cat(parts) for parts in zip(*captured, strict=True))
        for rows, encoded in zip(chunks, self._encoded, strict=True):
            encoded.append(download(encode(keys[rows], values[rows], self._codec, self._stack.parts(layer))))


class _Prefill:
    """Sequences that pass through the layers."""

    def __init__(self, items: Sequence[SaveItem], stack: DecoderStack, unit_tokens_max: int) -> None:
        positions = torch.cat([torch.arange(i.start, i.start + len(i.token_ids)) for i in items])
        owners = torch.cat([torch.full((len(i.token_ids),), n) for n, i in enumerate(items)])
        cuts = [slice(first, first + unit_tokens_max) for first in range(0, len(positions), unit_tokens_max)]
        token_ids = torch.cat([item.token_ids for item in items])
        self._stack = stack
        self._batches = [stack.batch(positions[rows], owners[rows]) for rows in cuts]
        self._hidden = [stack.embed(token_ids[rows], positions[rows]) for rows in cuts]
        self.chunks = list(_chunk_rows(items))
        """The rows of each item's chunk."""

    def run_layer(self, layer: int) -> Units[list[tuple[Tensor, Tensor]]]:
        """Run one layer over all tokens. Returns each unit's K before RoPE and V of all KV heads."""
        self._stack.begin_layer(layer)
        captured = []
        for part, batch in zip(self._hidden, self._batches, strict=True):
            captured.append(self._run_unit(layer, part, batch))
            yield float(batch.num_tokens)
        self._stack.end_layer(layer)
        return captured

    def _run_unit(self, layer: int, hidden: Hidden, batch: LayerBatch) -> tuple[Tensor, Tensor]:
        fresh = self._stack.run_layer(layer, hidden, batch, capture=True)
        assert fresh is not None
        assert fresh.key_before_rope is not None
        gather = partial(self._stack.gather_heads, layer)
        return gather(fresh.key_before_rope), gather(fresh.value)


def _chunk_rows(items: Sequence[SaveItem]) -> Iterator[slice]:
    """Yield the rows of each item's chunk among the tokens of all items."""
    first_row = 0
    for item in items:
        shift = first_row - item.start
        yield slice(item.chunk_start + shift, item.chunk_end + shift)
        first_row += len(item.token_ids)
