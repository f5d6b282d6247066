from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kintsugi.serving.directory import RAMP_STEPS, share_at


def test_every_step_of_a_ramp() -> None:
    found = [share_at(age_s, 120.0) for age_s in range(121)]
    assert found == [(1 + age_s // 10) / (RAMP_STEPS + 1) for age_s in range(120)] + [1.0]
    assert len(set(found)) == RAMP_STEPS + 1


@given(st.floats(0, 1e9), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_share_never_shrinks_and_ends_at_all(age_s: float, more_s: float, ramp_s: float) -> None:
    assert 0 < share_at(age_s, ramp_s) <= share_at(age_s + more_s, ramp_s) <= 1
    assert share_at(ramp_s + more_s, ramp_s) == 1
    if ramp_s > 0:
        assert share_at(0.0, ramp_s) == 1 / (RAMP_STEPS + 1)
