"""Options whose text is more than a word: JSON objects."""

from __future__ import annotations

import json
from typing import Any

from kintsugi.core.errors import InvalidField


def json_object(option: str, text: str, example: str) -> dict[str, Any]:
    """What an option of that name says. Raises `InvalidField`."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidField(option, f"is no JSON ({error})") from None
    if not isinstance(values, dict):
        raise InvalidField(option, f"must be a JSON object, such as {example}")
    return values


def engine_arguments(text: str) -> dict[str, Any]:
    """Of `vllm.LLM`, from `--engine`. Raises `InvalidField`."""
    return json_object("engine", text, '{"max_model_len": 4096}')
