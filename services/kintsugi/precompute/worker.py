"""Who prefills: the interface, vLLM behind it, and the worker that starts it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.layout import KVLayout
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.precompute.ledger import PendingChunk
from kintsugi.store.client.registry import open_store


class NotStarted(Unavailable):
    """The engine did not start: so it will most likely be the next time."""


FILLED, PRESENT = "filled", "present"
"""What became of a chunk. Anything else is the reason why it is not in the store."""

PRIORITY = 1_000
"""Of save requests: vLLM serves lower numbers first, and requests of people have 0."""

_PROBES = ("The tide comes in.", "  two  spaces\n\nand lines\t", "naïve 漢字 🎉", "x" * 40)


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs. Travels to it as Ray sends arguments."""

    model: str
    store: str
    space: ChunkSpace
    layout: KVLayout
    dtype: str
    codec: str = "raw"
    engine: dict[str, Any] = field(default_factory=dict)


class Prefiller(ABC):
    """Prefills chunks in isolation and puts them into the store."""

    @abstractmethod
    def fill(self, chunks: Sequence[PendingChunk]) -> list[str]:
        """`FILLED` for each, or the reason why it is not in the store."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


PrefillerFactory = Callable[[WorkerSpec], Prefiller]


class EnginePrefiller(Prefiller):
    """vLLM with the connector, in this process: its batched save pass is the only source of chunk KV."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Starts the engine, 10-30 s. Raises `Unavailable`; `InvalidField` where its tokenizer cuts text
        into other tokens than the chunks have."""
        from kintsugi.engine.local import LocalEngine

        self._spec = spec
        self._engine = LocalEngine.start(
            spec.model,
            extra_config={
                "store": spec.store,
                "prefix_token_ids": list(spec.space.prefix_token_ids),
                "portable": spec.space.portable,
                "codec": spec.codec,
                "save_only": True,
            },
            **{"dtype": spec.dtype, "scheduling_policy": "priority", **spec.engine},
        )
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        from kintsugi.precompute.chunking import Chunker

        chunker = Chunker.of_model(self._spec.model)
        for text in _PROBES:
            served = tuple(self._engine.tokenizer(text, add_special_tokens=False).input_ids)
            if served != chunker.token_ids(text):
                self.close()
                raise InvalidField(
                    "model",
                    f"vLLM's tokenizer and tokenizer.json disagree on {text!r}: no request would find these "
                    "chunks; save the tokenizer again with transformers",
                )

    def fill(self, chunks: Sequence[PendingChunk]) -> list[str]:
        from kintsugi.engine.local import save_prompt

        space = self._spec.space
        prompts = [
            save_prompt(space.prefix_token_ids, chunk.token_ids, space.namespace, chunk.key, PRIORITY)
            for chunk in chunks
        ]
        answers = [generation.accounting or {} for generation in self._engine.generate(prompts)]
        return [
            FILLED
            if answer.get("outcome") == "saved"
            else str(answer.get("reason") or "the connector is not there")
            for answer in answers
        ]

    def close(self) -> None:
        self._engine.close()


class Worker:
    """One actor. The engine starts with the first chunk that the store really lacks."""

    def __init__(self, spec: WorkerSpec, factory: PrefillerFactory) -> None:
        self._spec = spec
        self._factory = factory
        self._prefiller: Prefiller | None = None
        self._start_s = 0.0
        self._store = open_store(spec.store)

    def fill(self, batch: Sequence[tuple[bytes, bytes, int]]) -> tuple[list[str], float]:
        """What became of each (key, packed tokens, their number), and how long the engine took to start.

        Another job, or a worker that was thought dead, may have stored some meanwhile: one lookup a batch.
        """
        chunks = [PendingChunk(ChunkKey(key), tokens, size) for key, tokens, size in batch]
        tiers = self._store.tiers(self._spec.space.namespace, [chunk.key for chunk in chunks])
        missing = [chunk for chunk, tier in zip(chunks, tiers, strict=True) if tier is None]
        if missing and self._prefiller is None:
            self._start()
        filled = iter(self._prefiller.fill(missing) if self._prefiller and missing else ())
        return [PRESENT if tier is not None else next(filled) for tier in tiers], self._start_s

    def _start(self) -> None:
        started_s = time.monotonic()
        try:
            self._prefiller = self._factory(self._spec)
        except Unavailable as error:
            raise NotStarted(str(error)) from error
        self._start_s = time.monotonic() - started_s

    def process_id(self) -> int:
        return os.getpid()


def durable(store_url: str, outlives: bool) -> str:
    """The URL with which puts are on disk when they return, where the store has one: what was counted as
    prefilled then outlives a shard that is killed."""
    if not outlives or "ack=" in urlsplit(store_url).query:
        return store_url
    return f"{store_url}{'&' if urlsplit(store_url).query else '?'}ack=durable"
