"""The engines as a gateway sees them.

Implementations: an engine in this process (`engine.asynchronous`) and the engines behind Ray Serve's handle
(`serving.ray_backend`). Both pass the contract tests that the tests' stub passes, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence

from kintsugi.core.exchange import (
    EngineDelta,
    EngineInfo,
    EngineRequest,
    OpenAICall,
    OpenAIHead,
    PromptMatch,
    SaveOutcome,
)
from kintsugi.core.tokens import TokenIds


class EngineBackend(ABC):
    """Answers prompts and stores chunks. For one event loop.

    Errors, raised by a call or by the first item of its answer: `InvalidField` for what a caller can mend,
    `Unavailable` where no engine answers (a request that has not yielded anything yet may be sent again),
    `ResourceExhausted` where queues are full.
    """

    @abstractmethod
    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """The answer, piece by piece. Closing the generator ends the work in the engine. A request for
        another model is `Unavailable` before anything is computed."""

    @abstractmethod
    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        tier: str = "auto",
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        """Prefill chunks in isolation and store them; returns once each is committed or has failed.

        With a context a chunk is saved once all its copies are, and the reason of a failure is the first
        copy's that failed.

        ``tier`` is where the store keeps them: `ram`, the name of one of its SSD tiers, or `auto`: as the
        engine's configuration of the store says. A tier that the store lacks fails the chunk. ``ttl_s``: how
        long the store keeps them at most, in seconds; None: as its configuration says. ``asked_at_s``: as in
        `ChunkManifest`.
        """

    @abstractmethod
    def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        """vLLM's own handling of an OpenAI request. Closing the generator ends the work in the engine."""

    @abstractmethod
    async def find_chunks(self, call: OpenAICall) -> PromptMatch:
        """The stored chunks that `openai` would find by their content in the call's prompts, however they got
        into the store; nothing is computed. For calls without chunk texts, which are found by those alone.
        Raises `NotFound` for another model's name."""

    @abstractmethod
    async def info(self) -> EngineInfo:
        """Describe any one engine: they are alike."""

    @abstractmethod
    async def close(self) -> None:
        """Idempotent. A closed backend answers every call with `Unavailable`."""
