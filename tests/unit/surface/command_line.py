"""What is typed: every command with its options and arguments, help texts apart."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterator
from typing import Any, get_args
from unittest.mock import patch

import typer

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi_operator.operator import OperatorOptions
from tests.unit.surface.python_api import text_of


def surface() -> dict[str, Any]:
    return {
        "kintsugi": dict(_commands(typer.main.get_command(app), "kintsugi")),
        "kintsugi-operator": {_flags(action): _option(action) for action in _operator_parser()._actions},
        "exit codes": {code.name: int(code) for code in ExitCode},
    }


def _commands(command: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    found: dict[str, Any] = {}
    for position, parameter in enumerate(command.params):
        is_argument = not any(name.startswith("-") for name in parameter.opts)
        flags = " ".join([*parameter.opts, *parameter.secondary_opts])
        found[f"argument {position + 1}" if is_argument else flags] = _parameter(parameter)
    yield path, found
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(inner, f"{path} {name}")


def _parameter(parameter: Any) -> dict[str, Any]:
    """Type, default and whether it is required; what else applies is left out where it is not set."""
    kind = parameter.type_descriptor.annotation
    found: dict[str, Any] = {
        "type": _type(kind),
        "default": None if parameter.required else _plain(parameter.default),
        "required": parameter.required,
    }
    for name in ("min", "max", "nargs", "metavar", "envvar", "hidden"):
        value = getattr(parameter, name, None)
        if value is not None and value is not False and (name, value) != ("nargs", 1):
            found[name] = value
    for name in ("is_flag", "multiple", "count"):
        if getattr(parameter, name, False):
            found[name] = True
    return found


def _type(kind: Any) -> str:
    """`int`, `list[Path]`, or the values of an enumeration."""
    for one in (kind, *get_args(kind)):
        if isinstance(one, type) and issubclass(one, enum.Enum):
            return " | ".join(str(member.value) for member in one)
    return text_of(kind)


def _plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class _Captured(Exception):
    """Carries the parser out of the operator's `OperatorOptions.of`."""


def _operator_parser() -> argparse.ArgumentParser:
    def parse(parser: argparse.ArgumentParser, *_: Any) -> Any:
        raise _Captured(parser)

    with patch.object(argparse.ArgumentParser, "parse_args", parse):
        try:
            OperatorOptions.of([], {})
        except _Captured as captured:
            return captured.args[0]
    raise AssertionError("the operator no longer reads its arguments with argparse")


def _flags(action: argparse.Action) -> str:
    return " ".join(action.option_strings)


def _option(action: argparse.Action) -> dict[str, Any]:
    kind = getattr(action.type, "__name__", "str") if action.nargs != 0 else "flag"
    return {"type": kind, "default": action.default, "required": action.required}
