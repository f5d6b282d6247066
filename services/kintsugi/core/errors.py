"""The tree of errors that Kintsugi raises on purpose.

::

    KintsugiError
    ├── InvalidField           a field has an invalid value; names the field and a valid value
    │   ├── UnknownField       a key that the schema lacks; carries the nearest valid one
    │   ├── InvalidSpan        spans overlap, leave the prompt or are empty
    │   ├── ForeignChunkKey    a key that was not made from this chunk space and these tokens
    │   └── BelowMinimum       a ratio below the lowest that passed calibration
    ├── NotFound               a chunk, report, shard or file does not exist
    ├── Unauthenticated        no token, or an unknown one
    ├── PermissionDenied       a known caller lacks a permission, or the feature is switched off
    ├── ResourceExhausted      a limit was reached: bytes, entries, queue
    ├── Unavailable            the other side does not answer; a later retry may succeed
    ├── DeadlineExceeded       the other side answered too late
    ├── Corrupted              bytes whose digest or structure is wrong; they are quarantined, never served
    ├── VersionMismatch        a protocol, format or engine version that this build does not support
    ├── NotBlendable           the model, engine or request cannot be blended; serving falls back
    └── SelfTestFailed         the engine's start-up self-test found that blending would be wrong

Every message says what to do. `kintsugi.store.protocol.grpc_status` maps errors to gRPC statuses and back.
Assertions are for mistakes in our own code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Self, cast


class KintsugiError(Exception):
    """Root of every error raised on purpose. Errors can be pickled, whatever their constructors take."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), str(self), self.__dict__)


def _rebuild_error(kind: type[KintsugiError], message: str, fields: dict[str, Any]) -> KintsugiError:
    error = kind.__new__(kind)
    error.args = (message,)
    error.__dict__.update(fields)
    return error


class InvalidField(KintsugiError):
    """`field` has an invalid value. The message says what is valid."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def within(self, where: str) -> Self:
        """Return the same error of a field inside another one, ``where``."""
        values = {**self.__dict__, "field": f"{where}.{self.field}"}
        return cast("Self", _rebuild_error(type(self), f"{where}.{self}", values))


class UnknownField(InvalidField):
    """A key that the schema does not have."""

    def __init__(self, field: str, valid: Iterable[str]) -> None:
        names = sorted(valid)
        leaf = field.rsplit(".", 1)[-1]
        near = difflib.get_close_matches(leaf, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid names are {', '.join(names)}"
        super().__init__(field, f"unknown; {hint}")
        self.nearest = near[0] if near else None


class InvalidSpan(InvalidField):
    """A chunk span that is empty, overlaps another or leaves the prompt."""


class ForeignChunkKey(InvalidField):
    """A chunk key that does not belong to this chunk space and these tokens."""


class BelowMinimum(InvalidField):
    """A ratio below the lowest that passed calibration."""


class NotFound(KintsugiError):
    """The requested object does not exist."""


class Unauthenticated(KintsugiError):
    """The caller sent no token, or an unknown one."""


class PermissionDenied(KintsugiError):
    """The caller is known but may not do this."""


class ResourceExhausted(KintsugiError):
    """A limit was reached; nothing was stored."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        """``retry_after_s``: seconds until a retry may succeed, if known."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KintsugiError):
    """The other side does not answer."""


class DeadlineExceeded(KintsugiError):
    """The other side answered too late."""


class Corrupted(KintsugiError):
    """Stored bytes whose digest or structure is wrong."""


class VersionMismatch(KintsugiError):
    """A protocol, format or engine version that this build does not support."""


class NotBlendable(KintsugiError):
    """The request cannot be blended; an ordinary full prefill serves it. `reason` is a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class SelfTestFailed(KintsugiError):
    """The engine's start-up self-test found that blending would give wrong answers."""
