"""The salts of namespaces in vLLM's prefix cache, which change when something of a namespace is erased.

A request finds only blocks whose names were made with its salt. A namespace's salt is its name until an
erasure in it, or in the namespace whose chunks it shares; from then on it is another one, and blocks of
before are found by nobody. Nobody else's blocks are touched, and vLLM uses the space again as it does with
any block that is not found. The store says what was erased; it is asked every `PERIOD_S`, off the scheduler's
path.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.namespaces.parts import enclosing
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.scheduler.hashing import split_salt
from kintsugi.store.protocol.interface import ChunkStore
from kintsugi.store.protocol.save_times import SaveTimes

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)

PERIOD_S = 1.0


class Salts:
    """All but `refresh` may be called from any thread. `start` it, and `close` it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.times = SaveTimes()
        """When passages of requests count as seen."""
        self._cursor: str | None = None
        self._erased: dict[str, int] = {}
        """How many times something of a namespace itself was erased, as far as this engine saw."""
        self._erased_whole: dict[str, int] = {}
        """How many times a namespace was erased as a whole, and its parts with it."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kintsugi-salts", daemon=True)

    def start(self) -> Salts:
        self._thread.start()
        return self

    @property
    def cursor(self) -> str | None:
        """A cursor into the store's erasures: all before it are in the salts. None: the store has not
        answered yet, and what was erased since this engine started is not known."""
        return self._cursor

    def of(self, namespace: str, shared: str = "") -> str:
        """The salt that the namespace's requests have now; ``shared``: whose chunks they may use, too."""
        times, theirs = self._count_erased(namespace), self._count_erased(shared)
        if theirs:
            return f"{namespace}\0{times}\0{shared}\0{theirs}"
        return f"{namespace}\0{times}" if times else namespace

    def _count_erased(self, namespace: str) -> int:
        """How many times something was erased that blocks of the namespace may hold. No request of a part
        loads chunks of the namespaces around it, so a single chunk of those does not count."""
        if not self._erased:
            return 0
        around = (name for name in enclosing(namespace) if name != namespace)
        return self._erased.get(namespace, 0) + sum(self._erased_whole.get(name, 0) for name in around)

    def apply(self, request: Request, namespace: str, shared: str = "", replaces_own: bool = False) -> None:
        """Give a new request its namespace's salt, if that has changed. One with a salt of its own keeps
        it unless ``replaces_own``: the namespace then stands for that salt."""
        salt = self.of(namespace, shared)
        own, _ = split_salt(request.cache_salt)
        if salt != namespace and (replaces_own or own in (None, namespace)):
            hashing.set_salt(request, salt)

    def check(self, request: Request, namespace: str, shared: str = "") -> None:
        """Raise `InvalidField` for a request with a salt of its own, unless it is a measurement's."""
        if split_salt(request.cache_salt)[0] not in (None, namespace, self.of(namespace, shared)):
            raise InvalidField("cache_salt", f"must be the namespace {namespace!r}, or left out")

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
            except KintsugiError as error:
                logger.debug("Erasures are asked for again: %s", error)
            except Exception:
                logger.exception("Erasures cannot be followed")
            self._stop.wait(PERIOD_S)

    def refresh(self) -> None:
        """Read what was erased since the last time; the first time, only from where on to read. Raises
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
