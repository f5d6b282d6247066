"""Every error that a caller can meet has its status in both protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from kintsugi.core import errors
from kintsugi.gateway.fronts.errors import _HTTP, Problem, grpc_status_of, http_status_of
from kintsugi.gateway.fronts.limits import BodyTooLarge, BodyTooSlow
from kintsugi.store.protocol.grpc_status import _TABLE, status_of

FAMILY = {
    400: "INVALID_ARGUMENT",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    504: "DEADLINE_EXCEEDED",
}
"""gRPC's names for what HTTP divides further."""


def tree(root: type[errors.KintsugiError]) -> Iterator[type[errors.KintsugiError]]:
    for cls in root.__subclasses__():
        if cls.__module__.startswith("kintsugi."):
            yield cls
            yield from tree(cls)


@pytest.mark.parametrize("cls", list(tree(errors.KintsugiError)), ids=lambda cls: cls.__name__)
def test_every_error_has_a_row_of_its_own_or_of_its_base_in_both_tables(
    cls: type[errors.KintsugiError],
) -> None:
    assert any(issubclass(cls, row) for row, *_ in _TABLE)
    assert any(issubclass(cls, row) for row, *_ in _HTTP)
    error = cls.__new__(cls)
    error.args = ("what happened",)
    error.__dict__["field"] = "ratio"
    problem, code = Problem.of(error), status_of(error)
    assert (problem.message, problem.status) == ("what happened", http_status_of(error))
    assert grpc_status_of(error) == code.name
    assert (problem.status == 500) == (code in SERVER_ERRORS)
    if problem.status in FAMILY:
        assert code.name == FAMILY[problem.status]


SERVER_ERRORS = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.FAILED_PRECONDITION)


def test_errors_are_told_apart_as_finely_as_http_does() -> None:
    assert Problem.of(BodyTooLarge("body", "is larger")).status == 413
    assert Problem.of(BodyTooSlow("late")).status == 408
    assert Problem.of(errors.UnknownField("rato", ["ratio"])).field == "rato"


def test_what_is_no_error_of_ours_is_a_defect_or_a_call_that_was_cancelled() -> None:
    assert (http_status_of(KeyError("secret")), grpc_status_of(KeyError("secret"))) == (500, "INTERNAL")
    assert "secret" not in Problem.of(KeyError("secret"), "r-7").message
    assert "r-7" in Problem.of(KeyError("secret"), "r-7").message
    left = asyncio.CancelledError()
    assert (http_status_of(left), grpc_status_of(left)) == (499, "CANCELLED")
