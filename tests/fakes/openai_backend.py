"""An `EngineBackend` whose OpenAI answers are scripted: what the HTTP front end is tested over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kintsugi.core.exchange import (
    EngineBackend,
    EngineDelta,
    EngineInfo,
    EngineRequest,
    OpenAICall,
    OpenAIHead,
    PromptMatch,
    SaveOutcome,
)
from kintsugi.core.spaces import TokenIds
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.client.ram import RamStore

INFO = EngineInfo("scripted", "ab" * 32, (0,), True, 4096, "on", aliases=("org/scripted", "/models/scripted"))
JSON = OpenAIHead(200, "application/json")
STREAM = OpenAIHead(200, "text/event-stream")

Item = OpenAIHead | bytes | Exception | float
"""A number waits so many seconds."""


def answered(text: str, accounting: dict[str, object] | None = None) -> list[Item]:
    document = {"choices": [{"text": text}], "kv_transfer_params": {"kintsugi": accounting}}
    return [JSON, json.dumps(document).encode()]


@dataclass
class ScriptedBackend(EngineBackend):
    """Plays `script(call)`, and notes what it was asked and whether it was left to finish."""

    script: Callable[[OpenAICall], Sequence[Item]] = lambda call: answered("fine")
    calls: list[OpenAICall] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    info_error: Exception | None = None

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        raise NotImplementedError

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        raise NotImplementedError

    async def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        self.calls.append(call)
        try:
            for item in self.script(call):
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                    continue
                yield item
            self.finished.append(call.request_id)
        finally:
            self.closed.append(call.request_id)

    async def find_chunks(self, call: OpenAICall) -> PromptMatch:
        raise NotImplementedError

    async def info(self, namespace: str = "") -> EngineInfo:
        if self.info_error is not None:
            raise self.info_error
        return INFO

    async def close(self) -> None:
        return None


def gateway_over(backend: EngineBackend, **more: Any) -> Gateway:
    """A gateway with an empty store and a tokenizer of characters."""
    return Gateway(backend, RamStore(), lambda text: [ord(letter) for letter in text], **more)
