"""Adds the chunks of precomputed corpora to a gateway's known chunks.

A ledger holds tokens but no texts. A chunk's decoded text is used if it tokenises to the same ids; otherwise
the chunk is found only by key.
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
"""Maximum number of chunks in one step; the thread is free between steps."""
PERIOD_S = 30.0
"""Time between two searches for new chunks."""

Detokenize = Callable[[Sequence[int]], str]


class Learner(Repeating):
    """Reads a document index, and the chunks that are added to it. For one event loop."""

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
        """Held while a page is learnt, and while chunks are erased from the index."""

    async def step(self) -> int:
        """Learn a page and return its number of chunks. Raises `Unavailable` if no engine reports its
        model."""
        info = await self._info()
        if info.fingerprint != self._fingerprint:
            self._fingerprint, self._after = info.fingerprint, 0
        async with self.pause:
            return await asyncio.to_thread(self._learn_page)

    def _learn_page(self) -> int:
        if self._known.room <= 0:  # the chunks that clients use now must not be evicted
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
