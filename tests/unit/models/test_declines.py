"""The reasons to decline a model."""

from __future__ import annotations

from kintsugi.models.declines import ADVICE, Decline, DeclineReason


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(DeclineReason)
    decline = Decline(DeclineReason.ROPE, 3, "a rotation by content")
    assert str(decline).startswith("rope: layer 3 has a rotation by content; ")
    error = decline.error()
    assert error.reason == "rope"
    assert str(error) == str(decline)
    assert "prefix caching works" in str(error)
