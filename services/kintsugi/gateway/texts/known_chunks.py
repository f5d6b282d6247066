"""The chunks that a gateway has seen: their tokens by key, and an index of their texts.

The store knows chunks by key and holds neither text nor tokens. But a request may name a chunk by its key
alone, and an unmodified RAG framework pastes chunk texts into a message.

This is a cache of the chunks that clients sent: a missing entry costs a hit, never an answer. It is bounded
in total and for each namespace, and evicts a namespace's least recently used chunks first
(`gateway.texts.chunk_table`). An index in memory finds texts (`gateway.texts.known_texts`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path

from kintsugi.core.errors import KintsugiError
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.texts.chunk_table import NAMESPACE_SHARE_MAX, Address, ChunkTable, Record
from kintsugi.gateway.texts.known_texts import WINDOW_CHARS, ChunkText, TextIndex, disjoint, window_hashes

log = logging.getLogger(__name__)

CHUNKS_MAX = 200_000
"""Maximum number of chunks. Their index needs up to 200 MB of memory, and their table 2 KiB for each chunk of
512 tokens: on disk, or in memory without a folder."""
TOKENS_MAX = 128 << 20
"""Maximum number of tokens of all chunks together, 512 MiB."""
RECENT_MAX = 10_000
"""Number of chunks whose time of the last `remember` is kept. Erasures are followed within seconds."""
TOUCHED_MAX = 10_000
"""Maximum number of uses that wait for the next write; further ones replace the oldest."""


class KnownChunks:
    """The known chunks of one gateway. Thread-safe.

    Lookups take microseconds and do not wait for writes to a folder. `remember`, `erase` and `close` write to
    it, so an event loop calls them in a thread.
    """

    def __init__(
        self, folder: Path | None = None, chunks_max: int = CHUNKS_MAX, tokens_max: int = TOKENS_MAX
    ) -> None:
        """Open or create the table in `folder`. Raises as `ChunkTable`."""
        self._chunks_max = chunks_max
        self._tokens_max = tokens_max
        self._writing = threading.Lock()
        """Held during a write and the following update of the index."""
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._indexes: dict[str, TextIndex] = {}
        """Indexes of the namespaces with texts."""
        self._text_users: Counter[tuple[str, ChunkText]] = Counter()
        """Number of chunks with a text: a text has another key for each model."""
        self._touched: OrderedDict[Address, None] = OrderedDict()
        """Chunks used since the last write, the oldest use first."""
        self._recent: OrderedDict[Address, float] = OrderedDict()
        """Time of each chunk's last `remember`, the latest last: an erasure spares chunks remembered after
        it."""
        self._table = ChunkTable(folder, chunks_max, tokens_max)
        for namespace, text in self._table.texts():
            self._add_text(namespace, text)

    def __len__(self) -> int:
        return self._table.num_chunks

    @property
    def room(self) -> int:
        """Number of chunks that fit without an eviction; 0 as soon as half of the tokens are in use."""
        is_half_full = 2 * self._table.num_tokens >= self._tokens_max
        return 0 if is_half_full else self._chunks_max - self._table.num_chunks

    def num_chunks(self, namespace: str) -> int:
        """Return the number of a namespace's chunks."""
        return self._table.share(namespace)[0]

    def has_room(self, namespace: str) -> bool:
        """Return whether another chunk of the namespace fits without an eviction; false as soon as the
        namespace uses half of its share of tokens."""
        chunks, tokens = self._table.share(namespace)
        few_tokens = 2 * tokens < NAMESPACE_SHARE_MAX * self._tokens_max
        return few_tokens and chunks + 1 <= NAMESPACE_SHARE_MAX * self._chunks_max

    def remember(
        self, namespace: str, key: ChunkKey, token_ids: Sequence[int], text: str | None = None
    ) -> None:
        """Remember a chunk, and the text that tokenises to it if there is one. A later text replaces it."""
        address, known = (namespace, key), None if text is None else ChunkText.of(text)
        with self._lock:
            self._recent[address] = time.time()
            self._recent.move_to_end(address)
            if len(self._recent) > RECENT_MAX:
                self._recent.popitem(last=False)
        before = self._get(address)
        if before is not None and known in (None, before.text):
            self._touch(address)
        else:
            self._write([(address, Record(TokenIds.of(token_ids).data, known))])

    def token_ids(self, namespace: str, key: ChunkKey) -> TokenIds | None:
        """Return the chunk's tokens; None if it is not known in this namespace."""
        record = self._get((namespace, key))
        if record is None:
            return None
        self._touch((namespace, key))
        return TokenIds(record.tokens)

    def knows(self, namespace: str, key: ChunkKey) -> bool:
        """Return whether `token_ids` would return tokens. Does not count as a use."""
        return self._get((namespace, key)) is not None

    def find(self, namespace: str, text: str) -> list[tuple[int, int]]:
        """Find known chunk texts inside `text`. Return `[start, end)` in characters, disjoint and in order;
        of overlapping texts, the choice that covers most."""
        if len(text) < WINDOW_CHARS or namespace not in self._indexes:
            return []
        windows = window_hashes(text)  # without the lock, because this takes most of the time
        with self._lock:
            index = self._indexes.get(namespace)
            found = [] if index is None else index.matches(text, windows)
        return disjoint(found)

    def erase(self, namespace: str, keys: Collection[ChunkKey] | None, asked_at_s: float) -> int:
        """Forget chunks, and overwrite them in files; None: all of the namespace and its parts.

        Chunks that were remembered after ``asked_at_s`` (Unix seconds) stay. Returns the number of erased
        chunks. Raises as `ChunkTable`; then some chunks may remain.
        """
        names = [namespace, *(self.parts(namespace) if keys is None else ())]
        return sum(self._erase(name, keys, asked_at_s) for name in names)

    def parts(self, namespace: str) -> list[str]:
        """Return the parts of a namespace that have known chunks."""
        return self._table.parts(namespace)

    def _erase(self, namespace: str, keys: Collection[ChunkKey] | None, asked_at_s: float) -> int:
        with self._writing:
            with self._lock:
                spared = {
                    key
                    for (name, key), at_s in self._recent.items()
                    if name == namespace and at_s > asked_at_s
                }
                for address in [one for one in self._touched if one[0] == namespace]:
                    del self._touched[address]
            before = len(self)
            removed = self._table.erase(namespace, keys, spared)
            with self._lock:
                for name, text in removed:
                    self._remove_text(name, text)
            return before - len(self)

    @property
    def cursor(self) -> str:
        """Position in the store's erasures up to which they were followed; empty: none. Raises as
        `ChunkTable`."""
        return self._table.read_cursor()

    def set_cursor(self, cursor: str) -> None:
        self._table.write_cursor(cursor)

    def _get(self, address: Address) -> Record | None:
        try:
            return self._table.get(address)
        except KintsugiError as error:
            log.warning("a known chunk cannot be read: %s", error)
            return None

    def _touch(self, address: Address) -> None:
        with self._lock:
            self._touched[address] = None
            self._touched.move_to_end(address)
            if len(self._touched) > TOUCHED_MAX:
                self._touched.popitem(last=False)

    def _write(self, added: Sequence[tuple[Address, Record]]) -> None:
        """Write chunks, and all uses so far. If this fails, they are lost, with a warning."""
        with self._writing:
            with self._lock:
                touched, self._touched = self._touched, OrderedDict()
            try:
                removed = self._table.apply(touched, added)
            except KintsugiError as error:
                log.warning("%d known chunks cannot be written: %s", len(added), error)
                return
            with self._lock:
                for (namespace, _), record in added:
                    if record.text is not None:
                        self._add_text(namespace, record.text)
                for namespace, text in removed:
                    self._remove_text(namespace, text)

    def _add_text(self, namespace: str, text: ChunkText) -> None:
        self._text_users[namespace, text] += 1
        if self._text_users[namespace, text] == 1:
            self._indexes.setdefault(namespace, TextIndex()).add(text)

    def _remove_text(self, namespace: str, text: ChunkText) -> None:
        if (namespace, text) not in self._text_users:
            return  # another gateway wrote the chunk to the folder
        self._text_users[namespace, text] -= 1
        if not self._text_users[namespace, text]:
            del self._text_users[namespace, text]
            self._indexes[namespace].remove(text)
            if not len(self._indexes[namespace]):
                del self._indexes[namespace]

    def close(self) -> None:
        """Write the waiting uses. Idempotent."""
        if self._touched:
            self._write([])
        self._table.close()
