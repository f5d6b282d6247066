"""A cache of the objects that the operator reads: a `Shelf` for each kind and watched namespace.

`controller.watch` fills the shelves; readers get copies. Nothing here does I/O, so tests can call the rules
as functions of lists, events and writes:

- Objects are compressed JSON, without fields that are never read (`managedFields`, the specs of pods). This
  bounds memory, and no reader can change another reader's copy.
- The `resourceVersion`s of one kind are ordered. A shelf has the version that its watch has reached, and the
  version of each object.
- The result of a write goes onto the shelf (`Index.absorb`), so that the next reconciliation does not act on
  the former state. A result that the watch has already passed is dropped: the object may be deleted by now,
  and no further event would say so.
- A kind that is not served has no objects. A kind that was never listed is unknown, and reading it raises
  `Unavailable`: nothing is decided from a list that is empty only because it was not read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.errors import Unavailable
from kintsugi_operator.controller.cluster import (
    BLEND_SERVICE,
    CORPUS_PRECOMPUTE,
    OWNED,
    POD,
    RAY_CLUSTER,
    RAY_CRON_JOB,
    Resource,
)
from kintsugi_operator.controller.queue import ObjectKey
from kintsugi_operator.objects.names import LABEL_CORPUS, LABEL_SERVICE
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import label_of

INDEXED = (LABEL_SERVICE, LABEL_CORPUS)
"""Labels that objects are selected by."""
COMPRESSION = 1
"""zlib's fastest level: templates repeat so much text that higher levels save little."""


@dataclass(frozen=True)
class Watched:
    """A kind of object to read, and which part of it."""

    resource: Resource
    label: str = LABEL_SERVICE
    """Read only objects with this label; empty: all."""
    ignored: tuple[str, ...] = ()
    """Top-level fields that are dropped, because they are never read."""
    status: tuple[str, ...] = ()
    """Fields of the status that are read; empty: all."""


KINDS = (
    Watched(BLEND_SERVICE, label=""),
    Watched(CORPUS_PRECOMPUTE, label=""),
    *(Watched(one) for one in OWNED),
    Watched(POD, ignored=("spec",)),
    # The operator reads two parts: the annotation with the digest that KubeRay copies from the RayService,
    # and the reason why pods are refused.
    Watched(RAY_CLUSTER, ignored=("spec",), status=("conditions",)),
    # The operator creates no such object. The kind shows that KubeRay is 1.6 or newer.
    Watched(RAY_CRON_JOB),
)


class Knowledge(StrEnum):
    """Whether the objects of a kind are known."""

    NOTHING = "nothing"
    LISTED = "listed"
    MISSING = "missing"
    """The API server does not serve it."""


@dataclass(frozen=True)
class Entry:
    """An object on a shelf."""

    name: tuple[str, str]
    """Namespace and name."""
    version: int
    content: bytes
    """The compressed fields that are read, without the version, so that an unchanged object has the same
    bytes."""
    labels: tuple[str, ...]
    """Values of the `INDEXED` labels."""
    keys: frozenset[ObjectKey]
    """Keys of our objects whose reconciliation depends on this object."""

    def manifest(self) -> Manifest:
        """A copy of the object."""
        found: Manifest = json.loads(zlib.decompress(self.content))
        found["metadata"]["resourceVersion"] = str(self.version)
        return found


def version_of(manifest: Manifest) -> int:
    """The `resourceVersion` of an object or a list."""
    return int(manifest["metadata"]["resourceVersion"])


def keys_of(manifest: Manifest) -> frozenset[ObjectKey]:
    """Return the keys of our objects to reconcile when this object changes."""
    metadata = manifest["metadata"]
    namespace, kind = metadata["namespace"], manifest["kind"]
    if kind == BLEND_SERVICE.kind:
        return frozenset({ObjectKey(kind, namespace, metadata["name"])})
    if kind == CORPUS_PRECOMPUTE.kind:
        own = ObjectKey(kind, namespace, metadata["name"])
        # A service may be waiting for its corpora, so their progress reconciles it.
        service = str((manifest.get("spec") or {}).get("service") or "")
        return frozenset({own, ObjectKey(BLEND_SERVICE.kind, namespace, service)} if service else {own})
    if corpus := label_of(manifest, LABEL_CORPUS):
        return frozenset({ObjectKey(CORPUS_PRECOMPUTE.kind, namespace, corpus)})
    return frozenset({ObjectKey(BLEND_SERVICE.kind, namespace, label_of(manifest, LABEL_SERVICE))})


