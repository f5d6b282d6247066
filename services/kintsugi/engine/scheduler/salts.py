"""The salts of namespaces in vLLM's prefix cache, which change when chunks of a namespace are erased.

A request finds only blocks whose names were made with its salt. A namespace's salt is its name until an
erasure in it or in the namespace whose chunks it shares. After that the salt differs, and no request finds
earlier blocks. Other namespaces keep their blocks, and vLLM reuses the unused ones as usual. The store's
erasures are read every `PERIOD_S` on a separate thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.namespaces import enclosing
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.scheduler.hashing import split_salt
from kintsugi.store.protocol.interface import ChunkStore
from kintsugi.store.protocol.save_times import SaveTimes

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)

PERIOD_S = 1.0


class Salts:
    """Salts of all namespaces. Except `refresh`, methods may be called from any thread."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.times = SaveTimes()
        """Times at which passages of requests count as seen, for their saves."""
        self._cursor: str | None = None
        self._erased: dict[str, int] = {}
        """Number of erasures in each namespace since this engine started."""
        self._erased_whole: dict[str, int] = {}
        """Number of erasures of each whole namespace, which include its parts."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kintsugi-salts", daemon=True)

    def start(self) -> Salts:
        self._thread.start()
        return self

    @property
    def cursor(self) -> str | None:
        """Cursor into the store's erasures; the salts reflect all erasures before it. None: the store has not
        answered yet."""
        return self._cursor

    def of(self, namespace: str, shared: str = "") -> str:
        """Return the current salt of the namespace's requests, which may also use chunks of ``shared``."""
        times, theirs = self._count_erased(namespace), self._count_erased(shared)
        if theirs:
            return f"{namespace}\0{times}\0{shared}\0{theirs}"
        return f"{namespace}\0{times}" if times else namespace

    def _count_erased(self, namespace: str) -> int:
        """Return the number of erasures that concern blocks of the namespace. Requests of a part load no
        chunks of the enclosing namespaces, so erasures of single chunks there do not count."""
        if not self._erased:
            return 0
        around = (name for name in enclosing(namespace) if name != namespace)
        return self._erased.get(namespace, 0) + sum(self._erased_whole.get(name, 0) for name in around)

    def apply(self, request: Request, namespace: str, shared: str = "", replaces_own: bool = False) -> None:
        """Give a new request its namespace's salt if an erasure changed it. A request with its own salt keeps
        it unless ``replaces_own``: the namespace then represents that salt."""
        salt = self.of(namespace, shared)
        own, _ = split_salt(request.cache_salt)
        if salt != namespace and (replaces_own or own in (None, namespace)):
            hashing.set_salt(request, salt)

    def check(self, request: Request, namespace: str, shared: str = "") -> None:
        """Raise `InvalidField` for a request with its own salt, unless it is a measurement's."""
        if split_salt(request.cache_salt)[0] not in (None, namespace, self.of(namespace, shared)):
            raise InvalidField("cache_salt", f"must be the namespace {namespace!r} or omitted")

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
            except KintsugiError as error:
                logger.debug("Erasures could not be read and are read again later: %s", error)
            except Exception:
                logger.exception("Erasures could not be read because of a defect")
            self._stop.wait(PERIOD_S)

    def refresh(self) -> None:
        """Read the erasures since the last call; the first call only sets the cursor. Raises
        `KintsugiError`."""
        while True:
            page = self._store.erasures(self._cursor or "")
            for erasure in page.erasures:
                self.times.note(erasure.namespace, erasure.at_s)
            for namespace in {erasure.namespace for erasure in page.erasures}:
                self._erased[namespace] = self._erased.get(namespace, 0) + 1
            for namespace in {erasure.namespace for erasure in page.erasures if erasure.key is None}:
                self._erased_whole[namespace] = self._erased_whole.get(namespace, 0) + 1
            has_more = bool(page.erasures) and page.cursor != self._cursor
            self._cursor = page.cursor
            if not has_more:
                return

    def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
