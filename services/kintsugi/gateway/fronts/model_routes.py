"""The list of models over HTTP: each once, with every name that it answers to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kintsugi.core.exchange import EngineInfo
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.protocol.callers import Caller

MODELS_PATH = "/v1/models"


def model_routes(gateway: Gateway, identify: Callable[[Request], Caller]) -> list[Route]:
    """``identify`` raises `Unauthenticated`."""

    async def list_models(request: Request) -> Response:
        models = await gateway.list_models(identify(request))
        return JSONResponse({"object": "list", "data": [describe_model(info) for info in models]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        info = await gateway.find_model(identify(request), name)
        return JSONResponse({**describe_model(info), "id": name})

    return [
        Route(MODELS_PATH, list_models, methods=["GET"]),
        Route(f"{MODELS_PATH}/{{name:path}}", get_model, methods=["GET"]),
    ]


def describe_model(info: EngineInfo) -> dict[str, Any]:
    """One entry of the list. `root`, as vLLM has it, is the checkpoint that `id` stands for."""
    return {
        "id": info.model,
        "object": "model",
        "created": 0,
        "owned_by": "kintsugi",
        "root": info.names[-1],
        "parent": None,
        "aliases": list(info.aliases),
        "max_model_len": info.max_model_len,
        "kintsugi": {
            "fingerprint": info.fingerprint,
            "prefix_token_ids": list(info.prefix_token_ids),
            "portable": info.portable,
            "form": info.form,
            "context_token_ids": list(info.context_token_ids),
            "blending": info.blending,
        },
    }
