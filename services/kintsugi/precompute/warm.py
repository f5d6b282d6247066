"""Pins the chunks of a corpus, and deletes editions and unused chunks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from kintsugi.core.errors import NotFound, PermissionDenied
from kintsugi.precompute.ledger import Edition, Ledger
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkStore


def newest_complete_edition(ledger: Ledger, corpus: str) -> Edition:
    """Find the newest complete edition. Raises `NotFound`."""
    complete = [edition for edition in ledger.editions(corpus) if edition.completed]
    if not complete:
        raise NotFound(f"corpus {corpus!r} is not complete in this ledger; run kintsugi precompute")
    return complete[-1]


def pin(ledger: Ledger, store_url: str, corpus: str, lease_s: float) -> tuple[int, int]:
    """Protect the corpus's chunks from eviction for `lease_s` seconds; pin again before the leases end.

    Return the number of chunks and the number of pinned chunks. If fewer are pinned, the others are not in
    the store: precompute them first. Raises `NotFound`, and `InvalidField` for a store without pins.
    """
    edition = newest_complete_edition(ledger, corpus)
    with closing(open_store(store_url)) as store:
        chunks = pinned = 0
        for page in ledger.keys(edition.id, store.name_key(edition.namespace)):
            chunks += len(page)
            pinned += store.pin(edition.namespace, page, lease_s).chunks
        return chunks, pinned


def forget(ledger: Ledger, store: ChunkStore, editions: Sequence[Edition]) -> int:
    """Delete editions and the chunks that only they have. Return the number of deleted chunks.

    An edition stays in the ledger until the store has deleted its chunks. Raises `Unavailable` if the store
    does not answer.
    """
    for edition in editions:
        ledger.empty(edition.id)
    namespaces = {edition.namespace for edition in editions}
    deleted = sum(delete_orphans(ledger, store, namespace) for namespace in namespaces)
    for edition in editions:
        ledger.retire(edition.id)
    return deleted


def delete_orphans(ledger: Ledger, store: ChunkStore, namespace: str) -> int:
    """Delete chunks that belong to no document of any corpus. Return their number. Raises `Unavailable`;
    chunks that the store may still hold stay in the ledger."""
    return sum(iter(lambda: delete_some_orphans(ledger, store, namespace), 0))


def delete_some_orphans(ledger: Ledger, store: ChunkStore, namespace: str) -> int:
    """Like `delete_orphans`, but delete at most one page. Return 0 if no orphans are left."""
    try:
        name_key = store.name_key(namespace)
    except PermissionDenied:  # its keys were destroyed, so the keys of plain copies cannot be computed
        name_key = b""
    with ledger.orphans(namespace, name_key) as keys:
        if keys:
            store.delete(namespace, keys)
    return len(keys)
