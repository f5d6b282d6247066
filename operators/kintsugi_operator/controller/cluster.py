"""The requests that the operator sends to Kubernetes' API server.

Objects are plain mappings. `kubernetes.aio` provides configuration, TLS and the connection pool. Its models
are not used, because they lack most kinds that the operator applies.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import urlencode

from aiohttp import ClientError, ClientTimeout
from kubernetes.aio.client import ApiClient

from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi_operator.api.manifest import API_VERSION
from kintsugi_operator.objects.base import RAY_API_VERSION
from kintsugi_operator.objects.names import FIELD_MANAGER
from kintsugi_operator.objects.pods import Manifest

TIMEOUT_S = 30.0
WATCH_S = 600
"""How long the API server keeps a watch open."""
SILENCE_S_MAX = 180.0
"""Maximum silence of a watch before it is reopened. The API server sends a bookmark about every minute."""
EVENT_BYTES_MAX = 16 << 20
"""Maximum size of an object in an answer. etcd stores no larger objects."""
NOT_FOUND, CONFLICT, GONE, TOO_MANY = 404, 409, 410, 429
_ITEMS = re.compile(r'"items"\s*:\s*\[')
_SEPARATORS = " \t\r\n,"


@dataclass(frozen=True)
class Resource:
    """A kind and its place in the API."""

    kind: str
    plural: str
    api_version: str = "v1"

    def path(self, namespace: str, name: str = "", sub: str = "") -> str:
        """Return the URL path of a collection, an object or its subresource. Without a namespace, the
        collection covers all namespaces."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        parts = [root, "namespaces" if namespace else "", namespace, self.plural, name, sub]
        return "/".join(part for part in parts if part)


BLEND_SERVICE = Resource("BlendService", "blendservices", API_VERSION)
CORPUS_PRECOMPUTE = Resource("CorpusPrecompute", "corpusprecomputes", API_VERSION)
POD = Resource("Pod", "pods")
CONFIG_MAP = Resource("ConfigMap", "configmaps")
SERVICE = Resource("Service", "services")
SERVICE_ACCOUNT = Resource("ServiceAccount", "serviceaccounts")
CLAIM = Resource("PersistentVolumeClaim", "persistentvolumeclaims")
BUDGET = Resource("PodDisruptionBudget", "poddisruptionbudgets", "policy/v1")
POLICY = Resource("NetworkPolicy", "networkpolicies", "networking.k8s.io/v1")
RAY_SERVICE = Resource("RayService", "rayservices", RAY_API_VERSION)
RAY_JOB = Resource("RayJob", "rayjobs", RAY_API_VERSION)
RAY_CLUSTER = Resource("RayCluster", "rayclusters", RAY_API_VERSION)
EVENT = Resource("Event", "events")
RAY_CRON_JOB = Resource("RayCronJob", "raycronjobs", RAY_API_VERSION)
"""Shows whether KubeRay is 1.6 or newer, which serves this kind."""
LEASE = Resource("Lease", "leases", "coordination.k8s.io/v1")
DEPLOYMENT = Resource("Deployment", "deployments", "apps/v1")
NAMESPACE = Resource("Namespace", "namespaces")

OWNED = (SERVICE_ACCOUNT, CONFIG_MAP, CLAIM, SERVICE, BUDGET, POLICY, RAY_SERVICE, RAY_JOB)
"""Kinds that the operator applies."""
BY_KIND = {one.kind: one for one in (*OWNED, BLEND_SERVICE, CORPUS_PRECOMPUTE, EVENT, LEASE)}


