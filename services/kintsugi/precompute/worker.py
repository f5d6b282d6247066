"""Interface of prefillers, the implementation on vLLM, and the worker that starts one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.layout import KVLayout
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.precompute.ledger_chunks import PendingChunk, unpack_tokens
from kintsugi.store.client.registry import open_store


class NotStarted(Unavailable):
    """The engine did not start, and most likely will not start at the next attempt."""


FILLED, PRESENT = "filled", "present"
"""Outcomes of a stored chunk. Any other outcome is the reason why the chunk is not in the store."""

PRIORITY = 1_000
"""Priority of save requests: vLLM serves lower numbers first, and users' requests have 0."""

_PROBES = ("The tide comes in.", "  two  spaces\n\nand lines\t", "naïve 漢字 🎉", "x" * 40)


@dataclass(frozen=True)
class WorkerSpec:
    """The configuration of a worker. Ray pickles it."""

    model: str
    store: str
    space: ChunkSpace
    layout: KVLayout
    dtype: str
    codec: str = "raw"
    engine: dict[str, Any] = field(default_factory=dict)


def find_copy(space: ChunkSpace, chunk: PendingChunk) -> ChunkSpace:
    """Return the space that the chunk's key belongs to: the plain copies' space, or ``space`` itself."""
    return space.plain if chunk.key == ChunkKey.of(space.plain, chunk.token_ids) else space


class Prefiller(ABC):
    """Prefills chunks in isolation and puts them into the store."""

    @abstractmethod
    def fill(self, chunks: Sequence[PendingChunk]) -> list[str]:
        """Return `FILLED` for each chunk, or the reason why it is not in the store."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine and the store. Idempotent."""


PrefillerFactory = Callable[[WorkerSpec], Prefiller]


class EnginePrefiller(Prefiller):
    """vLLM with our connector, in this process. Only the engine's save pass writes chunk KV."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Start the engine, which takes 10 to 30 s. Raises `Unavailable`, and `InvalidField` if its tokenizer
        disagrees with the one that made the chunks."""
        from kintsugi.engine.local import LocalEngine

        self._spec = spec
        self._engine = LocalEngine.start(
            spec.model,
            extra_config={
                "store": spec.store,
                "prefix_token_ids": list(spec.space.prefix_token_ids),
                "portable": spec.space.portable,
                "context_token_ids": list(spec.space.context_token_ids),
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
                    f"vLLM's tokenizer and tokenizer.json disagree on {text!r}, so no request would find "
                    "these chunks; save the tokenizer again with transformers",
                )

    def fill(self, chunks: Sequence[PendingChunk]) -> list[str]:
        from kintsugi.engine.local import save_prompt

        space = self._spec.space
        prompts = []
        for chunk in chunks:
            context = [unpack_tokens(passage) for passage in chunk.context]
            lead = space.prefix_token_ids if context else find_copy(space, chunk).lead_token_ids
            prompts.append(save_prompt(lead, chunk.token_ids, space.namespace, chunk.key, PRIORITY, context))
        answers = [generation.accounting or {} for generation in self._engine.generate(prompts)]
        return [
            FILLED
            if answer.get("outcome") == "saved"
            else str(answer.get("reason") or "the engine runs without our connector")
            for answer in answers
        ]

    def close(self) -> None:
        self._engine.close()


class Worker:
    """One worker actor. It starts its engine at the first chunk that the store lacks."""

    def __init__(self, spec: WorkerSpec, factory: PrefillerFactory) -> None:
        self._spec = spec
        self._factory = factory
        self._prefiller: Prefiller | None = None
        self._start_s = 0.0
        self._store = open_store(spec.store)

    def fill(self, chunks: Sequence[PendingChunk]) -> tuple[list[str], float]:
        """Prefill chunks. Return each chunk's outcome and the seconds that the engine took to start.

        The chunks are looked up first: another job, or a worker that was assumed dead, may have stored some
        chunks meanwhile.
        """
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


def durable_url(store_url: str, is_durable: bool) -> str:
    """Return the URL, with durable acknowledgement if the store is durable: a put then returns when the chunk
    is on disk, so chunks that are counted as prefilled survive a killed shard."""
    if not is_durable or "ack=" in urlsplit(store_url).query:
        return store_url
    return f"{store_url}{'&' if urlsplit(store_url).query else '?'}ack=durable"
