"""What vLLM's own server is told when it cannot learn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.engine.plugin import CONNECTOR
from kintsugi.serving.vllm_server import LearningMiddleware, _specify

TRANSFER = {
    "kv_connector": CONNECTOR,
    "kv_connector_extra_config": {"store": "grpc://127.0.0.1:7400", "audits": True, "codec": "int8"},
}


def config_of(transfer: dict[str, Any] | None, policy: str = "priority") -> SimpleNamespace:
    return SimpleNamespace(
        kv_transfer_config=None if transfer is None else SimpleNamespace(**transfer),
        scheduler_config=SimpleNamespace(policy=policy),
        model_config=SimpleNamespace(model="folder", served_model_name=["name", "alias"]),
    )


def test_the_engine_is_described_as_the_server_has_started_it() -> None:
    spec = _specify(config_of(TRANSFER))
    assert (spec.model, spec.name, spec.store) == ("folder", "name", "grpc://127.0.0.1:7400")
    assert spec.config.codec == "int8"
    assert spec.config.audits
    assert "store" in TRANSFER["kv_connector_extra_config"], "vLLM's own configuration is unchanged"


@pytest.mark.parametrize(
    ("transfer", "policy", "advice"),
    [
        (None, "priority", "needs the connector KintsugiConnector: add it, or omit --middleware"),
        ({**TRANSFER, "kv_connector": "Other"}, "priority", "needs the connector KintsugiConnector"),
        (TRANSFER, "fcfs", "add --scheduling-policy priority"),
        ({**TRANSFER, "kv_connector_extra_config": {"store": "x"}}, "priority", '"audits": true'),
    ],
)
def test_a_server_that_cannot_learn_is_told_what_to_change(
    transfer: dict[str, Any] | None, policy: str, advice: str
) -> None:
    with pytest.raises(InvalidField, match=advice):
        _specify(config_of(transfer, policy))


def test_a_server_that_cannot_learn_does_not_start() -> None:
    """uvicorn would take an exception for an application without a lifespan, and serve."""
    client = SimpleNamespace(vllm_config=config_of(TRANSFER, "fcfs"), generate=None)
    scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client=client))}
    sent: list[dict[str, Any]] = []

    async def refuse(*given: Any) -> Any:
        raise AssertionError("the server was started")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(LearningMiddleware(refuse)(scope, refuse, send))
    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    assert "--scheduling-policy priority" in message["message"]


def test_requests_pass_unchanged() -> None:
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.append(given)

    given: tuple[Any, Any, Any] = ({"type": "http"}, object(), object())
    asyncio.run(LearningMiddleware(app)(*given))
    assert seen == [given]
