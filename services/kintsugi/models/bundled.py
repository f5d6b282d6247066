"""The model that ships with Kintsugi: small, trained, and accurate on the questions it was trained for.

It reads chronicles of several chunks in a closed vocabulary, so that the effect of blending can be shown
without a download. `checkpoints/bundled/README.md` says how it was trained and how accurate it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

BUNDLED_CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "bundled"
BUNDLED_NAME = "kintsugi-testbed"
BUNDLED_REPORT = BUNDLED_CHECKPOINT / "calibration.json"


@dataclass(frozen=True)
class Showcase:
    """A question that needs several chunks, which the bundled model answers in one word."""

    chunks: tuple[str, ...]
    question: str
    """The end of the prompt, without a template around it."""
    answer: str


@lru_cache(maxsize=1)
def showcase() -> Showcase:
    """The question that the demo shows."""
    document = json.loads((BUNDLED_CHECKPOINT / "showcase.json").read_text(encoding="utf-8"))
    return Showcase(tuple(document["chunks"]), document["question"], document["answer"])
