"""The encyclopedic passages and questions that ship with Kintsugi: the demo's corpus."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from kintsugi import checkpoints

_FOLDER = "passages"


@dataclass(frozen=True)
class Passage:
    """One chunk of prose, about 500 words."""

    title: str
    text: str
    """The whole file, title line included: what is tokenised and stored."""


BUNDLED_QUESTIONS = (
    "Which materials that cool from a melt do the passages describe, and what is each of them used for?",
    "Which inventions in the passages depended on water, wind or the motion of the sea?",
    "Who in the passages lost a life's work or a fortune, and what became of the work afterwards?",
)
"""Each needs more than one passage."""


@lru_cache(maxsize=1)
def _passages() -> tuple[Passage, ...]:
    folder = files(checkpoints) / _FOLDER
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    return tuple(_passage((folder / name).read_text(encoding="utf-8")) for name in names)


def _passage(text: str) -> Passage:
    return Passage(title=text.split("\n", 1)[0].strip(), text=text.strip() + "\n")


def read_bundled_passages() -> list[Passage]:
    """The passages, in order of their file names."""
    return list(_passages())
