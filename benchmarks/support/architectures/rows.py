"""One row of the matrix: the findings about one architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from benchmarks.support.exactness import max_dlogprob
from kintsugi.engine.local import Generation

R1_MAX = 1e-4
"""Difference of a logprob in float32, at ratio 1 against vLLM alone, one prompt at a time."""
BATCHED_MAX = 1e-3
"""The same where the two were computed in batches of other sizes, which float32 rounds apart."""
REFERENCE_MAX = 1e-3
"""Difference of a logprob in float32 from the reference on transformers."""


class Outcome(StrEnum):
    """The outcome of a row."""

    EXACT = "exact"
    DECLINED = "declined"
    """For a clear reason (`declines.is_clear`), and answers are vLLM's own."""
    UNCLEAR = "unclear"
    """Declined or failed for a reason that is not on the list, or that is an error of Python's."""
    WRONG = "wrong"
    """A blended answer is wrong, or the plugin changed a plain answer."""
    UNTOLD = "untold"
    """The model cannot show errors: its answers repeat one token, or vLLM alone gives different answers the
    second time."""
    NOT_SERVED = "not served"
    """vLLM alone does not serve this class here, and its config alone is no reason to decline."""
    CRASHED = "crashed"
    """The process ended without a result."""


_PATH = re.compile(r"(?<![\w./:])(?:/[\w.+@~-]+){2,}/?")
_CHECKPOINT = re.compile(r"-[0-9a-f]{16}-r\d+$")
"""Suffix that `checkpoints` adds to an entry's name for the folder of its checkpoint."""


def without_paths(text: str) -> str:
    """``text`` with the last part of each path instead of the path, and with entries instead of the folders
    of their checkpoints: results are read elsewhere."""
    return _PATH.sub(lambda path: _CHECKPOINT.sub("", path[0].rstrip("/").rpartition("/")[2]), text)


@dataclass
class Row:
    """The findings about one architecture."""

    name: str
    outcome: Outcome = Outcome.EXACT
    reason: str = ""
    """Why the outcome is not `exact`, in one sentence."""
    figures: dict[str, float] = field(default_factory=dict)
    """The largest difference that each check found, and other counts."""
    failed: list[str] = field(default_factory=list)
    """The checks that do not hold."""
    seconds: float = 0.0
    commit: str = ""
    """The commit that it was found at."""

    def note(self, check: str, holds: bool, difference: float, detail: str = "") -> None:
        """Add what a check found. The first that does not hold decides the outcome."""
        if not holds and check not in self.failed:
            self.failed.append(check)
        self.figures[check] = max(difference, self.figures.get(check, 0.0))
        if not holds and self.outcome is Outcome.EXACT:
            self.outcome = Outcome.WRONG
            self.reason = f"{check}: {detail or f'logprobs differ by {difference:.3g}'}"

    def compare(self, check: str, expected: Generation, got: Generation, difference_max: float) -> None:
        """Note whether two answers have the same tokens, and logprobs within `difference_max`."""
        difference = max_dlogprob(expected, got)
        same = expected.token_ids == got.token_ids
        detail = "" if same else f"the tokens differ; logprobs up to there by {difference:.3g}"
        self.note(check, same and difference <= difference_max, difference, detail)

    def to_mapping(self) -> dict[str, Any]:
        """JSON form, figures with three digits."""
        figures = {name: float(f"{value:.3g}") for name, value in self.figures.items()}
        return {**self.__dict__, "outcome": self.outcome.value, "figures": figures}

    @staticmethod
    def of(mapping: Mapping[str, Any]) -> Row:
        """The row that `to_mapping` wrote, with or without what a matrix adds."""
        own = {name: mapping[name] for name in Row.__dataclass_fields__ if name in mapping}
        return Row(**{**own, "outcome": Outcome(mapping["outcome"])})
