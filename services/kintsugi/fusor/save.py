"""The save pass: prefill several chunks at once, each alone behind prefix and context, and capture their KV.

Every token passes through every layer; nothing is selected or loaded. The pass captures V and K before RoPE.
It is the only source of stored chunk KV (isolated prefill), so stored KV never saw another chunk. The KV of
prefix and context is not captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.core.layout import Codec
from kintsugi.fusor.codecs import as_frame, encode
from kintsugi.fusor.sliced import PassStatus, SlicedWork, Units
from kintsugi.fusor.stack import DecoderStack, Hidden, LayerBatch
from kintsugi.fusor.staging import download


@dataclass(frozen=True)
class SaveItem:
    """One chunk behind the prefix, or behind prefix and context."""

    token_ids: Tensor
    """int64: the tokens to compute, at positions `[start, start + len)`."""
    start: int
    """The sequence's cache already holds the positions before it."""
    chunk_start: int
    chunk_end: int
    """KV of the positions `[chunk_start, chunk_end)` is kept."""


class SavePass(SlicedWork):
    """Sequence i of `stack` is `items[i]`. Once DONE, `frames[i][layer]` holds its frame."""

    def __init__(
        self, items: Sequence[SaveItem], stack: DecoderStack, unit_tokens_max: int, codec: Codec
    ) -> None:
        self.status = PassStatus.RUNNING
        self.frames: list[list[memoryview]] = []
        self._encoded: list[list[Tensor]] = [[] for _ in items]
        self.token_layers = 0.0
        self._items = items
        self._stack = stack
        self._codec = codec
        self._unit_tokens_max = unit_tokens_max
        self._units = self._layers()

    def next_unit(self) -> float:
        try:
            cost = next(self._units)
        except StopIteration:
            self.status = PassStatus.DONE
            return 0.0
        self.token_layers += cost
        return cost

    def close(self) -> None:
        self._units.close()

    def _layers(self) -> Units[None]:
        items, size = self._items, self._unit_tokens_max
        positions = torch.cat([torch.arange(i.start, i.start + len(i.token_ids)) for i in items])
        owners = torch.cat([torch.full((len(i.token_ids),), n) for n, i in enumerate(items)])
        cuts = [slice(start, start + size) for start in range(0, len(positions), size)]
        batches = [self._stack.batch(positions[rows], owners[rows]) for rows in cuts]
        token_ids = torch.cat([item.token_ids for item in items])
        hidden = [self._stack.embed(token_ids[rows]) for rows in cuts]
        for layer in range(self._stack.num_layers):
            self._stack.begin_layer(layer)
            captured = []
            for part, batch in zip(hidden, batches, strict=True):
                captured.append(self._run_layer(layer, part, batch))
                yield float(batch.num_tokens)
            self._stack.end_layer(layer)
            keys, values = (torch.cat(parts) for parts in zip(*captured, strict=True))
            self._encode_chunks(keys, values)
        self._stack.synchronize()
        self.frames = [[as_frame(encoded) for encoded in layers] for layers in self._encoded]

    def _run_layer(self, layer: int, hidden: Hidden, batch: LayerBatch) -> tuple[Tensor, Tensor]:
        fresh = self._stack.run_layer(layer, hidden, batch, capture=True)
        assert fresh is not None
        return self._stack.gather_heads(fresh.key_before_rope), self._stack.gather_heads(fresh.value)

    def _encode_chunks(self, keys: Tensor, values: Tensor) -> None:
        first_row = 0
        for item, encoded in zip(self._items, self._encoded, strict=True):
            rows = slice(first_row + item.chunk_start - item.start, first_row + item.chunk_end - item.start)
            encoded.append(download(encode(keys[rows], values[rows], self._codec)))
            first_row += len(item.token_ids)
