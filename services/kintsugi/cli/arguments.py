"""Options whose text is more than a word: JSON objects, and files that are to be written."""

from __future__ import annotations

import json
from pathlib import Path
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


def check_writable(option: str, path: Path) -> None:
    """That a file can be put there, before minutes are spent on what goes into it. Raises `InvalidField`."""
    if not path.parent.is_dir():
        raise InvalidField(option, f"{path.parent} is not a folder; make it first")
    if path.is_dir():
        raise InvalidField(option, f"{path} is a folder; name a file in it")
