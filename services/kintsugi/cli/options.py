"""Options that several commands share, and parsers for options whose text is more than a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import SelectorName, parse_selector

Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Model = Annotated[str, typer.Option(help="Checkpoint folder, or a name that vLLM resolves.")]
SystemPrompt = Annotated[
    Path | None,
    typer.Option("--system", help="Text file of the system prompt that chunks are prefilled behind."),
]
EngineArguments = Annotated[
    str, typer.Option("--engine", help="Further arguments of vllm.LLM, as a JSON object.")
]


def parse_json_object(option: str, text: str, example: str) -> dict[str, Any]:
    """Raises `InvalidField`, which shows the example."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidField(option, f"is not JSON ({error}); give an object, such as {example}") from None
    if not isinstance(values, dict):
        raise InvalidField(option, f"must be a JSON object, such as {example}")
    return values


def parse_engine_arguments(text: str) -> dict[str, Any]:
    """The arguments of `vllm.LLM` in `--engine`. Raises `InvalidField`."""
    return parse_json_object("engine", text, '{"max_model_len": 4096}')


def check_writable(option: str, path: Path) -> None:
    """Check that a file can be written, before minutes are spent on its content. Raises `InvalidField`."""
    if not path.parent.is_dir():
        raise InvalidField(option, f"{path.parent} is not a folder; create it first")
    if path.is_dir():
        raise InvalidField(option, f"{path} is a folder; name a file in it")


def parse_integers(name: str, text: str) -> list[int]:
    """`1,2,3`; empty text is an empty list. Raises `InvalidField`."""
    try:
        return [int(part) for part in _split(text)]
    except ValueError:
        raise InvalidField(name, f"{text!r} is not a comma-separated list of whole numbers") from None


def parse_floats(name: str, text: str) -> list[float]:
    """`0.1,0.2`; empty text is an empty list. Raises `InvalidField`."""
    try:
        return [float(part) for part in _split(text)]
    except ValueError:
        raise InvalidField(name, f"{text!r} is not a comma-separated list of numbers") from None


def parse_selectors(text: str) -> list[SelectorName]:
    """`hkvd,query`. Raises `InvalidField`."""
    return [parse_selector(part) for part in _split(text)]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
