"""Names of blocks in vLLM's prefix cache, for blended KV and after erasures.

vLLM names a full block by a hash chained over the tokens before it. Blended KV of the same tokens differs, so
a request's chain is forked at the first block that may hold blended KV: its name is derived from the ordinary
name and a tag (the plan's digest), and later names are chained to it. Blocks before the fork keep their names
and are shared with plain requests; a later turn with the same plan gets the same names.

The first name depends on the request's salt, so a request finds only blocks that were named with its salt. A
namespace's salt is its name until an erasure in it or in the namespace whose chunks it shares. After that the
salt differs, and no request finds earlier blocks; vLLM reuses them as usual. A measurement does not share its
blocks: its salt is the namespace's, followed by `SEPARATOR` and the measurement's name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import blake3

from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.held import Held
from kintsugi.core.namespaces import enclosing
from kintsugi.store.protocol.interface import ChunkStore
from kintsugi.store.protocol.save_times import SaveTimes

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

    BlockHasher = Callable[[Request], list[BlockHash]]

log = logging.getLogger(__name__)

SEPARATOR = "\0\0"
"""A separator that occurs in no namespace, and in no salt of an erased namespace."""
SALTS_BYTES_MAX = 16 << 20
"""Memory for the salts of erased namespaces."""
PERIOD_S = 1.0
"""Period at which the store's erasures are read."""


def measured_salt(salt: str | None, measurement: str) -> str | None:
    """Return the salt of a measurement's requests; the plain salt if ``measurement`` is empty."""
    return f"{salt or ''}{SEPARATOR}{measurement}" if measurement else salt


def split_salt(salt: str | None) -> tuple[str | None, str]:
    """Split a salt into the plain salt and the measurement's name, which is empty for other requests."""
    if salt is None:
        return None, ""
    plain, _, measurement = salt.partition(SEPARATOR)
    return plain, measurement


