"""The one rule for request ids and tokens, for headers and metadata alike."""

from __future__ import annotations

import pytest

from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.gateway.requests import ServedRequest, choose_request_id
from kintsugi.store.protocol.access import parse_bearer


@pytest.mark.parametrize("given", ["mine-1", "a.b_c-9", "x" * 128])
def test_an_id_that_can_be_logged_is_kept(given: str) -> None:
    assert choose_request_id(given) == given


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "line\n", "é", '"'])
def test_another_id_is_replaced_by_a_new_one(given: str) -> None:
    chosen = {choose_request_id(given) for _ in range(3)}
    assert len(chosen) == 3
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in chosen)


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer kg_1", "kg_1"), ("bearer  kg_1 ", "kg_1"), ("Basic kg_1", None), ("kg_1", None), (None, None)],
)
def test_a_token_is_a_bearers(header: str | None, token: str | None) -> None:
    assert parse_bearer(header) == token


def test_a_request_is_counted_once_with_the_status_it_ended_with() -> None:
    metrics = GatewayMetrics()
    headers = {"traceparent": "00-1", "cookie": "secret"}

    def counted(status: str) -> float | None:
        labels = {"method": "Generate", "status": status}
        return metrics.registry.get_sample_value("kintsugi_gateway_requests_total", labels)

    for error, status in ((None, "OK"), (KeyError("x"), "INTERNAL")):
        served = ServedRequest("Generate", headers, metrics, "OK")
        assert served.trace == {"traceparent": "00-1"}
        try:
            with served.record(lambda error: "INTERNAL"):
                if error is not None:
                    raise error
        except KeyError:
            assert error is not None, "it passes through"
        assert counted(status) == 1
    assert counted("OK") == 1
