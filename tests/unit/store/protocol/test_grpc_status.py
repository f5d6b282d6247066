"""The status table, both ways."""

from __future__ import annotations

import grpc
import pytest

from kintsugi.core import errors
from kintsugi.store.protocol.grpc_status import error_name, error_of, status_of

EXAMPLES = [
    errors.InvalidField("ratio", "2 is outside [0, 1]"),
    errors.NotFound("no such report"),
    errors.Unauthenticated("no token"),
    errors.PermissionDenied("another tenant's namespace"),
    errors.ResourceExhausted("full"),
    errors.Unavailable("draining"),
    errors.DeadlineExceeded("too late"),
    errors.Corrupted("frames[1]"),
    errors.VersionMismatch("protocol 9"),
    errors.NotBlendable("lora", "adapters are active"),
    errors.SelfTestFailed("logits differ"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_crosses_the_wire_as_itself(error: errors.KintsugiError) -> None:
    read = error_of(status_of(error), str(error), error_name(error))
    assert type(read) is type(error)
    assert str(read) == str(error)


def test_a_subclass_is_read_as_its_base() -> None:
    error = errors.InvalidSpan("spans[0]", "is empty")
    read = error_of(status_of(error), str(error), error_name(error))
    assert type(read) is errors.InvalidField
    assert read.field == "spans[0]"


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_of_grpc_is_one_of_our_errors(code: grpc.StatusCode) -> None:
    assert isinstance(error_of(code, "details"), errors.KintsugiError)
