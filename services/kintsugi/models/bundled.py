"""The bundled model: small, trained, and accurate on the questions it was trained for.

It reads chronicles of several chunks in a closed vocabulary, so that the effect of blending can be shown
without a download. `checkpoints/kintsugi_checkpoints/bundled/README.md` describes its training and its
accuracy. Its files are in the distribution kintsugi-checkpoints, which the SDK does not need.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from kintsugi.core.errors import Unavailable

BUNDLED_NAME = "bundled"
"""The name that users write instead of a checkpoint folder, and that clients use."""


def packaged_files() -> Path:
    """Return the folder of the distribution kintsugi-checkpoints. Raises `Unavailable` if it is missing."""
    spec = find_spec("kintsugi_checkpoints")
    if spec is None or spec.origin is None:
        raise Unavailable(
            "the bundled model, passages and questions are not installed: pip install kintsugi-checkpoints"
        )
    return Path(spec.origin).parent


def bundled_checkpoint() -> Path:
    """Return the folder of the bundled model's checkpoint. Raises `Unavailable`."""
    return packaged_files() / "bundled"


def bundled_report() -> Path:
    """Return the path of the bundled model's calibration report. Raises `Unavailable`."""
    return bundled_checkpoint() / "calibration.json"


@dataclass(frozen=True)
class Showcase:
    """A question that needs several chunks and that the bundled model answers in one word."""

    chunks: tuple[str, ...]
    question: str
    """The end of the prompt, without a template around it."""
    answer: str


@lru_cache(maxsize=1)
def showcase() -> Showcase:
    """Return the question that the demo shows."""
    document = json.loads((bundled_checkpoint() / "showcase.json").read_text(encoding="utf-8"))
    return Showcase(tuple(document["chunks"]), document["question"], document["answer"])
