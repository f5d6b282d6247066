"""Converts between gRPC statuses and Kintsugi's errors, with one table.

A status code names a family; the trailing metadata `kintsugi-error` names the class, so that an error keeps
its class across the wire. Without the metadata (from a proxy, or gRPC itself), the code alone decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from kintsugi.core import errors

ERROR_METADATA = "kintsugi-error"
RETRY_AFTER = "retry-after"
"""Trailing metadata with whole seconds after which the call may succeed."""
LAYER_LATE = "the next layer did not arrive in time"
CHECK_ADDRESS = "check that it runs, and that this is its address (kintsugi status)"
"""Advice if no Kintsugi server answered."""
DETAIL_CHARS_MAX = 1024
"""gRPC carries details in HTTP/2 headers, which are bounded."""

_TABLE: tuple[tuple[type[errors.KintsugiError], Any], ...] = (
    # An exception is sent with the status of the first row whose class matches by `isinstance`. A status
    # without metadata is read as the class of the first row with that status. So a class may share the status
    # of an earlier row only if none of its base classes is in the table.
    (errors.InvalidField, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Corrupted, grpc.StatusCode.DATA_LOSS),
    (errors.VersionMismatch, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.VersionMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.VersionMismatch, grpc.StatusCode.UNIMPLEMENTED),
    (errors.NotBlendable, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SelfTestFailed, grpc.StatusCode.FAILED_PRECONDITION),
    # Only read: statuses of gRPC itself. All of them mean that this shard cannot answer this client now.
    (errors.Unavailable, grpc.StatusCode.CANCELLED),
    (errors.Unavailable, grpc.StatusCode.ABORTED),
    (errors.Unavailable, grpc.StatusCode.UNAUTHENTICATED),
    (errors.Unavailable, grpc.StatusCode.PERMISSION_DENIED),
    (errors.Unavailable, grpc.StatusCode.INTERNAL),
    (errors.Unavailable, grpc.StatusCode.UNKNOWN),
    (errors.InvalidField, grpc.StatusCode.OUT_OF_RANGE),
    # Sent by a gateway, and read as these classes only with the metadata.
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
)


def status_of(error: errors.KintsugiError) -> Any:
    """Return the `grpc.StatusCode` of an error."""
    for cls, code in _TABLE:
        if isinstance(error, cls):
            return code
    return grpc.StatusCode.INTERNAL


def error_name(error: errors.KintsugiError) -> str:
    """Return the value of `ERROR_METADATA`: the name of the nearest class in the table."""
    return next((cls.__name__ for cls, _ in _TABLE if isinstance(error, cls)), type(error).__name__)


async def abort_call(context: Any, error: errors.KintsugiError) -> None:
    """End a call with the status and metadata of an error."""
    metadata = [(ERROR_METADATA, error_name(error))]
    if isinstance(error, errors.ResourceExhausted) and error.retry_after_s is not None:
        metadata.append((RETRY_AFTER, str(math.ceil(error.retry_after_s))))
    context.set_trailing_metadata(tuple(metadata))
    await context.abort(status_of(error), str(error)[:DETAIL_CHARS_MAX])


def error_of(code: Any, details: str, name: str | None = None) -> errors.KintsugiError:
    """Return the exception that a status was made from, or the nearest one."""
    cls = next((cls for cls, _ in _TABLE if cls.__name__ == name), None)
    if cls is None:
        cls = next((cls for cls, row in _TABLE if row == code), errors.Unavailable)
    if issubclass(cls, errors.InvalidField | errors.NotBlendable):
        head, separator, tail = details.partition(": ")
        return cls(head, tail) if separator else cls("request", details)
    return cls(details)


def error_of_call(failure: Any, where: str) -> errors.KintsugiError:
    """Return the exception for a failed `grpc.Call`; its message contains the address."""
    metadata = dict(tuple(entry) for entry in failure.trailing_metadata() or ())
    name = metadata.get(ERROR_METADATA)
    details = failure.details() or str(failure.code())
    if name is None:
        details = f"{where}: {details}"
        if failure.code() == grpc.StatusCode.UNAVAILABLE:  # from gRPC itself: no Kintsugi server answered
            details += f"; {CHECK_ADDRESS}"
    error = error_of(failure.code(), details, name)
    if isinstance(error, errors.ResourceExhausted) and str(metadata.get(RETRY_AFTER, "")).isdecimal():
        error.retry_after_s = float(metadata[RETRY_AFTER])
    return error


@contextmanager
def errors_of(address: str, expired: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Convert gRPC's exceptions to Kintsugi's, with the address in the message. If `expired` returns True, a
    watchdog cancelled the call, which counts as an exceeded deadline."""
    try:
        yield
    except grpc.RpcError as error:
        if expired():
            raise errors.DeadlineExceeded(f"{address}: {LAYER_LATE}") from error
        raise error_of_call(error, address) from error
    except (ValueError, grpc.aio.UsageError) as error:
        if "closed" not in str(error):
            raise
        raise errors.Unavailable(f"{address}: this client is closed") from error
