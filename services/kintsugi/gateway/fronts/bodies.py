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
    except RecursionError:
        raise InvalidField("body", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidField("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidField("body", f"must be a JSON object, not {type(body).__name__}")
    return body
