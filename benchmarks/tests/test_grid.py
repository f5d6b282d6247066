"""Which configurations are compared, and the work of the mean prompt."""

from __future__ import annotations

from benchmarks.support import grid
from kintsugi.core.plan import PromptChunk, RagPrompt
from kintsugi.core.request import SelectorName
from kintsugi.quality.measure import Case
from kintsugi.quality.questions import Question


def test_every_selector_is_tried_at_layers_that_make_a_difference() -> None:
    found = grid.selections(list(SelectorName), (0.1, 0.2), 8, [1, 2, 3])
    assert {one.selector for one in found} == set(SelectorName)
    layers = {name: {one.check_layer for one in found if one.selector is name} for name in SelectorName}
    assert layers[SelectorName.HKVD] == {1, 2, 3}
    assert layers[SelectorName.RANDOM] == {1}


def test_a_first_chunk_counts_as_exact_only_right_behind_the_prefix() -> None:
    def work(separator: tuple[int, ...]) -> int:
        prompt = RagPrompt((0,), (PromptChunk("", (1, 2, 3), separator),), (7,))
        return grid.workload_of([Case(Question(("a",), "b"), prompt)], 8).exact_tokens

    assert (work(()), work((9,))) == (3, 0)
