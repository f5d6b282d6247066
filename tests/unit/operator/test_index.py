"""What the index holds after lists, events and writes, in every order that a network may bring them in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi_operator.api.manifest import API_VERSION
from kintsugi_operator.controller.cluster import (
    BLEND_SERVICE,
    CORPUS_PRECOMPUTE,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    RAY_SERVICE,
    SERVICE,
)
from kintsugi_operator.controller.index import KINDS, Index, Knowledge, Shelf, Watched
from kintsugi_operator.controller.queue import ObjectKey
from kintsugi_operator.objects.names import LABEL_CORPUS, LABEL_SERVICE
from kintsugi_operator.objects.pods import Manifest

ACME = ObjectKey("BlendService", "team", "acme")
DOCS = ObjectKey("CorpusPrecompute", "team", "docs")


OF_ACME = {LABEL_SERVICE: "acme"}


def thing(
    name: str, version: int, value: int = 0, kind: str = "Service", labels: Mapping[str, str] = OF_ACME
) -> Manifest:
    metadata = {
        "name": name,
        "namespace": "team",
        "resourceVersion": str(version),
        "labels": labels,
        "managedFields": [{"manager": "x" * 1000}],
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": {"value": value}}


def listed(*found: Manifest, version: int = 10, kind: Watched | None = None) -> Shelf:
    """A shelf after its first list."""
    shelf = Shelf(kind or Watched(SERVICE), "")
    shelf.replace(map(shelf.pack, found), version)
    return shelf


def event(type_: str, found: Manifest) -> Manifest:
    return {"type": type_, "object": found}


def values(shelf: Shelf) -> dict[str, int]:
    found = shelf.select("team", {LABEL_SERVICE: "acme"})
    return {one["metadata"]["name"]: one["spec"]["value"] for one in found}


def test_events_change_what_a_list_has_told() -> None:
    shelf = listed(thing("a", 3), thing("b", 5))
    assert shelf.apply(event("ADDED", thing("c", 11))) == {ACME}
    assert shelf.apply(event("MODIFIED", thing("a", 12, 7))) == {ACME}
    assert shelf.apply(event("DELETED", thing("b", 13))) == {ACME}
    assert values(shelf) == {"a": 7, "c": 0}
    assert shelf.version == 13
    bookmark = {"type": "BOOKMARK", "object": {"kind": "Service", "metadata": {"resourceVersion": "40"}}}
    assert shelf.apply(bookmark) == frozenset()
    assert shelf.version == 40


def test_what_did_not_change_leads_to_no_look() -> None:
    shelf = listed(thing("a", 3))
    assert shelf.apply(event("MODIFIED", thing("a", 12))) == frozenset()
    found = shelf.get("team", "a")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "12"


def test_a_reader_gets_a_copy_without_what_nobody_reads() -> None:
    shelf = listed(thing("a", 3, kind="Pod"), kind=Watched(POD, ignored=("spec",)))
    found = shelf.get("team", "a")
    assert found is not None
    assert "spec" not in found
    assert "managedFields" not in found["metadata"]
    found["metadata"]["name"] = "changed"
    again = shelf.get("team", "a")
    assert again is not None
    assert again["metadata"]["name"] == "a"


def test_a_write_is_known_before_its_event_and_the_event_changes_nothing() -> None:
    shelf = listed(thing("a", 3))
    shelf.absorb(thing("a", 12, 7))
    shelf.absorb(thing("new", 14, 1))
    assert values(shelf) == {"a": 7, "new": 1}
    # The stream is still behind: what it brings of others is new, what it brings of these is not.
    assert shelf.apply(event("MODIFIED", thing("a", 11, 6))) == frozenset()
    assert shelf.apply(event("MODIFIED", thing("a", 12, 7))) == frozenset()
    assert shelf.apply(event("ADDED", thing("other", 13, 2))) == {ACME}
    assert shelf.apply(event("ADDED", thing("new", 14, 1))) == frozenset()
    assert values(shelf) == {"a": 7, "new": 1, "other": 2}


def test_an_answer_that_the_watch_has_overtaken_brings_nothing_back() -> None:
    """The last finalizer is removed: the object's end is often told before the patch is answered."""
    shelf = listed(thing("a", 3))
    shelf.apply(event("DELETED", thing("a", 12)))
    shelf.absorb(thing("a", 12, 7))
    assert values(shelf) == {}


def test_a_new_list_replaces_the_old_but_not_what_was_written_after_it() -> None:
    shelf = listed(thing("a", 3), thing("gone", 4), thing("same", 5))
    shelf.absorb(thing("new", 30, 1))
    shelf.absorb(thing("a", 31, 9))
    changed = shelf.replace(map(shelf.pack, [thing("a", 20, 8), thing("same", 5)]), 25)
    assert values(shelf) == {"a": 9, "new": 1, "same": 0}
    assert changed == {ACME}
    assert shelf.replace(map(shelf.pack, [thing("a", 31, 9), thing("same", 5)]), 40) == {ACME}
    assert shelf.replace(map(shelf.pack, [thing("a", 31, 9), thing("same", 5)]), 41) == frozenset()
    assert values(shelf) == {"a": 9, "same": 0}


