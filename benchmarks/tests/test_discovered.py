"""Which tokens count as due to be hit."""

from __future__ import annotations

from benchmarks.support.discovered.service import hit_figure
from kintsugi.bench.profile import Request
from kintsugi.bench.report import Sample


def asked(*documents: int) -> Request:
    return Request(0.0, documents, "?")


def told(tokens_discovered: int, tokens_prefix_cached: int = 0) -> Sample:
    accounting = {"tokens_discovered": tokens_discovered, "tokens_prefix_cached": tokens_prefix_cached}
    return Sample(0.0, 1.0, 1.0, accounting=accounting)


def test_passages_are_due_from_their_third_sight_on() -> None:
    coming = [asked(0, 1), asked(1, 0), asked(0, 2), asked(1, 0)]
    figure = hit_figure(coming, [told(0), told(0), told(100), told(0)], [100, 50, 30], bar=0.9)
    assert figure.value == 100 / (100 + 150)
    assert figure.holds is False


def test_more_than_is_due_counts_no_more() -> None:
    figure = hit_figure([asked(0), asked(0), asked(0)], [told(9), told(99), told(500)], [100], bar=None)
    assert figure.value == 1.0


def test_what_the_prefix_cache_holds_counts_only_of_passages_that_are_due() -> None:
    coming = [asked(0), asked(0), asked(0, 1), asked(1, 0)]
    figure = hit_figure(coming, [told(0), told(0), told(20, 96), told(50, 96)], [100, 100], bar=None)
    assert figure.value == (100 + 50) / 200
