"""Messages of the wire protocol become the gateway's own values."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import OPTION_NAMES, BlendOptions, SelectorName
from kintsugi.gateway.fronts.grpc_service import call_of
from kintsugi.rpc.v1 import gateway_pb2 as pb

QUESTION = pb.Content(text="Why?")


def test_every_blend_option_has_a_field_of_its_name_in_a_request() -> None:
    assert set(OPTION_NAMES) <= set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("wire", "options"),
    [
        ({}, BlendOptions()),
        ({"ratio": 0.0}, BlendOptions(ratio=0.0)),
        ({"selector": ""}, BlendOptions()),
        ({"ratio": 0.25, "selector": "query"}, BlendOptions(0.25, SelectorName.QUERY)),
    ],
)
def test_a_call_has_the_options_that_the_client_set(wire: dict[str, Any], options: BlendOptions) -> None:
    request = pb.GenerateRequest(namespace="acme", question=QUESTION, **wire)
    assert call_of(request, "r", {}).options == options


@pytest.mark.parametrize("wire", [{"ratio": 1.5}, {"selector": "none"}])
def test_an_option_that_cannot_be_is_named(wire: dict[str, Any]) -> None:
    (name,) = wire
    with pytest.raises(InvalidField, match=name):
        call_of(pb.GenerateRequest(namespace="acme", question=QUESTION, **wire), "r", {})
