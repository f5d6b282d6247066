"""What a gateway tells its operator about the service: engines, shards, and what became of answers.

`GET /v1/kintsugi/service`, which `kintsugi status` and `kintsugi doctor --url` read. What concerns every
tenant is for whom the metrics are for.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kintsugi import __version__
from kintsugi.core.errors import KintsugiError
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.protocol.callers import Caller

SERVICE_PATH = "/v1/kintsugi/service"


async def describe_service(gateway: Gateway, caller: Caller) -> dict[str, Any]:
    """JSON form. What concerns everybody is None for a caller who may not see it: ``store``, ``answers``,
    and of discovery ``tokens_discovered`` and ``discovering``, the namespaces in which it is on."""
    sees_all = gateway.access.sees_all(caller)
    engines, store = await asyncio.gather(
        _describe_engines(gateway), _describe_store(gateway) if sees_all else _withhold()
    )
    return {
        "version": __version__,
        "time_s": time.time(),
        "read_only": gateway.read_only,
        "has_tokens": gateway.access.has_tokens,
        "caller": describe_caller(caller),
        "engines": engines,
        "store": store,
        "answers": gateway.answers.tally.to_list() if sees_all else None,
        "tokens_discovered": gateway.answers.tally.tokens_discovered if sees_all else None,
        "discovering": gateway.rules().discovering if sees_all else None,
    }


def describe_caller(caller: Caller) -> dict[str, Any]:
    return {"name": caller.name, "namespaces": list(caller.namespaces), "verbs": sorted(caller.verbs)}


async def _withhold() -> None:
    return None


async def _describe_engines(gateway: Gateway) -> dict[str, Any]:
    """Any one engine: they are alike."""
    try:
        info = await gateway.recent_info.get()
    except KintsugiError as error:
        return {"error": str(error)}
    return {
        "error": None,
        "model": info.model,
        "fingerprint": info.fingerprint,
        "max_model_len": info.max_model_len,
        "form": info.form,
        "blending": info.blending,
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
