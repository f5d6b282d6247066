"""Which declines of a model are clear: a reason from a fixed list, in words that a user can act on."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kintsugi.models.layers import DeclineReason, describe_layers

REASONS = frozenset(reason.value for reason in DeclineReason)
"""Reasons that come from the model. A failed self-test is none of them: the model was thought to blend."""

WITHOUT_KV = frozenset({DeclineReason.RECURRENT.value, DeclineReason.INDEXED.value})
"""Reasons whose text has to say that prefix caching works as before: there users doubt it."""

_RAW_ERROR = re.compile(
    r"\b(?!NotBlendable)[A-Z]\w*(Error|Exception)\b|\bforward\(\)|Traceback|size of tensor"
)


def is_clear(reason: str) -> bool:
    """Whether ``reason``, a response's `reason: detail`, is from the list and shows no error of Python's."""
    label, _, detail = reason.partition(": ")
    if label not in REASONS or not detail.strip() or _RAW_ERROR.search(detail):
        return False
    return label not in WITHOUT_KV or "prefix caching" in detail


def decide_without_engine(folder: Path) -> str | None:
    """Why the model in ``folder`` is not blended, as far as its config tells; None where it tells nothing.

    For classes that vLLM alone does not start, or gives no answer of, on this machine.
    """
    declines = describe_layers(json.loads((folder / "config.json").read_text())).declines
    return str(declines[0]) if declines else None
