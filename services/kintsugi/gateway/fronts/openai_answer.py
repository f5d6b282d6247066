"""What is ours in the pieces of an OpenAI answer: a response's JSON, or one event of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kintsugi.core.request import PARAMS_KEY
from kintsugi.gateway.tracing import TIMES, without_times

_DATA = b"data: "
_NAMED = f'"{PARAMS_KEY}"'.encode()
_TIMED = tuple(f'"{name}"'.encode() for name in TIMES)


def accounting_in(piece: bytes) -> Mapping[str, Any] | None:
    """The accounting, if it is there."""
    holder = None if _NAMED not in piece else _holder(_document(piece))
    return None if holder is None else holder[PARAMS_KEY]


def without_times_in(piece: bytes) -> bytes:
    """The piece as it is told to a caller who did not ask when layers were computed."""
    if not any(name in piece for name in _TIMED):
        return piece
    document = _document(piece)
    holder = _holder(document)
    if holder is None:
        return piece
    holder[PARAMS_KEY] = without_times(holder[PARAMS_KEY])
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return _DATA + text + b"\n\n" if piece.startswith(_DATA) else text


def _document(piece: bytes) -> Any:
    try:
        return json.loads(piece.removeprefix(_DATA))
    except ValueError:
        return None


def _holder(document: Any) -> dict[str, Any] | None:
    """The mapping whose entry `PARAMS_KEY` is the accounting."""
    if not isinstance(document, dict):
        return None
    for holder in (document, document.get("kv_transfer_params")):
        if isinstance(holder, dict) and isinstance(holder.get(PARAMS_KEY), dict):
            return holder
    return None
