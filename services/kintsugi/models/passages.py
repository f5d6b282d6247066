"""The bundled encyclopedic passages and questions: the demo's corpus."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kintsugi.models.bundled import packaged_files


@dataclass(frozen=True)
class Passage:
    """One chunk of prose, about 500 words."""

    title: str
    text: str
    """The whole file, with its title line. This text is tokenised and stored."""


BUNDLED_QUESTIONS = (
    "Which materials that cool from a melt do the passages describe, and what is each of them used for?",
    "Which inventions in the passages depended on water, wind or the motion of the sea?",
    "Who in the passages lost a life's work or a fortune, and what became of the work afterwards?",
)
"""Questions that each need more than one passage."""


@lru_cache(maxsize=1)
def read_bundled_passages() -> tuple[Passage, ...]:
    """Return the passages, in the order of their file names. Raises `Unavailable`."""
    paths = sorted((packaged_files() / "passages").glob("*.txt"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return tuple(Passage(text.split("\n", 1)[0].strip(), text.strip() + "\n") for text in texts)