def test_what_is_not_known_is_not_empty() -> None:
    shelf = Shelf(Watched(RAY_SERVICE), "")
    shelf.problem = "rayservices is forbidden (403)"
    for read in (lambda: shelf.get("team", "a"), lambda: shelf.select("team", {})):
        with pytest.raises(Unavailable, match=r"rayservices are not known yet: .*forbidden"):
            read()
    shelf.absorb(thing("a", 3))
    assert shelf.knowledge is Knowledge.NOTHING
    shelf.miss()
    assert shelf.get("team", "a") is None
    assert shelf.select("team", {}) == []


def test_a_kind_that_goes_takes_its_objects_and_comes_back_without_them() -> None:
    shelf = listed(thing("a", 3), thing("b", 4, labels={LABEL_CORPUS: "docs", LABEL_SERVICE: "acme"}))
    assert shelf.miss() == {ACME, DOCS}
    assert shelf.miss() == frozenset()
    assert values(shelf) == {}
    shelf.replace([], 50)
    assert values(shelf) == {}


def test_objects_are_found_by_label_and_namespace_alone() -> None:
    both = {LABEL_SERVICE: "acme", LABEL_CORPUS: "docs"}
    shelf = listed(thing("z", 1), thing("a", 2, labels=both), thing("o", 3, labels={LABEL_SERVICE: "other"}))
    elsewhere = thing("e", 4)
    elsewhere["metadata"]["namespace"] = "elsewhere"
    shelf.apply(event("ADDED", elsewhere))

    def names(namespace: str, labels: dict[str, str]) -> list[str]:
        return [one["metadata"]["name"] for one in shelf.select(namespace, labels)]

    assert names("team", {LABEL_SERVICE: "acme"}) == ["a", "z"]
    assert names("team", {LABEL_CORPUS: "docs"}) == ["a"]
    assert names("team", {LABEL_SERVICE: "other", LABEL_CORPUS: "docs"}) == []
    assert names("elsewhere", {}) == ["e"]
    shelf.apply(event("MODIFIED", thing("a", 20, labels={LABEL_SERVICE: "other"})))
    assert names("team", {LABEL_SERVICE: "acme"}) == ["z"]
    assert names("team", {LABEL_CORPUS: "docs"}) == []


def own(resource: Any, name: str, version: int, **spec: Any) -> Manifest:
    metadata = {"name": name, "namespace": "team", "resourceVersion": str(version)}
    return {"apiVersion": API_VERSION, "kind": resource.kind, "metadata": metadata, "spec": spec}


def test_a_corpus_and_its_job_lead_to_looks_at_whom_they_concern() -> None:
    shelf = Shelf(Watched(CORPUS_PRECOMPUTE, label=""), "")
    assert shelf.replace([shelf.pack(own(CORPUS_PRECOMPUTE, "docs", 1, service="acme"))], 1) == {DOCS, ACME}
    moved = own(CORPUS_PRECOMPUTE, "docs", 2, service="other")
    other = ObjectKey("BlendService", "team", "other")
    assert shelf.apply(event("MODIFIED", moved)) == {DOCS, ACME, other}
    job = thing("j", 3, labels={LABEL_SERVICE: "acme", LABEL_CORPUS: "docs"})
    assert Shelf(Watched(SERVICE), "").pack(job).keys == {DOCS}


def test_the_index_reads_as_the_api_server_does() -> None:
    index = Index(["team", "other"])
    for (resource, where), shelf in index.shelves.items():
        shelf.replace([], 5)
        if (resource, where) == (BLEND_SERVICE, "team"):
            shelf.apply(event("ADDED", own(BLEND_SERVICE, "acme", 6)))
    index.absorb(thing("a", 9))
    index.absorb(thing("somebody's", 9, labels={"app": "other"}))
    index.absorb({"kind": "Lease", "metadata": {"name": "l", "namespace": "team", "resourceVersion": "9"}})

    async def main() -> None:
        live = await index.get(BLEND_SERVICE, "team", "acme")
        assert live is not None
        assert live["metadata"]["resourceVersion"] == "6"
        assert await index.get(BLEND_SERVICE, "other", "acme") is None
        found = await index.list(SERVICE, "team", {LABEL_SERVICE: "acme"})
        assert [one["metadata"]["name"] for one in found] == ["a"]
        assert await index.get(SERVICE, "team", "somebody's") is None
        assert index.serves(RAY_CLUSTER)
        index.shelves[RAY_CLUSTER, "team"].miss()
        assert not index.serves(RAY_CLUSTER)
        assert index.serves(RAY_JOB)

    asyncio.run(main())
    assert index.keys() == {ACME}
    assert len(index.shelves) == 2 * len(KINDS)
