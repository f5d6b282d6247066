"""Lists the configurations to compare: selectors at several ratios and layers, and the work of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.plan import Selection
from kintsugi.fusor.control.cost import PassWorkload
from kintsugi.fusor.selectors import make_selector
from kintsugi.quality.measure import Case


def uses_check_layer(name: str, num_layers: int) -> bool:
    """Whether the selector's choice depends on its check layer."""
    selector = make_selector(Selection(0.15, name), num_layers)
    return any(selector.signal_at(layer) for layer in range(num_layers))


def selections(
    names: Sequence[str], ratios: Sequence[float], num_layers: int, layers: Sequence[int]
) -> list[Selection]:
    """Return every selector at every ratio, and at every one of these check layers if it uses one."""
    return [
        Selection(ratio, name, layer)
        for name in names
        for layer in (layers if uses_check_layer(name, num_layers) else layers[:1])
        for ratio in ratios
    ]


def workload_of(cases: Sequence[Case], num_layers: int) -> PassWorkload:
    """Return the workload of the mean prompt. A projection is assumed to cost 0.05 of a layer, which is
    accurate enough to rank candidates."""
    hit = sum(len(chunk.token_ids) for case in cases for chunk in case.prompt.chunks)
    other = sum(len(case.prompt.token_ids) for case in cases) - hit
    leading = [case.prompt.chunks[0] for case in cases]
    exact = sum(len(chunk.token_ids) for chunk in leading if not chunk.separator)
    count = len(cases)
    return PassWorkload(max(1, hit // count), max(1, other // count), num_layers, 0.05, exact // count)
