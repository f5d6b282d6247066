"""Refuses prompts that full prefill itself does not answer: no loss could be seen on them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.quality import metrics

RIGHT_MIN = 0.3
"""Least mean score of full prefill, where answers are given."""
ENDED_MAX = 0.5
"""Greatest share of prompts whose answer ends with its first token."""
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class FullAnswer:
    """What full prefill says to one prompt."""

    text: str
    ends_at_once: bool
    answers: tuple[str, ...]
    """Those given; empty if none is known."""
    score: float
    """F1 with them, or Rouge-L; 0 without any."""


def check_form(form: str, said: Sequence[FullAnswer]) -> None:
    """Raise `InvalidField` if full prefill mostly ends at once, or is rarely right."""
    ended = sum(one.ends_at_once for one in said) / len(said)
    if ended > ENDED_MAX:
        raise InvalidField(
            "form",
            f"in the prompt form {form!r} full prefill says nothing in {ended:.0%} of {len(said)} prompts: "
            "its first token ends the text; use the form that the model was trained for (its chat template)",
        )
    known = [one for one in said if one.answers]
    if not known:
        return
    right = metrics.mean([one.score for one in known])
    if right < RIGHT_MIN:
        example = min(known, key=lambda one: one.score)
        raise InvalidField(
            "form",
            f"in the prompt form {form!r} full prefill is rarely right: it scores {right:.2f} in "
            f"{len(known)} prompts, at least {RIGHT_MIN} is needed to see a loss; it said "
            f"{_cut(example.text)!r} where {_cut(example.answers[0])!r} was expected; use the form that the "
            "model was trained for, easier questions, or leave the answers out",
        )


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
