"""Turns a function into a command, with options, the flag `--json`, and an exit code for each error."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any, TypeVar

import typer

from kintsugi.cli.exits import ExitCode, error_document, exit_code_of
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import KintsugiError

Function = TypeVar("Function", bound=Callable[..., Any])

_AS_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")],
)


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
    """Add a function to `app` as a command. Returns the function unchanged.

    Its first parameter is the `Screen`, which the option `--json` configures. Any other parameter is an
    option or argument; a parameter whose type is a dataclass adds an option for each of its fields. The
    command's exit code is the function's return value. A `KintsugiError` ends it with one line on stderr and
    the error's exit code, and with `--json` also with ``{"error": {…}}`` on stdout. ``settings`` are Typer's
    own settings of a command.
    """

    def add(function: Function) -> Function:
        _, *taken = inspect.signature(function, eval_str=True).parameters.values()
        fields = {one.name: _fields(one.annotation) for one in taken if is_dataclass(one.annotation)}

        @functools.wraps(function)
        def run(*, as_json: bool, **values: Any) -> None:
            try:
                for parameter in taken:
                    if parameter.name in fields:
                        own = {field.name: values.pop(field.name) for field in fields[parameter.name]}
                        values[parameter.name] = parameter.annotation(**own)
                code = function(Screen(as_json), **values)
            except KintsugiError as error:
                document = error_document(error)
                if as_json:
                    print(json.dumps({"error": document}, indent=2))
                print(f"kintsugi: {document['message']}", file=sys.stderr)
                raise typer.Exit(exit_code_of(error)) from None
            except KeyboardInterrupt:
                print("kintsugi: interrupted", file=sys.stderr)
                raise typer.Exit(ExitCode.INTERRUPTED) from None
            raise typer.Exit(code or ExitCode.OK)

        options = [field for one in taken for field in fields.get(one.name, [one])]
        shown = [*(option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options), _AS_JSON]
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in shown}
        app.command(name, **settings)(run)
        return function

    return add


def _fields(options: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters of its constructor."""
    return list(inspect.signature(options, eval_str=True).parameters.values())
