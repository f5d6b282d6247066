"""How long OpenAI's `prompt_cache_retention` and `prompt_cache_options` ask to keep a prompt's cache. Pure.

They are hints about what nobody declared: they become the lifetime of what the engine discovers in a prompt,
up to `discovery.ttl_s`. What a caller declares as a chunk would only be kept for less by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import TTL_S_MAX

RETENTION, OPTIONS, TTL = "prompt_cache_retention", "prompt_cache_options", "ttl"
IN_MEMORY = ("in_memory", "in-memory")
"""Both spellings are in use: the one of OpenAI's service, and the one of its client's types."""
IN_MEMORY_S = 3600.0
"""The most for which OpenAI keeps what it keeps in memory."""
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")


def find_retention_s(body: Mapping[str, Any]) -> float | None:
    """Seconds for which an OpenAI request asks to keep its cache; None where it does not say. The options'
    `ttl` goes before the retention. Raises `InvalidField`."""
    retention, options = body.get(RETENTION), body.get(OPTIONS)
    kept_s = None
    if retention is not None:
        kept_s = IN_MEMORY_S if retention in IN_MEMORY else _seconds(retention, RETENTION)
    if options is None:
        return kept_s
    if not isinstance(options, Mapping):
        raise InvalidField(OPTIONS, 'must be an object such as {"ttl": "30m"}')
    return kept_s if options.get(TTL) is None else _seconds(options[TTL], f"{OPTIONS}.{TTL}")


def _seconds(text: Any, where: str) -> float:
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    seconds = 0.0 if match is None else int(match[1]) * _UNITS_S[match[2]]
    if not 0.0 < seconds <= TTL_S_MAX:
        known = f"{IN_MEMORY[0]!r}, or " if where == RETENTION else ""
        raise InvalidField(where, f"must be {known}a time of at most ten years such as '30m' or '24h'")
    return seconds
