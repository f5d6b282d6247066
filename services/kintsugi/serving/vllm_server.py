"""Learning in vLLM's own server: `--middleware kintsugi.serving.vllm_server.LearningMiddleware`.

A connector sees the requests of vLLM's scheduler and cannot add any. A middleware runs in the server's
process, and submits twins to the engine's client as a handler of the server submits requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.request import KintsugiParams, check_foreign
from kintsugi.engine.asynchronous import AsyncEngine, AsyncSpec, EngineParts
from kintsugi.engine.plugin import CONNECTOR
from kintsugi.engine.watching import params_of
from kintsugi.serving.learning import make_learning
from kintsugi.store.client.registry import open_store

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class LearningMiddleware:
    """An ASGI middleware that learns while the server runs, and passes everything on unchanged. A server that
    cannot learn does not start, and says why."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(learn_on(scope["app"].state.engine_client))
            except KintsugiError as error:
                # An exception would only make uvicorn serve without this middleware.
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await self._app(scope, receive, send)


class _Unwatched:
    """The engine's client without the watcher."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.generate = client.generate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@asynccontextmanager
async def learn_on(client: Any) -> AsyncIterator[None]:
    """Measure the answers of vLLM's ``client``, an `AsyncLLM`, until the block ends.

    Raises `InvalidField` if the engine has no Kintsugi connector that accepts twins or does not schedule by
    priority, and the store's errors.
    """
    from prometheus_client import REGISTRY

    spec = _specify(client.vllm_config)
    plain = _Unwatched(client)
    parts = await asyncio.to_thread(_open_parts, spec, plain)
    learning = None
    try:
        engine = AsyncEngine(spec, parts)
        learning = make_learning(engine, REGISTRY)
        if learning is None:
            log.warning("nothing is learned: the report is a file, or the setting `quality` is off")
        else:
            client.generate = partial(_generate, engine.watched, plain)
        yield
    finally:
        client.generate = plain.generate
        if learning is not None:
            await learning.close()
        parts.gate.close()
        parts.store.close()


async def _generate(
    watched: Any, plain: Any, prompt: Any, sampling: Any, request_id: str, **more: Any
) -> AsyncIterator[Any]:
    """Generate for a caller of the server. Raises `ValueError`, which vLLM answers with 400, for a request
    that only the engine itself may send: the connector accepts it from everybody."""
    client, given = watched, params_of(sampling)
    if given is not None:
        try:
            params = KintsugiParams.from_mapping(given)
        except KintsugiError:
            client = plain  # the connector declines it, and the answer says why
        else:
            _refuse_foreign(params)
    async with aclosing(client.generate(prompt, sampling, request_id, **more)) as outputs:
        async for output in outputs:
            yield output


def _refuse_foreign(params: KintsugiParams) -> None:
    try:
        check_foreign(params)
    except InvalidField as error:
        raise ValueError(str(error)) from error


def _specify(vllm_config: Any) -> AsyncSpec:
    """Describe the engine that vLLM's server has started."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        raise InvalidField(
            "kv-transfer-config",
            f"{LearningMiddleware.__name__} needs the connector {CONNECTOR}: add it, or omit --middleware",
        )
    if vllm_config.scheduler_config.policy != "priority":
        raise InvalidField(
            "scheduling-policy",
            "measurements must yield to all requests: add --scheduling-policy priority",
        )
    if not transfer.kv_connector_extra_config.get("audits"):
        raise InvalidField(
            "kv_connector_extra_config",
            'without "audits": true the connector runs no twins; the middleware refuses those of clients',
        )
    extra = dict(transfer.kv_connector_extra_config)
    store, model = str(extra.pop("store", "")), vllm_config.model_config
    names = model.served_model_name or model.model
    return AsyncSpec(model.model, names if isinstance(names, str) else names[0], store, extra_config=extra)


def _open_parts(spec: AsyncSpec, client: Any) -> EngineParts:
    """Open the store, and read the report. Blocks."""
    from kintsugi.engine.scheduler.gate import binding_of, open_gate
    from kintsugi.engine.worker.support import find_unsupported

    config = spec.config
    binding = binding_of(client.vllm_config, config)
    store = open_store(config.store)
    try:
        gate = open_gate(config, store, binding)
    except BaseException:
        store.close()
        raise
    return EngineParts(client, store, gate, find_unsupported(client.vllm_config))
