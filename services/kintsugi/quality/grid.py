"""Lists the configurations that an evaluation compares: every selector at several ratios and layers."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.plan import Selection
from kintsugi.fusor.selectors import make_selector

DEPTHS = (0.0, 0.125, 0.25, 0.375)
"""Check layers, as shares of the model's depth. Deeper ones cost too much."""


def check_layers(num_layers: int) -> list[int]:
    """Return the check layers for a model of this depth. Each is at least 1: the KV of layer 0 does not
    depend on the context, so nothing deviates there."""
    return sorted({max(1, min(round(depth * num_layers), num_layers - 1)) for depth in DEPTHS})


def uses_check_layer(name: str, num_layers: int) -> bool:
    """Whether the selector's choice depends on its check layer."""
    selector = make_selector(Selection(0.15, name), num_layers)
    return any(selector.signal_at(layer) for layer in range(num_layers))


def selections(
    names: Sequence[str],
    ratios: Sequence[float],
    num_layers: int,
    layers: Sequence[int] | None = None,
) -> list[Selection]:
    """Return every selector at every ratio, and at every check layer if it uses one."""
    deep = check_layers(num_layers) if layers is None else list(layers)
    return [
        Selection(ratio, name, layer)
        for name in names
        for layer in (deep if uses_check_layer(name, num_layers) else deep[:1])
        for ratio in ratios
    ]
