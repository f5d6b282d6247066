"""Exit codes, and the mapping of errors to them: one line that says what to do, never a traceback."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ParamSpec, TypeVar

import typer

from kintsugi.core.errors import (
    Corrupted,
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    NotBlendable,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SelfTestFailed,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)

P = ParamSpec("P")
R = TypeVar("R")


class ExitCode(IntEnum):
    """The exit codes of every command."""

    OK = 0
    FAILURE = 1
    """An unexpected failure; please report it."""
    BAD_INPUT = 2
    """An argument, file or model is wrong or missing. Option parsing returns it, too."""
    NOT_BLENDABLE = 3
    """The model or request cannot be blended, or the self-test failed. Any answer is from a full prefill."""
    UNAVAILABLE = 4
    """An engine or store did not start, did not answer in time, or is full."""
    CORRUPTED = 5
    """Data failed its check, or another version wrote it."""
    INTERRUPTED = 130


_CODES: tuple[tuple[type[KintsugiError], ExitCode], ...] = (
    (InvalidField, ExitCode.BAD_INPUT),
    (NotFound, ExitCode.BAD_INPUT),
    (Unauthenticated, ExitCode.BAD_INPUT),
    (PermissionDenied, ExitCode.BAD_INPUT),
    (NotBlendable, ExitCode.NOT_BLENDABLE),
    (SelfTestFailed, ExitCode.NOT_BLENDABLE),
    (Unavailable, ExitCode.UNAVAILABLE),
    (DeadlineExceeded, ExitCode.UNAVAILABLE),
    (ResourceExhausted, ExitCode.UNAVAILABLE),
    (Corrupted, ExitCode.CORRUPTED),
    (VersionMismatch, ExitCode.CORRUPTED),
)


def exit_code_of(error: KintsugiError) -> ExitCode:
    """The exit code of an error; `FAILURE` for a type without one."""
    return next((code for cls, code in _CODES if isinstance(error, cls)), ExitCode.FAILURE)


def exit_on_error(command: Callable[P, R]) -> Callable[P, R]:
    """Let a `KintsugiError` end a command with one line on stderr and the right exit code.

    A command called with ``as_json`` also prints ``{"error": {…}}`` on stdout.
    """

    @functools.wraps(command)
    def run_or_exit(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KintsugiError as error:
            code = exit_code_of(error)
            if kwargs.get("as_json"):
                print(json.dumps({"error": error_document(error, code)}, indent=2))
            print(f"kintsugi: {_one_line(error)}", file=sys.stderr)
            raise typer.Exit(code) from None
        except KeyboardInterrupt:
            print("kintsugi: interrupted", file=sys.stderr)
            raise typer.Exit(ExitCode.INTERRUPTED) from None

    return run_or_exit


def error_document(error: KintsugiError, code: ExitCode) -> dict[str, Any]:
    """JSON form of an error: type, message, exit code, and the field where there is one."""
    document: dict[str, Any] = {
        "type": type(error).__name__,
        "message": _one_line(error),
        "exit_code": int(code),
    }
    if isinstance(error, InvalidField):
        document["field"] = error.field
    return document


def _one_line(error: KintsugiError) -> str:
    return " ".join(str(error).split())
