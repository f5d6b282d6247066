from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kintsugi.core.exchange import EngineInfo
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.learning import Learner
from kintsugi.precompute.documents import (
    DocumentIndex,
    DocumentRef,
    IndexedChunk,
    KnownChunk,
    NameKey,
    no_name_key,
)
from tests.fakes.openai_backend import INFO


class Corpora(DocumentIndex):
    """So many chunks of each namespace, one namespace after the other; stands in for a precompute ledger."""

    def __init__(self, **counts: int) -> None:
        names = [name for name, count in counts.items() for _ in range(count)]
        self.all = [
            IndexedChunk(number, name, ChunkKey(number.to_bytes(32, "little")), (number,))
            for number, name in enumerate(names, 1)
        ]

    def resolve(
        self, corpus: str, refs: Sequence[DocumentRef], name_key: NameKey = no_name_key
    ) -> list[KnownChunk | None]:
        raise NotImplementedError

    def chunks(self, fingerprint: str, after: int, limit: int) -> list[IndexedChunk]:
        return [chunk for chunk in self.all if chunk.number > after][:limit]

    def close(self) -> None:
        return None


def test_a_corpus_takes_nothing_from_its_namespaces_clients_and_keeps_no_other_from_learning() -> None:
    async def learn() -> None:
        known = KnownChunks(chunks_max=200)
        used = ChunkKey(b"u" * 32)
        known.remember("large", used, (1,))

        async def info() -> EngineInfo:
            return INFO

        corpora = Corpora(large=150, small=20)
        learner = Learner(corpora, known, lambda text: (int(text),), lambda ids: str(ids[0]), info)
        while await learner.step():
            pass
        learnt = [known.knows(chunk.namespace, chunk.key) for chunk in corpora.all]
        assert (sum(learnt[:150]), sum(learnt[150:])) == (99, 20)
        assert known.knows("large", used)

    asyncio.run(learn())