class Refused(KintsugiError):
    """The API server refused a request. The message is the API server's."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: {message} ({status})")
        self.status = status


class ApiServer:
    """A client of Kubernetes' API server. Raises `Refused`, and `Unavailable` if there is no answer."""

    def __init__(
        self,
        client: ApiClient,
        on_request: Callable[[str], None] = lambda verb: None,
        on_stored: Callable[[Manifest], None] = lambda stored: None,
    ) -> None:
        """`on_request` gets the verb of each request before it is sent: `get`, `list`, `watch`, or the HTTP
        method of a write in lower case. `on_stored` gets each object that a write returned."""
        self._client = client
        self._on_request = on_request
        self._on_stored = on_stored

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """Read an object; None if it does not exist."""
        return await self._or_none("GET", resource.path(namespace, name))

    async def list(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> list[Manifest]:
        """Read the objects that have all the labels."""
        found: list[Manifest] = []
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        try:
            await self.scan(resource, namespace, selector, "", found.append)
        except Refused as error:
            if error.status != NOT_FOUND:
                raise
        return found

    async def scan(
        self,
        resource: Resource,
        namespace: str,
        selector: str,
        version: str,
        take: Callable[[Manifest], None],
    ) -> int:
        """Hand each object of a collection to `take`. Returns the list's `resourceVersion`.

        `version` is the oldest acceptable `resourceVersion`: "0" allows any state of the API server's cache,
        and "" makes it read the database. Raises `Refused`, also for a 404. The answer is parsed as a stream,
        because all pod templates at once would be the operator's largest allocation.
        """
        query = {"labelSelector": selector, "resourceVersion": version}
        timeout = ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
        # Items of a list have neither apiVersion nor kind.
        kinds = {"apiVersion": resource.api_version, "kind": resource.kind}
        rest: Manifest = {}
        async with aclosing(self._stream("list", resource.path(namespace), query, timeout)) as pieces:
            async for one, is_item in parse_list(pieces):
                if is_item:
                    take({**kinds, **one})
                else:
                    rest = one
        return int(rest["metadata"]["resourceVersion"])

    async def watch(
        self, resource: Resource, namespace: str, selector: str, version: str
    ) -> AsyncGenerator[Manifest, None]:
        """Yield the events of a collection after `version`, until the API server ends the watch.

        Each event has a `type` (`ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`) and an `object`. Raises
        `Refused`, also for an error event.
        """
        path = resource.path(namespace)
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        query |= {"labelSelector": selector, "resourceVersion": version}
        timeout = ClientTimeout(total=WATCH_S + TIMEOUT_S, sock_connect=TIMEOUT_S, sock_read=SILENCE_S_MAX)
        buffer = b""
        async with aclosing(self._stream("watch", path, query, timeout)) as pieces:
            async for piece in pieces:
                *lines, buffer = (buffer + piece).split(b"\n")
                if len(buffer) > EVENT_BYTES_MAX:
                    raise Unavailable(f"GET {path}: an event is larger than {EVENT_BYTES_MAX} bytes")
                for line in lines:
                    yield _parse_event(path, line)

    async def apply(self, manifest: Manifest) -> Manifest:
        """Apply server-side as `FIELD_MANAGER`, overriding other managers' fields. Returns the stored
        object."""
        return await self._apply(manifest, "")

    async def apply_status(self, live: Manifest, status: Manifest) -> Manifest:
        """Apply an object's status. Returns the object as it is stored now. Raises `Refused` if the object
        has changed since it was read."""
        metadata = {key: live["metadata"][key] for key in ("name", "namespace", "resourceVersion")}
        manifest = {"apiVersion": API_VERSION, "kind": live["kind"], "metadata": metadata, "status": status}
        return await self._apply(manifest, "status")

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        """Send a JSON merge patch. Returns the object as it is stored now."""
        query = {"fieldManager": FIELD_MANAGER}
        path = resource.path(namespace, name)
        stored = await self.request("PATCH", path, query, patch, "application/merge-patch+json")
        self._on_stored(stored)
        return stored

    async def create(self, manifest: Manifest) -> None:
        """Create an object. Raises `Refused` if it exists."""
        path = BY_KIND[manifest["kind"]].path(manifest["metadata"]["namespace"])
        await self.request("POST", path, {"fieldManager": FIELD_MANAGER}, manifest)

    async def replace(self, manifest: Manifest) -> None:
        """Replace an object. Raises `Refused` if it has changed since its `resourceVersion`."""
        metadata = manifest["metadata"]
        path = BY_KIND[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        await self.request("PUT", path, {"fieldManager": FIELD_MANAGER}, manifest)

    async def delete(self, resource: Resource, namespace: str, name: str) -> None:
        """Delete an object and everything that it owns. Does nothing if it does not exist."""
        query = {"propagationPolicy": "Background"}
        await self._or_none("DELETE", resource.path(namespace, name), query)

    async def evict(self, namespace: str, pod: str) -> bool:
        """Evict a pod. Returns False if a disruption budget forbids it now."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        try:
            await self.request("POST", POD.path(namespace, pod, "eviction"), {}, body)
        except Refused as error:
            if error.status == TOO_MANY:
                return False
            if error.status != NOT_FOUND:
                raise
        return True

    async def is_terminating(self, namespace: str) -> bool:
        """Whether a namespace is deleted or being deleted; False if the operator may not read it."""
        try:
            found = await self.get(NAMESPACE, "", namespace)
        except Refused:
            return False
        return found is None or "deletionTimestamp" in found["metadata"]

    async def _apply(self, manifest: Manifest, sub: str) -> Manifest:
        metadata = manifest["metadata"]
        path = BY_KIND[manifest["kind"]].path(metadata["namespace"], metadata["name"], sub)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        stored = await self.request("PATCH", path, query, manifest, "application/apply-patch+yaml")
        self._on_stored(stored)
        return stored

    async def _or_none(
        self, method: str, path: str, query: Mapping[str, str] | None = None
    ) -> Manifest | None:
        try:
            return await self.request(method, path, query or {})
        except Refused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Manifest | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """Send one request and parse the answer. Raises `Refused` and `Unavailable`."""
        timeout = ClientTimeout(total=TIMEOUT_S)
        answer = self._stream(method.lower(), path, query, timeout, method, body, content_type)
        async with aclosing(answer) as pieces:
            text = b"".join([piece async for piece in pieces])
        parsed: Manifest = json.loads(text) if text else {}
        return parsed

    async def _stream(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        timeout: ClientTimeout,
        method: str = "GET",
        body: Manifest | None = None,
        content_type: str = "application/json",
    ) -> AsyncGenerator[bytes, None]:
        """Send one request and yield the answer in pieces."""
        self._on_request(verb)
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._client.configuration.host}{path}"
        used = {key: value for key, value in query.items() if value}
        if used:
            url = f"{url}?{urlencode(used)}"
        try:
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=timeout
            )
            async with answer.response as response:
                if not 200 <= response.status < 300:
                    said = _read_error_message(await response.read(), response.reason or "")
                    raise Refused(f"{method} {path}", response.status, said)
                async for piece in response.content.iter_any():
                    yield piece
        except (ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"{method} {path}: the API server does not answer ({error})") from error


async def parse_list(pieces: AsyncIterable[bytes]) -> AsyncGenerator[tuple[Manifest, bool], None]:
    """Parse a list as a stream: yield each item with True, then the rest of the list with False.

    Raises `Unavailable` for a list that is cut off.
    """
    decoder, text_of = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    head, text, is_inside = "", "", False
    async for piece in pieces:
        text += text_of.decode(piece)
        begin = 0
        if not head and (items := _ITEMS.search(text)):
            head, begin, is_inside = text[: items.end()], items.end(), True
        while is_inside and (begin := _skip_separators(text, begin)) < len(text):
            if text[begin] == "]":
                is_inside = False
                break
            try:
                item, begin = decoder.raw_decode(text, begin)
            except ValueError:
                break  # the rest of the item has not arrived yet
            yield item, True
        text = text[begin:]
        if is_inside and len(text) > EVENT_BYTES_MAX:
            raise Unavailable(f"an item of a list is larger than {EVENT_BYTES_MAX} bytes")
    try:
        yield json.loads(head + text), False
    except ValueError as error:
        raise Unavailable("the API server's list is cut off") from error


def _skip_separators(text: str, begin: int) -> int:
    while begin < len(text) and text[begin] in _SEPARATORS:
        begin += 1
    return begin


def _parse_event(path: str, line: bytes) -> Manifest:
    """Parse an event of a watch. Raises `Refused` for an error event and `Unavailable` for an invalid one."""
    try:
        event: Manifest = json.loads(line)
        type_, found = event["type"], event["object"]
    except (ValueError, TypeError, KeyError) as error:
        raise Unavailable(f"GET {path}: the API server sent an invalid event: {line[:100]!r}") from error
    if type_ == "ERROR":
        raise Refused(f"GET {path}", int(found.get("code") or 500), str(found.get("message") or "no reason"))
    return event


def _read_error_message(text: bytes, reason: str) -> str:
    """Return the API server's message, or `reason` if a proxy answered without a message."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, TypeError, KeyError):
        return str(reason)