class Shelf:
    """The objects of one kind, as one watch reported them. Methods that change the shelf return the keys of
    our objects to reconcile."""

    def __init__(self, kind: Watched, namespace: str) -> None:
        """`namespace`: the watched namespace; empty: all."""
        self.kind = kind
        self.namespace = namespace
        self.knowledge = Knowledge.NOTHING
        self.version = 0
        """The version that the watch has reached."""
        self.problem = "the first list is not complete"
        """Why the kind is still unknown."""
        self._entries: dict[tuple[str, str], Entry] = {}

    def pack(self, manifest: Manifest) -> Entry:
        """Make the entry of an object."""
        ignored = self.kind.ignored
        metadata = {
            k: v for k, v in manifest["metadata"].items() if k not in ("managedFields", "resourceVersion")
        }
        read = {k: v for k, v in manifest.items() if k not in ignored} | {"metadata": metadata}
        if self.kind.status and "status" in read:
            read["status"] = {k: v for k, v in read["status"].items() if k in self.kind.status}
        text = json.dumps(read, sort_keys=True, separators=(",", ":"))
        return Entry(
            (metadata["namespace"], metadata["name"]),
            version_of(manifest),
            zlib.compress(text.encode(), COMPRESSION),
            tuple(label_of(manifest, label) for label in INDEXED),
            keys_of(manifest),
        )

    def replace(self, entries: Iterable[Entry], version: int) -> frozenset[ObjectKey]:
        """Replace the objects with those of a list. Objects that were written after the list stay: the watch
        that begins at the list's version reports them."""
        changed: set[ObjectKey] = set()
        listed = {one.name: one for one in entries}
        for name, one in list(self._entries.items()):
            if name not in listed and one.version <= version:
                changed |= self._entries.pop(name).keys
        for one in listed.values():
            changed |= self._put(one)
        self.knowledge, self.version = Knowledge.LISTED, version
        return frozenset(changed)

    def apply(self, event: Manifest) -> frozenset[ObjectKey]:
        """Apply an event of the watch."""
        changed, version = event["object"], version_of(event["object"])
        self.version = max(self.version, version)
        if event["type"] in ("ADDED", "MODIFIED"):
            return self._put(self.pack(changed))
        if event["type"] == "DELETED":
            name = (changed["metadata"]["namespace"], changed["metadata"]["name"])
            former = self._entries.get(name)
            if former is not None and former.version <= version:
                return self._entries.pop(name).keys
        return frozenset()

    def absorb(self, stored: Manifest) -> None:
        """Store the result of a write, unless the watch has reached its version."""
        if self.knowledge is Knowledge.LISTED and version_of(stored) > self.version:
            self._put(self.pack(stored))

    def miss(self) -> frozenset[ObjectKey]:
        """Drop all objects, because the kind is not served."""
        self.knowledge, self.version = Knowledge.MISSING, 0
        changed = frozenset(key for one in self._entries.values() for key in one.keys)
        self._entries.clear()
        return changed

    def get(self, namespace: str, name: str) -> Manifest | None:
        """Return an object; None if it does not exist. Raises `Unavailable` while the kind is unknown."""
        self._check_known()
        found = self._entries.get((namespace, name))
        return found.manifest() if found is not None else None

    def select(self, namespace: str, labels: Mapping[str, str]) -> list[Manifest]:
        """Return a namespace's objects with all the labels, by name. Raises as `get` does."""
        self._check_known()
        wanted = [(INDEXED.index(label), value) for label, value in labels.items()]
        found = [
            one
            for one in self._entries.values()
            if one.name[0] == namespace and all(one.labels[at] == value for at, value in wanted)
        ]
        return [one.manifest() for one in sorted(found, key=lambda one: one.name)]

    def all_keys(self) -> Iterator[ObjectKey]:
        """Keys of all objects."""
        for one in self._entries.values():
            yield from one.keys

    def _check_known(self) -> None:
        if self.knowledge is Knowledge.NOTHING:
            raise Unavailable(f"{self.kind.resource.plural} are not known yet: {self.problem}")

    def _put(self, entry: Entry) -> frozenset[ObjectKey]:
        former = self._entries.get(entry.name)
        if former is not None and former.version >= entry.version:
            return frozenset()
        self._entries[entry.name] = entry
        if former is None:
            return entry.keys
        return frozenset() if former.content == entry.content else former.keys | entry.keys


class Index:
    """All shelves. Has the reading methods of `ApiServer`, and sends no request."""

    def __init__(self, namespaces: Sequence[str] = ()) -> None:
        """`namespaces`: the watched namespaces; empty: all."""
        self.shelves = {
            (kind.resource, where): Shelf(kind, where) for kind in KINDS for where in namespaces or ("",)
        }

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """Read an object; None if it does not exist."""
        return self._shelf(resource, namespace).get(namespace, name)

    async def list(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> list[Manifest]:
        """Read the objects that have all the labels."""
        return self._shelf(resource, namespace).select(namespace, labels)

    def serves(self, resource: Resource) -> bool:
        """Whether the API server serves a kind, as far as the watches know."""
        shelves = (shelf for (one, _), shelf in self.shelves.items() if one == resource)
        return all(shelf.knowledge is not Knowledge.MISSING for shelf in shelves)

    def absorb(self, stored: Manifest) -> None:
        """Store the result of a write."""
        for (resource, where), shelf in self.shelves.items():
            is_watched = where in ("", stored["metadata"].get("namespace"))
            has_label = not shelf.kind.label or label_of(stored, shelf.kind.label)
            if resource.kind == stored.get("kind") and is_watched and has_label:
                shelf.absorb(stored)

    def keys(self) -> frozenset[ObjectKey]:
        """Keys of all our objects."""
        ours = (BLEND_SERVICE, CORPUS_PRECOMPUTE)
        return frozenset(
            key for (one, _), shelf in self.shelves.items() if one in ours for key in shelf.all_keys()
        )

    def _shelf(self, resource: Resource, namespace: str) -> Shelf:
        return self.shelves[resource, "" if (resource, "") in self.shelves else namespace]
