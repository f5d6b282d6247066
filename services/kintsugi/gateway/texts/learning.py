"""Teaches a gateway the chunks of precomputed corpora: they are found by key, and by text inside messages.

A ledger holds tokens, not text. The tokenizer's own decoding is used if it tokenises back to the same ids;
otherwise the chunk is found by key alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kintsugi.core.exchange import EngineInfo
from kintsugi.gateway.repeating import Repeating
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.segments import Tokenize
from kintsugi.precompute.documents import DocumentIndex, IndexedChunk

PAGE = 64
"""Chunks per step; between steps the thread is free for others."""
PERIOD_S = 30.0
"""Wait between two searches for chunks that a job has added."""

Detokenize = Callable[[Sequence[int]], str]


class Learner(Repeating):
    """Reads an index once, then what is added to it, on an event loop."""

    def __init__(
        self,
        documents: DocumentIndex,
        known: KnownChunks,
        tokenize: Tokenize,
        detokenize: Detokenize,
        info: Callable[[], Awaitable[EngineInfo]],
    ) -> None:
        super().__init__("kintsugi-learn", self.step, PERIOD_S)
        self._documents = documents
        self._known = known
        self._tokenize = tokenize
        self._detokenize = detokenize
        self._info = info
        self._fingerprint = ""
        self._after = 0
        self.pause = asyncio.Lock()
        """Held while a page is learnt: whoever erases from the index holds it meanwhile."""

    async def step(self) -> int:
        """Learn a page; return its number of chunks. Raises `Unavailable` if no engine names its model."""
        info = await self._info()
        if info.fingerprint != self._fingerprint:
            self._fingerprint, self._after = info.fingerprint, 0
        async with self.pause:
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
