"""Keeping a corpus warm: leases on its chunks, retiring what a newer model has replaced, and forgetting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.errors import NotFound
from kintsugi.precompute.ledger import Edition, Ledger
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkStore


@dataclass(frozen=True)
class PinCounts:
    """What `pin` held."""

    chunks: int
    pinned: int
    """Fewer than `chunks` where some are not in the store: precompute first."""


def newest_complete_edition(ledger: Ledger, corpus: str) -> Edition:
    """The newest edition that is complete. Raises `NotFound`."""
    complete = [edition for edition in ledger.editions(corpus) if edition.completed]
    if not complete:
        raise NotFound(f"corpus {corpus!r} is not complete in this ledger; run kintsugi precompute")
    return complete[-1]


def pin(ledger: Ledger, store_url: str, corpus: str, lease_s: float) -> PinCounts:
    """Keep the corpus's chunks from being evicted for `lease_s`; do it again before they end.

    Raises `NotFound`, and `InvalidField` for a store that has no pins.
    """
    edition = newest_complete_edition(ledger, corpus)
    store = open_store(store_url)
    try:
        chunks = pinned = 0
        for page in ledger.keys(edition.id):
            chunks += len(page)
            pinned += store.pin(edition.namespace, page, lease_s).chunks
        return PinCounts(chunks, pinned)
    finally:
        store.close()


def retire(ledger: Ledger, store_url: str, corpus: str) -> int:
    """Forget the corpus's editions before the one that serves, and delete chunks that nobody else has.

    The number deleted. Raises `NotFound` where no edition is complete: nothing is retired before its
    successor serves. Raises `Unavailable` where a shard does not answer: the same again goes on.
    """
    keep = newest_complete_edition(ledger, corpus)
    old = [edition for edition in ledger.editions(corpus) if edition.id < keep.id]
    store = open_store(store_url)
    try:
        with ledger.exclusive(corpus):
            return forget(ledger, store, old) + delete_orphans(ledger, store, keep.namespace)
    finally:
        store.close()


def forget(ledger: Ledger, store: ChunkStore, editions: Sequence[Edition]) -> int:
    """Editions, and chunks that nobody else has; the number deleted.

    Editions are there until the store has lost their chunks. Raises `Unavailable` where it could not.
    """
    for edition in editions:
        ledger.empty(edition.id)
    namespaces = {edition.namespace for edition in editions}
    deleted = sum(delete_orphans(ledger, store, namespace) for namespace in namespaces)
    for edition in editions:
        ledger.retire(edition.id)
    return deleted


def delete_orphans(ledger: Ledger, store: ChunkStore, namespace: str) -> int:
    """Delete chunks that no document of any corpus has; their number. Raises `Unavailable`; those that the
    store may still hold stay in the ledger."""
    return sum(iter(lambda: delete_some_orphans(ledger, store, namespace), 0))


def delete_some_orphans(ledger: Ledger, store: ChunkStore, namespace: str) -> int:
    """As `delete_orphans`, a page at most: 0 where there are none any more."""
    with ledger.orphans(namespace) as keys:
        if keys:
            store.delete(namespace, keys)
    return len(keys)
