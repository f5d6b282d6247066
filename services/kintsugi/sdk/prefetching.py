"""Prefetches the chunks that a retriever has found, in the background.

After retrieval a prompt's chunks are known, and its prefill has not begun. A slow or unreachable gateway must
not delay or fail the retrieval, so calls run on a thread, and errors are logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kintsugi.core.errors import KintsugiError
from kintsugi.core.request import check_ttl
from kintsugi.core.schema import check_items, check_text
from kintsugi.sdk.client import Client

log = logging.getLogger(__name__)

WAITING_MAX = 64
"""Maximum number of waiting retrievals; the chunks of further ones are not prefetched."""


class Prefetcher:
    """Prefetches texts on a thread. Does not close the client. Thread-safe."""

    def __init__(self, client: Client, put: bool = False, ttl_s: float | None = None) -> None:
        """``put``: also store chunks that are not stored, for at most ``ttl_s`` seconds. Raises
        `InvalidField` for a lifetime that no gateway accepts."""
        self._ttl_s = check_ttl(ttl_s)
        self._client = client
        self._put = put
        self._places = threading.BoundedSemaphore(WAITING_MAX)
        self._pool = ThreadPoolExecutor(1, "kintsugi-prefetch")

    def prefetch(self, texts: Sequence[str]) -> Future[None] | None:
        """Start to load chunks into RAM. The future never fails. None if there are no chunks or too many
        calls wait."""
        wanted = [text for text in check_items(texts, "texts") if not isinstance(text, str) or text.strip()]
        if not wanted or not self._places.acquire(blocking=False):
            return None
        try:
            return self._pool.submit(self._run, wanted)
        except RuntimeError:  # the interpreter is ending
            self._places.release()
            return None

    def _run(self, texts: list[str]) -> None:
        try:
            texts = list(dict.fromkeys(check_text(text, f"texts[{at}]") for at, text in enumerate(texts)))
            self._client.prefetch(texts)
            if self._put:
                self._client.put_chunks(texts, wait=False, ttl_s=self._ttl_s)
        except KintsugiError as error:
            log.warning("%d retrieved chunks are not prefetched: %s", len(texts), error)
        finally:
            self._places.release()
