"""Counts waits and copies of a blend in every layer, on a simulated GPU."""

from __future__ import annotations

from benchmarks.gpu.blending import SELECTIONS
from benchmarks.gpu.counting import count_per_layer
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure


def measure(quick: bool) -> list[Figure]:
    """The most that any selection does. `quick` changes nothing: it takes seconds."""
    counts = {name: count_per_layer(selection) for name, selection in SELECTIONS.items()}
    say(f"waits and pageable copies per layer: {counts}")
    detail = f"the most of {', '.join(counts)}; counted over a pretended device"
    waits, copies = (max(column) for column in zip(*counts.values(), strict=True))
    return [
        Figure.at_most("device_syncs_per_layer", waits, 0, "", detail),
        Figure.at_most("pageable_copies_per_layer", copies, 0, "", detail),
    ]
