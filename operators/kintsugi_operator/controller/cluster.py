"""The requests that the operator sends to Kubernetes' API server.

Objects are plain mappings. `kubernetes.aio` brings configuration, TLS and the connection pool; its models are
not used, since most of what is applied is not among them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
LIST_MAX = 500
"""Objects per page."""
NOT_FOUND, CONFLICT, TOO_MANY = 404, 409, 429


@dataclass(frozen=True)
class Resource:
    """A kind, and where it is served."""

    kind: str
    plural: str
    api_version: str = "v1"

    def path(self, namespace: str, name: str = "", sub: str = "") -> str:
        """URL path of a collection, an object or its subresource."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        parts = [root, "namespaces", namespace, self.plural, name, sub]
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
LEASE = Resource("Lease", "leases", "coordination.k8s.io/v1")

OWNED = (SERVICE_ACCOUNT, CONFIG_MAP, CLAIM, SERVICE, BUDGET, POLICY, RAY_SERVICE, RAY_JOB)
"""Kinds that the operator applies."""
BY_KIND = {one.kind: one for one in (*OWNED, BLEND_SERVICE, CORPUS_PRECOMPUTE, EVENT, LEASE)}


class Refused(KintsugiError):
    """The API server refused a request; the message is its own."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: {message} ({status})")
        self.status = status


class ApiServer:
    """Kubernetes, as far as the operator needs it. Raises `Refused`, and `Unavailable` without an answer."""

    def __init__(self, client: ApiClient, on_write: Callable[[], None] = lambda: None) -> None:
        """`on_write` is called before each request that may change the cluster."""
        self._client = client
        self._on_write = on_write

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """Read an object; None where there is none."""
        return await self._or_none("GET", resource.path(namespace, name))

    async def list(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> list[Manifest]:
        """Read the objects that have all the labels."""
        query = {"labelSelector": ",".join(f"{k}={v}" for k, v in labels.items()), "limit": str(LIST_MAX)}
        found: list[Manifest] = []
        while True:
            page = await self._or_none("GET", resource.path(namespace), query) or {}
            # Items of a list do not say what they are.
            kinds = {"apiVersion": resource.api_version, "kind": resource.kind}
            found += [{**kinds, **item} for item in page.get("items") or []]
            query["continue"] = (page.get("metadata") or {}).get("continue") or ""
            if not query["continue"]:
                return found

    async def apply(self, manifest: Manifest) -> Manifest:
        """Apply server-side as `FIELD_MANAGER`, taking over fields that others have set."""
        return await self._apply(manifest, "")

    async def apply_status(self, manifest: Manifest) -> None:
        """Apply the status alone."""
        await self._apply(manifest, "status")

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> None:
        """Send a JSON merge patch."""
        query = {"fieldManager": FIELD_MANAGER}
        path = resource.path(namespace, name)
        await self.request("PATCH", path, query, patch, "application/merge-patch+json")

    async def create(self, manifest: Manifest) -> None:
        """Create an object; refused where there is one."""
        path = BY_KIND[manifest["kind"]].path(manifest["metadata"]["namespace"])
        await self.request("POST", path, {"fieldManager": FIELD_MANAGER}, manifest)

    async def replace(self, manifest: Manifest) -> None:
        """Replace an object; refused where it has changed since its `resourceVersion`."""
        metadata = manifest["metadata"]
        path = BY_KIND[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        await self.request("PUT", path, {"fieldManager": FIELD_MANAGER}, manifest)

    async def delete(self, resource: Resource, namespace: str, name: str) -> None:
        """Delete an object and everything that it owns; does nothing where there is none."""
        query = {"propagationPolicy": "Background"}
        await self._or_none("DELETE", resource.path(namespace, name), query)

    async def evict(self, namespace: str, pod: str) -> bool:
        """Evict a pod; False where a disruption budget forbids it now."""
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

    async def list_served_kinds(self, api_version: str) -> frozenset[str]:
        """Plural names of the kinds that the API server serves in a group's version."""
        found = await self._or_none("GET", f"/apis/{api_version}") or {}
        return frozenset(one["name"] for one in found.get("resources") or [])

    async def _apply(self, manifest: Manifest, sub: str) -> Manifest:
        metadata = manifest["metadata"]
        path = BY_KIND[manifest["kind"]].path(metadata["namespace"], metadata["name"], sub)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self.request("PATCH", path, query, manifest, "application/apply-patch+yaml")

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
        if method != "GET":
            self._on_write()
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
                method, url, headers=headers, body=body, _request_timeout=ClientTimeout(total=TIMEOUT_S)
            )
            text = await answer.read()
        except (ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"{method} {path}: the API server does not answer ({error})") from error
        if not 200 <= answer.status < 300:
            raise Refused(f"{method} {path}", answer.status, _read_error_message(text, answer.reason))
        parsed: Manifest = json.loads(text) if text else {}
        return parsed


def _read_error_message(text: bytes, reason: str) -> str:
    """The API server's own message; a proxy in between may answer without one."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, TypeError, KeyError):
        return str(reason)
