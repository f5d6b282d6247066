"""Lines of JSON: one for each record, whoever else listens."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.exchange import CHAT_PATH
from kintsugi.gateway.fronts.errors import grpc_status_of
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.logs import LEVEL_ENVIRONMENT, write_json_lines
from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.gateway.requests import ServedRequest
from tests.fakes.openai_backend import ScriptedBackend, gateway_over
from tests.integration.serving.gateways import own_logging


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    with own_logging() as logger:
        logger.setLevel(logging.NOTSET)
        yield logger.getChild("gateway")


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_record_is_one_line_and_comes_once(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    written = io.StringIO()
    write_json_lines(written)
    write_json_lines(written)
    logger.info("two\nlines of %s", "Zürich")
    logger.debug("nobody asked")
    try:
        raise KeyError("missing")
    except KeyError:
        logger.exception("a defect")
    first, second = lines(written)
    assert (first["level"], first["logger"]) == ("INFO", "kintsugi.gateway")
    assert (first["message"], first["time"][-6:]) == ("two\nlines of Zürich", "+00:00")
    assert "KeyError: 'missing'" in second["exception"]
    assert caplog.records == [], "what listens at the root would write it again"


def test_a_requests_fields_stand_beside_the_lines(logger: logging.Logger) -> None:
    written = io.StringIO()
    write_json_lines(written)
    served = ServedRequest("Generate", {"x-request-id": "r1"}, GatewayMetrics(), "OK")
    served.namespace = "n" * 10_000
    with pytest.raises(InvalidField), served.record(grpc_status_of):
        raise InvalidField("ratio", "x" * 10_000)
    (line,) = lines(written)
    assert (line["request_id"], line["method"], line["status"]) == ("r1", "Generate", "INVALID_ARGUMENT")
    assert line["error"].startswith("InvalidField: ratio")
    assert len(written.getvalue()) < 5000, "what a caller sends does not make it as long as they like"


@pytest.mark.parametrize(("asked", "said"), [("", [20, 30]), ("warning", [30]), ("DEBUG", [10, 20, 30])])
def test_the_environment_says_from_which_level(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, asked: str, said: list[int]
) -> None:
    monkeypatch.setenv(LEVEL_ENVIRONMENT, asked)
    written = io.StringIO()
    write_json_lines(written)
    for level in (10, 20, 30):
        logger.log(level, "%d", level)
    assert [int(line["message"]) for line in lines(written)] == said


def test_a_level_that_there_is_not_is_refused(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEVEL_ENVIRONMENT, "loud")
    with pytest.raises(InvalidField, match=r"KINTSUGI_LOG_LEVEL.*'LOUD' must be one of .*WARNING"):
        write_json_lines(io.StringIO())


def test_http_requests_are_logged_without_what_they_say(logger: logging.Logger) -> None:
    written = io.StringIO()
    write_json_lines(written)

    async def ask() -> None:
        app = HttpFront(gateway_over(ScriptedBackend())).app
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as caller:
            body = {"messages": [{"role": "user", "content": "a secret question"}]}
            headers = {
                "x-request-id": "mine-1",
                "x-kintsugi-namespace": "acme",
                "authorization": "Bearer secret",
            }
            assert (await caller.post(CHAT_PATH, json=body, headers=headers)).status_code == 200
            assert (await caller.post(CHAT_PATH, json={**body, "n": "secret"})).status_code == 400
            assert (await caller.get("/healthz")).status_code == 200

    asyncio.run(ask())
    answered, refused = lines(written)
    named = {"request_id": "mine-1", "method": CHAT_PATH, "namespace": "acme", "status": 200}
    assert named.items() <= answered.items()
    assert "error" not in answered
    assert answered["ms"] > 0
    assert (refused["status"], refused["error"][:15]) == (400, "InvalidField: n")
    assert "secret" not in written.getvalue()
