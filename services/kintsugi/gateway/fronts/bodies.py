"""Bodies that hold JSON, parsed without keeping others waiting."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from kintsugi.core.errors import InvalidField

PARSE_INLINE_BYTES = 1 << 16
"""Larger bodies are parsed, and searched for known chunks, on a thread: it takes milliseconds."""
DEPTH_MAX = 100
"""Levels of a body. Whoever reads it, vLLM and the encoder of its answers among them, takes a stack frame for
each."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Result = TypeVar("Result")


async def run_beside(num_bytes: int, work: Callable[[], Result]) -> Result:
    """The result of work on a body of so many bytes, done on a thread unless the body is small."""
    return work() if num_bytes <= PARSE_INLINE_BYTES else await asyncio.to_thread(work)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises `InvalidField`."""
    try:
        text = raw.decode()
        body = json.loads(text)
        if _SURROGATE.search(text):
            # Half of a pair is no character: neither a tokenizer nor an answer can hold it.
            json.dumps(body, ensure_ascii=False).encode()
        if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX and _is_deeper(body, DEPTH_MAX):
            raise RecursionError
    except RecursionError:
        raise InvalidField("body", f"is nested more than {DEPTH_MAX} levels deep") from None
    except ValueError as error:
        raise InvalidField("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidField("body", f"must be a JSON object, not {type(body).__name__}")
    return body


def _is_deeper(document: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more levels. Cost: one look at each value."""
    level = [document]
    for _ in range(levels):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