class _Beginning:
    """A request cut to its first `num_tokens` tokens, so that a block hasher names only their blocks."""

    def __init__(self, request: Request, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def set_salt(request: Request, salt: str | None) -> None:
    """Set the request's `cache_salt` to ``salt``, and rename its blocks if it changed. A measurement keeps
    its own part."""
    salt = measured_salt(split_salt(salt)[0], split_salt(request.cache_salt)[1])
    if request.cache_salt != salt:
        request.cache_salt = salt
        _rename(request, 0)


def fork(request: Request, first_block: int, tag: bytes, block_size: int, salt: str | None) -> None:
    """Set the salt as `set_salt` does, and fork the names of blocks of ``block_size`` tokens from
    ``first_block`` on, future blocks included. Every block is hashed once; earlier blocks keep their
    names."""
    salt = measured_salt(split_salt(salt)[0], split_salt(request.cache_salt)[1])
    kept = first_block if request.cache_salt == salt else 0
    request.cache_salt = salt
    ordinary = request._block_hasher
    if ordinary is not None:
        request._block_hasher = _ForkedHasher(ordinary, first_block, tag, block_size)
        _rename(request, kept)


def unfork(request: Request, ordinary: BlockHasher | None) -> None:
    """Restore the exact names of the request's blocks."""
    request._block_hasher = ordinary
    _rename(request, 0)


def _rename(request: Request, first_block: int) -> None:
    del request.block_hashes[first_block:]
    request.update_block_hashes()


def exact_tokens(request: Request) -> int | None:
    """Return the tokens before the first fork, a multiple of the block size; None if not forked."""
    hasher = request._block_hasher
    return hasher.exact_tokens if isinstance(hasher, _ForkedHasher) else None


class _ForkedHasher:
    """Block hasher that forks the names of ``ordinary``, which may be forked itself, at ``first_block``."""

    def __init__(self, ordinary: BlockHasher, first_block: int, tag: bytes, block_size: int) -> None:
        self._ordinary = ordinary
        self._first_block = first_block
        self._tag = tag
        self._block_size = block_size
        self._fork_at = first_block * block_size
        inner = ordinary.exact_tokens if isinstance(ordinary, _ForkedHasher) else self._fork_at
        self.exact_tokens: int = min(self._fork_at, inner)

    def __call__(self, request: Request) -> list[BlockHash]:
        known, ordinary = request.block_hashes, self._ordinary
        if len(known) > self._first_block:
            return ordinary(request)
        until_fork = min(request.num_tokens, self._fork_at + self._block_size)
        head = ordinary(cast("Request", _Beginning(request, until_fork)))
        if len(known) + len(head) <= self._first_block:
            return head
        head[-1] = type(head[-1])(blake3.blake3(self._tag + head[-1]).digest())
        # The ordinary hasher continues from the last known name, so it must see the renamed block.
        known.extend(head)
        tail = ordinary(request)
        del known[len(known) - len(head) :]
        return head + tail


class Salts:
    """Salts of all namespaces. A thread changes them after erasures in the store. All methods except
    `refresh` may be called from any thread."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.times = SaveTimes()
        """Request times for the saves of this engine."""
        self._cursor: str | None = None
        self.erased: Held[bool, int] = Held(SALTS_BYTES_MAX, self._forget)
        """Numbers of the last erasure in each namespace (False), and of the whole namespace, which includes
        its parts (True)."""
        self._forgotten = 0
        """The highest number that was dropped. Namespaces without a number use it: their blocks get new
        names, which costs a prefill, but no erased block is found."""
        self._last = 0
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
        times, theirs = self._last_erased(namespace), self._last_erased(shared) if shared else 0
        if theirs:
            return f"{namespace}\0{times}\0{shared}\0{theirs}"
        return f"{namespace}\0{times}" if times else namespace

    def _last_erased(self, namespace: str) -> int:
        """Return the number of the last erasure that concerns blocks of the namespace. Requests of a part
        load no chunks of the enclosing namespaces, so erasures of single chunks there do not count."""
        whole = (self.erased.get(name, True, 0) for name in enclosing(namespace))
        return max(self.erased.get(namespace, False, 0), *whole, self._forgotten)

    def _forget(self, number: int) -> None:
        self._forgotten = max(self._forgotten, number)

    def apply(self, request: Request, namespace: str, shared: str = "", replaces_own: bool = False) -> None:
        """Give a new request its namespace's salt if an erasure changed it. A request with its own salt keeps
        it unless ``replaces_own``: the namespace then represents that salt."""
        salt = self.of(namespace, shared)
        own, _ = split_salt(request.cache_salt)
        if salt != namespace and (replaces_own or own in (None, namespace)):
            set_salt(request, salt)

    def check(self, request: Request, namespace: str, shared: str = "") -> None:
        """Raise `InvalidField` for a request with its own salt, unless it is a measurement's."""
        if split_salt(request.cache_salt)[0] not in (None, namespace, self.of(namespace, shared)):
            raise InvalidField("cache_salt", f"must be the namespace {namespace!r} or omitted")

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
            except KintsugiError as error:
                log.debug("Erasures could not be read and are read again later: %s", error)
            except Exception:
                log.exception("Erasures could not be read because of a defect")
            self._stop.wait(PERIOD_S)

    def refresh(self) -> None:
        """Read the erasures since the last call; the first call only sets the cursor. Raises
        `KintsugiError`."""
        while True:
            page = self._store.erasures(self._cursor or "")
            for erasure in page.erasures:
                self.times.note(erasure.namespace, erasure.at_s)
            for namespace, is_whole in sorted({(one.namespace, one.key is None) for one in page.erasures}):
                self._last += 1
                self.erased.put(namespace, is_whole, self._last)
            has_more = bool(page.erasures) and page.cursor != self._cursor
            self._cursor = page.cursor
            if not has_more:
                return

    def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
