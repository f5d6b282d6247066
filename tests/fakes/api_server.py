"""`FakeCluster` over HTTP: discovery, objects, lists and watches, as far as the operator uses them.

A list says which version it is of, and a watch sends what has changed since a version. A test ends watches
(`end_watches`), lets old versions be forgotten (`forget`), sends bookmarks (`send_bookmarks`) and takes kinds
away (`FakeCluster.uninstall`), each of which an API server does by itself.

It is no API server. It cannot show: a list that is behind (`resourceVersion=0` gets the present state), pages
of a list, an object that leaves a watch because its labels changed, admission, schemas and conversion,
rights, priority and fairness, what a request costs, or several API servers that do not agree. Tests marked
for a cluster ask a real one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kintsugi_operator.controller.cluster import (
    BY_KIND,
    DEPLOYMENT,
    NAMESPACE,
    POD,
    RAY_CLUSTER,
    RAY_CRON_JOB,
    Refused,
    Resource,
)
from kintsugi_operator.objects.pods import Manifest
from tests.fakes.cluster import FakeCluster, has_labels

RESOURCES = {
    one.plural: one for one in (*BY_KIND.values(), POD, RAY_CLUSTER, RAY_CRON_JOB, NAMESPACE, DEPLOYMENT)
}
PATH = re.compile(
    r"/(?:api|apis/[^/]+)/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(?P<rest>/.*)?"
)


@dataclass(eq=False)
class Stream:
    """An open watch."""

    resource: Resource
    namespace: str
    labels: dict[str, str | None]
    lines: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)
    """Events to send; None ends the watch."""

    def offer(self, type_: str, changed: Manifest) -> None:
        """Send a change if the watch is for such objects."""
        is_its = changed["kind"] == self.resource.kind
        is_there = self.namespace in ("", changed["metadata"]["namespace"])
        if is_its and is_there and has_labels(changed, self.labels):
            self.lines.put_nowait({"type": type_, "object": changed})


class FakeApiServer:
    """Answers requests from the objects of a `FakeCluster`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.events: list[tuple[str, Manifest]] = []
        """Every change since the start, in order: `ADDED`, `MODIFIED` or `DELETED`, and the object."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """By verb (`list`, `watch`, or the method in lower case) and plural name of the kind."""
        self.list_versions: list[str] = []
        """The `resourceVersion` that each list was asked for."""
        self._oldest = 0
        self._streams: list[Stream] = []
        cluster.on_change = self._remember
        cluster.on_unserved = self.end_watches

    def end_watches(self, plural: str = "") -> None:
        """End the watches of a kind, or all of them."""
        for stream in self._streams:
            if plural in ("", stream.resource.plural):
                stream.lines.put_nowait(None)

    def forget(self) -> None:
        """Forget all versions before the present one, and end watches: one that goes on gets 410."""
        self._oldest = self.cluster.version
        self.end_watches()

    def send_bookmarks(self) -> None:
        """Tell all watches how far they are."""
        for stream in self._streams:
            metadata = {"resourceVersion": str(self.cluster.version)}
            found = {"kind": stream.resource.kind, "metadata": metadata}
            stream.lines.put_nowait({"type": "BOOKMARK", "object": found})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Handle any request."""
        found = PATH.fullmatch(request.path)
        if found is None:
            page = self._discovery(request.path)
            return web.json_response(page or {"message": "not found"}, status=200 if page else 404)
        resource, namespace = RESOURCES[found["plural"]], found["namespace"] or ""
        names = (found["rest"] or "").strip("/").split("/") if found["rest"] else []
        is_watch = request.query.get("watch") == "true"
        is_list = request.method == "GET" and not names
        verb = "watch" if is_watch else "list" if is_list else request.method.lower()
        self.requests[verb, resource.plural] += 1
        try:
            if not self.cluster.serves(resource):
                raise Refused(request.path, 404, "the server could not find the requested resource")
            if is_watch:
                return await self._watch(request, resource, namespace)
            if request.method == "GET":
                return web.json_response(await self._read(request, resource, namespace, names))
            return web.json_response(await self._write(request, resource, namespace, names))
        except Refused as error:
            return web.json_response({"message": str(error), "code": error.status}, status=error.status)

    def _discovery(self, path: str) -> dict[str, Any] | None:
        names = [
            {"name": one.plural}
            for one in RESOURCES.values()
            if path == f"/apis/{one.api_version}" and self.cluster.serves(one)
        ]
        return {"resources": names} if names else None

    async def _read(self, request: web.Request, resource: Resource, namespace: str, names: list[str]) -> Any:
        if names:
            return await self._found(resource, namespace, names[0])
        self.list_versions.append(request.query.get("resourceVersion", ""))
        items = self.cluster.select(resource, namespace, _selector_of(request))
        return {"metadata": {"resourceVersion": str(self.cluster.version)}, "items": items}

    async def _found(self, resource: Resource, namespace: str, name: str) -> Manifest:
        found = await self.cluster.get(resource, namespace, name)
        if found is None:
            raise Refused("GET", 404, "not found")
        return found

    async def _write(self, request: web.Request, resource: Resource, namespace: str, names: list[str]) -> Any:
        body = json.loads(await request.text() or "null")
        if request.method == "DELETE":
            await self.cluster.delete(resource, namespace, names[0])
            return {}
        if request.method == "POST":
            await self.cluster.create(body)
            return body
        if request.method == "PUT":
            await self.cluster.replace(body)
            return await self._found(resource, namespace, names[0])
        if "apply" not in request.headers.get("Content-Type", ""):
            return await self.cluster.merge(resource, namespace, names[0], body)
        if names[1:] == ["status"]:
            return await self.cluster.apply_status(body, body["status"])
        return await self.cluster.apply(body)

    async def _watch(self, request: web.Request, resource: Resource, namespace: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        stream = Stream(resource, namespace, _selector_of(request))
        if since < self._oldest:
            gone = {"kind": "Status", "code": 410, "message": f"too old resource version: {since}"}
            stream.lines.put_nowait({"type": "ERROR", "object": gone})
            stream.lines.put_nowait(None)
        for type_, changed in self.events:
            if int(changed["metadata"]["resourceVersion"]) > max(since, self._oldest):
                stream.offer(type_, changed)
        self._streams.append(stream)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            with suppress(ConnectionResetError):  # nobody listens any more
                while (event := await stream.lines.get()) is not None:
                    await response.write(json.dumps(event).encode() + b"\n")
            return response
        finally:
            self._streams.remove(stream)

    def _remember(self, type_: str, changed: Manifest) -> None:
        self.events.append((type_, changed))
        for stream in self._streams:
            stream.offer(type_, changed)


def _selector_of(request: web.Request) -> dict[str, str | None]:
    """Labels that are asked for, with a value or with any."""
    terms = [one.partition("=") for one in request.query.get("labelSelector", "").split(",") if one]
    return {key: value if is_equal else None for key, is_equal, value in terms}
