"""Layer calls over many tokens, cut into units of bounded size.

Units go in ascending position, so that a unit finds the fresh K and V of the units before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.fusor.sliced import Units
from kintsugi.fusor.stack import DecoderStack, FreshKV, Hidden, LayerBatch


@dataclass(frozen=True)
class Cut:
    """Tokens in units, prepared for layer calls; reused across layers."""

    units: tuple[tuple[slice, LayerBatch], ...]
    """Rows of the tokens, and their batch."""

    @staticmethod
    def of(stack: DecoderStack, positions: Tensor, size: int, owners: Tensor | None = None) -> Cut:
        """Int64 `positions` `[tokens]` and their sequences (see `DecoderStack.batch`), `size` at a time."""
        rows = [slice(start, start + size) for start in range(0, len(positions), size)]
        return Cut(
            tuple(
                (mine, stack.batch(positions[mine], None if owners is None else owners[mine]))
                for mine in rows
            )
        )


def run_in_units(
    stack: DecoderStack, layer: int, hidden: Hidden, cut: Cut, capture: bool = False
) -> Units[list[FreshKV]]:
    """Run one layer over all tokens; `hidden` becomes its output. With `capture`, each unit's K and V."""
    outputs: list[Hidden] = []
    captured: list[FreshKV] = []
    for rows, batch in cut.units:
        part = hidden.take(rows)
        fresh = stack.run_layer(layer, part, batch, capture)
        outputs.append(part)
        if fresh is not None:
            captured.append(fresh)
        yield float(batch.num_tokens)
    if outputs:
        residuals = [part.residual for part in outputs if part.residual is not None]
        hidden.states = torch.cat([part.states for part in outputs])
        hidden.residual = torch.cat(residuals) if residuals else None
    return captured
