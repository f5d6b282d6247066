"""Which configurations an evaluation compares."""

from __future__ import annotations

from kintsugi.core.request import SelectorName
from kintsugi.quality import grid


def test_every_selector_is_tried_at_layers_that_make_a_difference() -> None:
    assert grid.check_layers(8) == [1, 2, 3]
    assert grid.check_layers(2) == [1]
    assert grid.check_layers(32) == [1, 4, 8, 12]
    found = grid.selections(list(SelectorName), (0.1, 0.2), 8)
    assert {one.selector for one in found} == set(SelectorName)
    layers = {name: {one.check_layer for one in found if one.selector is name} for name in SelectorName}
    assert layers[SelectorName.HKVD] == {1, 2, 3}
    assert layers[SelectorName.RANDOM] == {1}
    given = grid.selections([SelectorName.HKVD], (0.1,), 8, [2, 5])
    assert [one.check_layer for one in given] == [2, 5]
