"""Exit codes, and the mapping of errors to them. An error prints one line, never a traceback."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

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


class ExitCode(IntEnum):
    """The exit codes of every command."""

    OK = 0
    FAILURE = 1
    """An unexpected failure; please report it."""
    BAD_INPUT = 2
    """An argument, file or model is wrong or missing; also the exit code of option parsing."""
    NOT_BLENDABLE = 3
    """The model or request cannot be blended, or the self-test failed. A full prefill produced the answer."""
    UNAVAILABLE = 4
    """An engine or store did not start, did not answer in time, or is full."""
    CORRUPTED = 5
    """Data does not match its digest, or another version wrote it."""
    INTERRUPTED = 130


_CODES: tuple[tuple[tuple[type[KintsugiError], ...], ExitCode], ...] = (
    ((InvalidField, NotFound, Unauthenticated, PermissionDenied), ExitCode.BAD_INPUT),
    ((NotBlendable, SelfTestFailed), ExitCode.NOT_BLENDABLE),
    ((Unavailable, DeadlineExceeded, ResourceExhausted), ExitCode.UNAVAILABLE),
    ((Corrupted, VersionMismatch), ExitCode.CORRUPTED),
)


def exit_code_of(error: KintsugiError) -> ExitCode:
    """Return the exit code of an error; `FAILURE` for a type that has none."""
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), ExitCode.FAILURE)


def error_document(error: KintsugiError) -> dict[str, Any]:
    """JSON form of an error: type, message, exit code, and the field if there is one."""
    document: dict[str, Any] = {
        "type": type(error).__name__,
        "message": " ".join(str(error).split()),
        "exit_code": int(exit_code_of(error)),
    }
    if isinstance(error, InvalidField):
        document["field"] = error.field
    return document
