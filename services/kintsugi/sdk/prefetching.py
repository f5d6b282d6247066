"""Prefetches what a retriever has found, beside the retriever's caller.

Retrieval is the moment when a prompt's chunks are known and its prefill has not begun. A gateway that is slow
or gone must not delay or fail the retrieval: calls run on a thread, and what fails is logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kintsugi.core.errors import KintsugiError
from kintsugi.core.request import check_ttl
from kintsugi.sdk.client import Client

log = logging.getLogger(__name__)

WAITING_MAX = 64
"""Retrievals whose chunks are being prefetched; those of further ones are not."""


class Prefetcher:
    """Thread-safe. The client stays its owner's."""

    def __init__(self, client: Client, put: bool = False, ttl_s: float | None = None) -> None:
        """``put``: also store the chunks that are not stored yet, in the background, for ``ttl_s`` seconds at
        most. Raises `InvalidField` for a lifetime that no gateway accepts."""
        self._ttl_s = check_ttl(ttl_s)
        self._client = client
        self._put = put
        self._places = threading.BoundedSemaphore(WAITING_MAX)
        self._pool = ThreadPoolExecutor(1, "kintsugi-prefetch")

    def prefetch(self, texts: Sequence[str]) -> Future[None] | None:
        """Begin to bring chunks into RAM; None where nothing is to be done or too many calls wait. The future
        never fails."""
        wanted = list(dict.fromkeys(text for text in texts if text.strip()))
        if not wanted or not self._places.acquire(blocking=False):
            return None
        try:
            return self._pool.submit(self._run, wanted)
        except RuntimeError:  # the interpreter is ending
            self._places.release()
            return None

    def _run(self, texts: list[str]) -> None:
        try:
            self._client.prefetch(texts)
            if self._put:
                self._client.put_chunks(texts, wait=False, ttl_s=self._ttl_s)
        except KintsugiError as error:
            log.warning("%d retrieved chunks are not prefetched: %s", len(texts), error)
        finally:
            self._places.release()
