"""The list of models over HTTP."""

from __future__ import annotations

from urllib.parse import unquote

from tests.fakes.openai_backend import ScriptedBackend
from tests.unit.gateway.fronts.test_http import client, error_of, run


def test_a_model_is_listed_once_and_found_under_every_name() -> None:
    async def body() -> None:
        async with client(ScriptedBackend()) as caller:
            (model,) = (await caller.get("/v1/models")).json()["data"]
            assert (model["id"], model["aliases"]) == ("scripted", ["org/scripted", "/models/scripted"])
            assert model["root"] == "/models/scripted", "clients load the tokenizer from there"
            for name in ("scripted", "org/scripted", "%2Fmodels%2Fscripted"):
                found = await caller.get(f"/v1/models/{name}")
                assert found.status_code == 200
                assert found.json() == {**model, "id": unquote(name)}
            unknown = await caller.get("/v1/models/org/other")
            assert unknown.status_code == 404
            assert "org/scripted" in error_of(unknown)["message"]

    run(body)
