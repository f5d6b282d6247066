"""`FakeCluster` over HTTP: discovery, objects and watches, as far as the operator and kopf use them.

Watches and lists are per namespace. A watch sends what has changed since its `resourceVersion`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from kintsugi_operator.controller.cluster import BY_KIND, POD, RAY_CLUSTER, Refused, Resource
from kintsugi_operator.objects.base import RAY_API_VERSION
from kintsugi_operator.objects.pods import Manifest
from tests.fakes.cluster import FakeCluster

NAMESPACE = Resource("Namespace", "namespaces")
"""kopf does not begin before it has discovered these."""
RAY_CRON_JOB = Resource("RayCronJob", "raycronjobs", RAY_API_VERSION)
RESOURCES = {one.plural: one for one in (*BY_KIND.values(), POD, RAY_CLUSTER, RAY_CRON_JOB, NAMESPACE)}


class FakeApiServer:
    """Answers requests from the objects of a `FakeCluster`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.events: list[tuple[str, Manifest]] = []
        """Every change since the start, in order: `ADDED`, `MODIFIED` or `DELETED`, and the object."""
        self._grown = asyncio.Event()
        cluster.on_change = self._remember

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Handle any request."""
        _, _, rest = request.path.partition("/namespaces/")
        if not rest:
            page = self._discovery(request.path)
            return web.json_response(page or {"message": "not found"}, status=200 if page else 404)
        namespace, plural, *names = rest.split("/")
        resource = RESOURCES[plural]
        if request.query.get("watch") == "true":
            return await self._watch(request, resource, namespace)
        try:
            if request.method == "GET":
                return web.json_response(await self._read(request, resource, namespace, names))
            return web.json_response(await self._write(request, resource, namespace, names))
        except Refused as error:
            return web.json_response({"message": str(error)}, status=error.status)

    def _discovery(self, path: str) -> dict[str, Any] | None:
        pages: dict[str, dict[str, Any]] = {"/api": {"versions": ["v1"]}, "/apis": {"groups": []}}
        for resource in RESOURCES.values():
            version = resource.api_version
            if version == RAY_API_VERSION and resource.plural not in self.cluster.ray:
                continue
            root = f"/apis/{version}" if "/" in version else f"/api/{version}"
            if root not in pages and "/" in version:
                group, number = version.split("/")
                numbers = {"preferredVersion": {"version": number}, "versions": [{"version": number}]}
                pages["/apis"]["groups"].append({"name": group, **numbers})
            pages.setdefault(root, {"resources": []})["resources"].append(
                {
                    "name": resource.plural,
                    "kind": resource.kind,
                    "singularName": resource.kind.lower(),
                    "namespaced": resource is not NAMESPACE,
                    "verbs": ["list", "watch", "patch"],
                }
            )
        return pages.get(path)

    async def _read(self, request: web.Request, resource: Resource, namespace: str, names: list[str]) -> Any:
        if names:
            return await self._found(resource, namespace, names[0])
        chosen = dict(parse_qsl(request.query.get("labelSelector", "").replace(",", "&")))
        items = await self.cluster.list(resource, namespace, chosen)
        return {"metadata": {"resourceVersion": str(self.cluster.version)}, "items": items}

    async def _found(self, resource: Resource, namespace: str, name: str) -> Manifest:
        found = await self.cluster.get(resource, namespace, name)
        if found is None:
            raise Refused("GET", 404, "not found")
        return found

    async def _write(self, request: web.Request, resource: Resource, namespace: str, names: list[str]) -> Any:
        body = json.loads(await request.text() or "null")
        kind = request.headers.get("Content-Type", "")
        if request.method == "DELETE":
            await self.cluster.delete(resource, namespace, names[0])
            return {}
        if names[1:] == ["status"]:
            await self.cluster.apply_status(body)
            return {}
        if "apply" in kind:
            return await self.cluster.apply(body)
        before = await self._found(resource, namespace, names[0])
        if "json-patch" in kind:
            self.cluster.patch_json(resource, namespace, names[0], body)
        else:
            await self.cluster.merge(resource, namespace, names[0], body)
        return await self.cluster.get(resource, namespace, names[0]) or before

    async def _watch(self, request: web.Request, resource: Resource, namespace: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        since, index = int(request.query["resourceVersion"]), 0
        while True:
            while index < len(self.events):
                type_, found = self.events[index]
                index += 1
                metadata = found["metadata"]
                is_asked_for = (found["kind"], metadata["namespace"]) == (resource.kind, namespace)
                if is_asked_for and int(metadata["resourceVersion"]) > since:
                    line = json.dumps({"type": type_, "object": found})
                    await response.write(line.encode() + b"\n")
            await self._grown.wait()

    def _remember(self, type_: str, changed: Manifest) -> None:
        self.events.append((type_, changed))
        self._grown.set()
        self._grown = asyncio.Event()
