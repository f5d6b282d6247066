"""What is kept for namespaces stays within its bytes, and nobody loses to a namespace that holds more."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.core.held import ITEM_BYTES, KEPT_SHARE, NAMESPACE_BYTES, Allotment, Held

PUTS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 30), st.integers(0, 2000), st.booleans()),
    max_size=120,
)


@settings(deadline=None)
@given(PUTS)
def test_what_is_charged_is_what_is_there_and_within_the_bound(
    puts: Sequence[tuple[str, int, int, bool]],
) -> None:
    held: Held[int, int] = Held(24_000)
    sizes: dict[tuple[str, int], int] = {}
    for number, (namespace, key, size, is_put) in enumerate(puts):
        if is_put:
            held.put(namespace, key, number, size)
            sizes[namespace, key] = ITEM_BYTES + size
            assert held.get(namespace, key) in (number, None)
        else:
            held.pop(namespace, key)
            assert held.get(namespace, key) is None
        there = set(held)
        charged = {name: NAMESPACE_BYTES + len(name) for name, _ in there}
        for name, one in there:
            charged[name] += sizes[name, one]
        assert held.bytes_by_namespace == charged
        assert held.num_bytes == sum(charged.values()) <= held.bytes_max
        assert len(held) == len(there)


def test_a_namespace_that_holds_most_pushes_out_its_own() -> None:
    held: Held[int, str] = Held(100_000)
    held.put("small", 0, "kept")
    for number in range(10_000):
        held.put("large", number, "")
    assert held.get("small", 0) == "kept"
    assert held.bytes_by_namespace["large"] <= 50_000
    assert held.items("large")[-1] == (9999, "")


def test_many_namespaces_push_out_the_largest_ones_first() -> None:
    dropped: list[int] = []
    held: Held[int, int] = Held(100_000, dropped.append)
    held.put("small", 0, -1)
    for number in range(400):
        held.put(f"many {number % 8}", number, number)
    assert held.get("small", 0) == -1
    assert -1 not in dropped
    assert dropped
    assert held.num_bytes <= 100_000
    assert not set(dropped) & {value for name, _ in held for _, value in held.items(name)}


def test_a_single_item_beyond_the_bound_is_not_kept() -> None:
    held: Held[int, str] = Held(10_000)
    held.put("a", 1, "small")
    held.put("b", 1, "large", 20_000)
    assert held.num_bytes <= KEPT_SHARE * 10_000


def test_a_namespace_that_takes_all_it_may_leaves_as_much_for_others() -> None:
    waiting = Allotment(10)
    assert not waiting.fits("a", 11)
    waiting.add("a", 10)
    assert not waiting.fits("a", 1)
    assert waiting.fits("b", 10)
    waiting.add("b", 4)
    waiting.add("c", 6)
    assert not waiting.fits("d", 1), "all together have twice as much as one"
    waiting.add("a", -10)
    assert waiting.fits("d", 10)
    assert (waiting["a"], waiting["c"], waiting.total) == (0, 6, 10)
