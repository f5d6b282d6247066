from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kintsugi.gateway.texts.shares import Shares


def test_who_holds_most_gives_way_and_of_equals_the_first() -> None:
    shares = Shares()
    for name, share in (("a", 1), ("b", 3), ("c", 3)):
        shares.put(name, share)
    assert shares.largest() == "b"
    shares.put("b", 2)
    assert shares.largest() == "c"
    shares.put("c", 0)
    assert (shares.largest(), len(shares)) == ("b", 2)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5)), max_size=400))
def test_it_is_the_largest_whatever_came_before(changes: list[tuple[str, int]]) -> None:
    shares, held = Shares(), dict[str, int]()
    for name, share in changes:
        shares.put(name, share)
        held[name] = share
        if any(held.values()):
            assert held[shares.largest()] == max(held.values())
        assert len(shares) == sum(share > 0 for share in held.values())
        assert len(shares._heap) <= 2 * 6 + 64 + 1
