"""Chunks of precomputed corpora into what a gateway knows: found by key, and inside messages by their text.

A ledger holds tokens, not text. The tokenizer's own decoding is believed where it tokenises back to the same
ids; elsewhere the chunk is found by key alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kintsugi.core.errors import KintsugiError
from kintsugi.core.exchange import EngineInfo
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.segments import Tokenize
from kintsugi.precompute.documents import DocumentIndex, IndexedChunk

log = logging.getLogger(__name__)

PAGE = 64
"""Chunks per step; between steps the threads are others'."""
PERIOD_S = 30.0
"""Between two looks for chunks that a job has added since."""

Detokenize = Callable[[Sequence[int]], str]


class Learner:
    """Walks through an index once, then after what is new, on an event loop."""

    def __init__(
        self,
        documents: DocumentIndex,
        known: KnownChunks,
        tokenize: Tokenize,
        detokenize: Detokenize,
        info: Callable[[], Awaitable[EngineInfo]],
    ) -> None:
        self._documents = documents
        self._known = known
        self._tokenize = tokenize
        self._detokenize = detokenize
        self._info = info
        self._fingerprint = ""
        self._after = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kintsugi-learn")

    async def _run(self) -> None:
        while True:
            try:
                while await self.step():
                    pass
            except KintsugiError as error:
                log.info("corpora are looked at again in %.0f s: %s", PERIOD_S, error)
            except Exception:
                log.exception("corpora cannot be read; they are looked at again in %.0f s", PERIOD_S)
            await asyncio.sleep(PERIOD_S)

    async def step(self) -> int:
        """Learn a page; how many chunks it had. Raises `Unavailable` where no engine says what it serves."""
        info = await self._info()
        if info.fingerprint != self._fingerprint:
            self._fingerprint, self._after = info.fingerprint, 0
        return await asyncio.to_thread(self._learn_page)

    def _learn_page(self) -> int:
        if self._known.room <= 0:  # what clients use now is worth more than what a corpus holds besides
            return 0
        page = self._documents.chunks(self._fingerprint, self._after, min(PAGE, self._known.room))
        for chunk in page:
            known = self._known.knows(chunk.namespace, chunk.key)
            if not known and self._known.has_room(chunk.namespace):
                self._learn(chunk)
            self._after = chunk.number
        return len(page)

    def _learn(self, chunk: IndexedChunk) -> None:
        text = self._detokenize(chunk.token_ids)
        faithful = tuple(self._tokenize(text)) == chunk.token_ids
        self._known.remember(chunk.namespace, chunk.key, chunk.token_ids, text if faithful else None)

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
