"""HTTP routes that need no answer of an engine.

Clients list models. Routers find the shards that hold a prompt's chunks. `kintsugi status` reads the state of
the service; its cross-tenant fields need the metrics permission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kintsugi import __version__
from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.exchange import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    RESPONSES_PATH,
    EngineInfo,
    LostPart,
    OpenAICall,
)
from kintsugi.core.schema import check_items, check_text
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.chunks import Recent
from kintsugi.gateway.fronts.openai_request import parse_openai_call
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.residency import ChunkResidence
from kintsugi.gateway.texts.segments import Segment
from kintsugi.store.protocol.access import Caller

PROMPT_PATHS = {"messages": CHAT_PATH, "input": RESPONSES_PATH, "prompt": COMPLETIONS_PATH}
"""Fields of a residency request that hold a prompt, and the path that answers such a prompt."""
NAMED_BY = (*PROMPT_PATHS, "chunks", "keys")
"""Fields of a residency request that name its chunks; exactly one must be set."""
MODELS_PATH = "/v1/models"
SERVICE_PATH = "/v1/kintsugi/service"
LOST_SHOWN = 8


def describe_residency(namespace: str, info: EngineInfo, found: Sequence[ChunkResidence]) -> dict[str, Any]:
    """Return the answer of `RESIDENCY_PATH`. `shards` has the number of resident tokens of each shard."""
    shards: dict[str, int] = {}
    for one in found:
        if one.source is not None:
            shards[one.source.shard] = shards.get(one.source.shard, 0) + one.num_tokens
    return {
        "object": "kintsugi.residency",
        "namespace": namespace,
        "model": info.model,
        "fingerprint": info.fingerprint,
        "exact": False,
        "chunks": list(map(_describe_residence, found)),
        "chunk_tokens": sum(one.num_tokens for one in found),
        "resident_tokens": sum(shards.values()),
        "shards": [
            {"address": address, "host": _host_of(address), "resident_tokens": tokens}
            for address, tokens in sorted(shards.items())
        ],
    }


def _describe_residence(one: ChunkResidence) -> dict[str, Any]:
    place = {"key": one.key.hex, "num_tokens": one.num_tokens, "resident": one.source is not None}
    if one.source is None:
        return place
    return {**place, "namespace": one.namespace, "shard": one.source.shard, "tier": one.source.tier}


def _host_of(address: str) -> str:
    """Return the host of `host:port`; an address of another form, such as a socket's, is returned
    unchanged."""
    return address.rpartition(":")[0].strip("[]") or address


def parse_residency(
    gateway: Gateway, namespace: str, body: Mapping[str, Any]
) -> tuple[list[Segment], list[ChunkKey], OpenAICall | None]:
    """Return the segments and keys that a residency request names. Raises `InvalidField`.

    The segments of a prompt are its marked chunks and the texts that are known here. For a prompt without
    any, the third result is the call with which an engine looks for stored chunks at every offset.
    """
    named = [name for name in NAMED_BY if body.get(name) is not None]
    if len(named) != 1:
        raise InvalidField(
            "body", f"must have one of {', '.join(NAMED_BY)}, but has {', '.join(named) or 'none'}"
        )
    (name,) = named
    value = body[name]
    if name in PROMPT_PATHS:
        call = parse_openai_call(
            "",
            PROMPT_PATHS[name],
            body,
            namespace,
            lambda text: gateway.find_known_texts(namespace, text),
        )
        return [Segment(text=text) for text in call.chunk_texts], [], None if call.chunk_texts else call
    texts = [check_text(one, f"{name}[{index}]") for index, one in enumerate(check_items(value, name))]
    if name == "chunks":
        return [Segment(text=text) for text in texts], [], None
    return [], [ChunkKey.from_hex(text, f"keys[{index}]") for index, text in enumerate(texts)], None


def model_routes(gateway: Gateway, identify: Callable[[Request], Caller]) -> list[Route]:
    """``identify`` raises `Unauthenticated`."""

    async def list_models(request: Request) -> Response:
        identify(request)
        model = describe_model(await gateway.recent_info.get())
        return JSONResponse({"object": "list", "data": [model]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        identify(request)
        info = await gateway.recent_info.get()
        info.check_name(name)
        return JSONResponse({**describe_model(info), "id": name})

    return [
        Route(MODELS_PATH, list_models, methods=["GET"]),
        Route(f"{MODELS_PATH}/{{name:path}}", get_model, methods=["GET"]),
    ]


def describe_model(info: EngineInfo) -> dict[str, Any]:
    """Return an entry of the list. `root` is the checkpoint of the model `id`, as in vLLM's list."""
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


async def describe_service(gateway: Gateway, caller: Caller) -> dict[str, Any]:
    """Describe the service as JSON. The cross-tenant fields ``store``, ``answers``, ``tokens_discovered``,
    ``discovering`` (the namespaces with discovery) and ``lost`` (processes that ended unexpectedly, the last
    `LOST_SHOWN`) are None for a caller who may not see them."""
    sees_all = gateway.access.sees_all(caller)
    describe_store = _describe_store(gateway) if sees_all else asyncio.sleep(0, None)
    # Evidence counts by namespace: a caller with namespaces of its own sees the first one's.
    own = next((name for name in caller.namespaces if not sees_all and not name.endswith("*")), "")
    engines, store = await asyncio.gather(_describe_engines(gateway, own), describe_store)
    return {
        "version": __version__,
        "has_tokens": gateway.access.has_tokens,
        "caller": describe_caller(caller),
        "engines": engines,
        "store": store,
        "answers": gateway.answers.tally.to_list() if sees_all else None,
        "tokens_discovered": gateway.answers.tally.tokens_discovered if sees_all else None,
        "discovering": gateway.rules().discovering if sees_all else None,
        "lost": list(map(_describe_loss, gateway.backend.lost_parts()[-LOST_SHOWN:])) if sees_all else None,
    }


def _describe_loss(lost: LostPart) -> dict[str, Any]:
    return {**asdict(lost), "text": str(lost)}


def describe_caller(caller: Caller) -> dict[str, Any]:
    return {"name": caller.name, "namespaces": list(caller.namespaces), "verbs": sorted(caller.verbs)}


async def _describe_engines(gateway: Gateway, namespace: str) -> dict[str, Any]:
    """Describe one engine; all serve the same model. ``namespace``: whose evidence is shown; empty: that
    with the most progress."""
    recent = gateway.recent_info
    if namespace:
        recent = Recent(lambda: gateway.backend.info(namespace), "no engine answered")
    try:
        info = await recent.get()
    except KintsugiError as error:
        return {"error": str(error)}
    return {
        "error": None,
        "model": info.model,
        "fingerprint": info.fingerprint,
        "max_model_len": info.max_model_len,
        "form": info.form,
        "blending": info.blending,
        "namespace": namespace,
        "progress": asdict(info.progress),
        "learning": dict(info.learning),
        "version": info.version,
        "vllm": info.vllm,
    }


async def _describe_store(gateway: Gateway) -> dict[str, Any]:
    try:
        stats = await gateway.recent_stats.get()
    except KintsugiError as error:
        return {"error": str(error)}
    return {
        "error": None,
        # A store without a map is one shard.
        "shards": sum(shard.answers for shard in stats.shards) if stats.shards else 1,
        "shards_away": [shard.address for shard in stats.shards if not shard.answers],
        "chunks": stats.chunks,
        "bytes_used": stats.bytes_used,
        "bytes_capacity": stats.bytes_capacity,
        "durable": stats.durable,
    }
