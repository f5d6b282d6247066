"""Which namespaces' blocks are given up when something is erased."""

from __future__ import annotations

import time

from kintsugi.core.held import ITEM_BYTES, NAMESPACE_BYTES
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.scheduler.hashing import Salts, split_salt
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


def test_erasures_of_ever_new_namespaces_take_bounded_memory_and_bring_no_salt_back() -> None:
    store = RamStore()
    salts = followed(store)
    salts.erased.bytes_max = 20 * (ITEM_BYTES + NAMESPACE_BYTES)
    seen: dict[str, list[str]] = {}
    for number in range(200):
        names = ("docs", f"new-{number}", f"new-{number // 2}")
        for name in names:
            seen.setdefault(name, []).append(salts.of(name))
        for name in (names[1], *(["docs"] if number % 50 == 0 else [])):
            store.erase(name, None, time.time())
            salts.refresh()
            assert salts.of(name) not in seen[name], "a salt from before an erasure never comes back"
        assert salts.erased.num_bytes <= salts.erased.bytes_max
    assert split_salt(salts.of("docs")) == (salts.of("docs"), "")
    assert salts.of("docs", "shared") != salts.of("docs"), "the shared namespace's erasures were forgotten"
