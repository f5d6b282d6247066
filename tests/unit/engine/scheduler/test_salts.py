"""Which namespaces' blocks are given up when something is erased."""

from __future__ import annotations

import time

from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.scheduler.hashing import Salts
from kintsugi.store.client.ram import RamStore

PART, SESSION = "docs/-/acme", "docs/-/acme/.5f"


def followed(store: RamStore) -> Salts:
    salts = Salts(store)
    salts.refresh()
    return salts


def test_a_chunk_that_is_erased_costs_those_their_blocks_who_may_load_it() -> None:
    store = RamStore()
    salts = followed(store)
    store.erase("docs", [ChunkKey(bytes(32))], time.time())
    salts.refresh()
    assert salts.of("docs") != "docs"
    assert [salts.of(name) for name in (PART, SESSION, "other")] == [PART, SESSION, "other"]
    assert salts.of(PART, "docs") != PART, "it shares the namespace"
    store.erase(PART, [ChunkKey(bytes(32))], time.time())
    salts.refresh()
    assert salts.of(PART) != PART
    assert salts.of(SESSION) == SESSION


def test_a_namespace_that_is_erased_takes_its_parts_blocks_with_it() -> None:
    store = RamStore()
    salts = followed(store)
    seen = {name: {salts.of(name)} for name in ("docs", PART, SESSION)}
    for count, namespace in enumerate(("docs", PART, "docs"), 2):
        store.erase(namespace, None, time.time())
        salts.refresh()
        for name in (PART, SESSION):
            seen[name].add(salts.of(name))
            assert len(seen[name]) == count, "a salt never comes back"
    assert salts.of("docs-of-others") == "docs-of-others"
