"""Lists the configurations to measure: every selector at several ratios and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kintsugi.core.plan import Selection
from kintsugi.core.plugins import SELECTORS, plugin_names
from kintsugi.core.request import SelectorName
from kintsugi.fusor.control.cost import PassWorkload, configuration_cost
from kintsugi.fusor.selectors import AdaptiveSelector, make_selector
from kintsugi.quality.measure import Case

RATIOS = (0.05, 0.1, 0.15, 0.25, 0.4)

DEPTHS = (0.0, 0.125, 0.25, 0.375)
"""Check layers to try, as shares of the model's depth. Deeper ones cost too much."""
ADAPTIVE_MASS = 0.7
"""Share of the signal that an adaptive ratio covers, with the largest ratio as its ceiling."""
LATE_DEPTHS = (0.4, 0.8)
"""Range of the query layers to try in addition to the fusor's own, as shares of the depth."""
KEPT_MIN = 8
"""Minimum number of configurations to try, even for a slow model."""
COST_MAX = 0.6
"""Configurations that cost more than this share of a full prefill are not tried: they save too little."""


def candidate_names() -> tuple[str, ...]:
    """Return all selectors except the control, including those of other distributions."""
    own = (name for name in SelectorName if name is not SelectorName.RANDOM)
    return (*own, *plugin_names(SELECTORS))


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


def candidates(names: Sequence[str], ratios: Sequence[float], num_layers: int) -> list[Selection]:
    """Return what a calibration tries: `selections`, and variants with other query layers and an adaptive
    ratio if the selector uses them."""
    found = []
    for selection in selections(names, ratios, num_layers):
        selector = make_selector(selection, num_layers)
        is_largest = selection.ratio == max(ratios)
        for layers in query_layer_sets(num_layers) if selector.query_layers else [()]:
            one = replace(selection, query_layers=layers)
            found.append(one)
            if is_largest and isinstance(selector, AdaptiveSelector):
                found.append(replace(one, adaptive_mass=ADAPTIVE_MASS))
    return found


def query_layer_sets(num_layers: int) -> list[tuple[int, ...]]:
    """Return the fusor's own choice, later layers, and all layers. Which set is best depends on the model."""
    first, end = (round(depth * num_layers) for depth in LATE_DEPTHS)
    return [(), tuple(range(first, max(end, first + 1))), tuple(range(num_layers))]


def workload_of(cases: Sequence[Case], num_layers: int) -> PassWorkload:
    """Return the workload of the mean prompt. A projection is assumed to cost 0.05 of a layer, which is
    accurate enough to rank candidates."""
    hit = sum(len(chunk.token_ids) for case in cases for chunk in case.prompt.chunks)
    other = sum(len(case.prompt.token_ids) for case in cases) - hit
    leading = [case.prompt.chunks[0] for case in cases]
    exact = sum(len(chunk.token_ids) for chunk in leading if not chunk.separator)
    count = len(cases)
    return PassWorkload(max(1, hit // count), max(1, other // count), num_layers, 0.05, exact // count)


def affordable(tried: Sequence[Selection], work: PassWorkload, cost_max: float = COST_MAX) -> list[Selection]:
    """Return the configurations whose predicted cost is at most `cost_max`, cheapest first."""
    priced = [(configuration_cost(one, work), index) for index, one in enumerate(tried)]
    return [tried[index] for cost, index in sorted(priced) if cost <= cost_max]


def thin(tried: Sequence[Selection], most: float) -> list[Selection]:
    """Return at most `most` of the configurations, but at least `KEPT_MIN`, in their order. Those with the
    fewest changed settings are kept first; among equals, some from the cheapest to the most expensive."""
    if len(tried) <= most:
        return list(tried)
    room = max(KEPT_MIN, int(most))
    kept: set[int] = set()
    for variations in range(1 + max(map(_count_variations, tried))):
        alike = [place for place, one in enumerate(tried) if _count_variations(one) == variations]
        count = min(len(alike), room - len(kept))
        kept |= {alike[number * len(alike) // count] for number in range(count)}
    return [one for place, one in enumerate(tried) if place in kept]


def _count_variations(one: Selection) -> int:
    return (one.check_layer > 1) + bool(one.query_layers) + (one.adaptive_mass is not None)
