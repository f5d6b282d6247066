"""A real cluster for tests: any that KUBECONFIG names, with all rights there.

KubeRay's CRDs are installed, and KubeRay itself must not run: tests write what it would. Nodes, a network
and images are not needed; an API server with RBAC, tokens for ServiceAccounts and a controller manager are.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_kube_config
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kintsugi.core.errors import Unavailable
from kintsugi_operator.api.crd import crds
from kintsugi_operator.controller.cluster import (
    BLEND_SERVICE,
    CORPUS_PRECOMPUTE,
    RAY_JOB,
    RAY_SERVICE,
    ApiServer,
    Refused,
    Resource,
)
from kintsugi_operator.controller.metrics import WRITES
from kintsugi_operator.objects.pods import Manifest

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WITHIN_S = 120.0
"""Garbage collection looks for new kinds every 30 s, and a lease is waited for for 15."""

SMALL: dict[str, Any] = {
    "model": {"path": "/models/small"},
    "image": "registry.example/kintsugi/serving-cpu:1",
    "gateway": {"insecure": True},
}


def small_spec(**parts: Any) -> Manifest:
    """The spec of a small service. Mappings in `parts` are added to its own, other values replace them."""
    changed = {
        key: {**SMALL.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in parts.items()
    }
    return {**SMALL, **changed}


def why_not() -> str:
    """Why there is no cluster to test on; empty where there is one."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG names no cluster"
    if not os.environ.get("KUBERAY_CRDS"):
        return "KUBERAY_CRDS names no file or folder with KubeRay's CRDs"
    return ""


class Kube:
    """The cluster, asked from ordinary functions."""

    def __init__(self, runner: asyncio.Runner, server: ApiServer, configuration: Configuration) -> None:
        self._runner = runner
        self._server = server
        self.configuration = configuration

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        **query: str,
    ) -> Manifest:
        return self._runner.run(self._server.request(method, path, query, body, content_type))

    def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        return self._runner.run(self._server.get(resource, namespace, name))

    def list(self, resource: Resource, namespace: str, **labels: str) -> list[Manifest]:
        return self._runner.run(self._server.list(resource, namespace, labels))

    def delete(self, resource: Resource, namespace: str, name: str) -> None:
        self._runner.run(self._server.delete(resource, namespace, name))

    def apply(self, path: str, manifest: Manifest) -> Manifest:
        return self.request("PATCH", path, manifest, APPLY, fieldManager="tests", force="true")

    def install_crds(self) -> None:
        """Ours and KubeRay's, and wait until they are served."""
        names = []
        for crd in [*crds().values(), *kuberay_crds(Path(os.environ["KUBERAY_CRDS"]))]:
            name = crd["metadata"]["name"]
            # A busy API server takes longer than one request may.
            until(partial(self._is_applied, f"{CRDS}/{name}", crd), f"{name} is applied")
            names.append(name)
        for name in names:
            until(partial(self._is_established, name), f"{name} is established")
        for resource in (BLEND_SERVICE, CORPUS_PRECOMPUTE, RAY_SERVICE, RAY_JOB):
            until(partial(self.is_served, resource), f"{resource.plural} are served")

    def _is_applied(self, path: str, manifest: Manifest) -> bool:
        self.apply(path, manifest)
        return True

    def _is_established(self, name: str) -> bool:
        conditions = self.request("GET", f"{CRDS}/{name}").get("status", {}).get("conditions") or []
        return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

    def uninstall_crds(self, names: Iterable[str]) -> None:
        """Delete CRDs, with all their objects on the whole cluster. Returns before those are gone."""
        for name in names:
            self.request("DELETE", f"{CRDS}/{name}")

    def is_served(self, resource: Resource) -> bool:
        """Whether the API server knows the kind."""
        try:
            served = self.request("GET", f"/apis/{resource.api_version}")["resources"]
        except Refused:
            return False
        return any(one["name"] == resource.plural for one in served)

    def service_addresses(self) -> int | None:
        """How many Services there may be; None where the API server does not say (before Kubernetes 1.33)."""
        try:
            ranges = self.request("GET", "/apis/networking.k8s.io/v1/servicecidrs")["items"]
        except Refused:
            return None
        return sum(ip_network(one["spec"]["cidrs"][0]).num_addresses for one in ranges)


class Team:
    """A namespace of its own, and what a person does in it."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace

    def make(self, name: str = "acme", **parts: Any) -> Manifest:
        """Create or change a BlendService that differs from a small one in `parts`."""
        manifest = {
            "apiVersion": BLEND_SERVICE.api_version,
            "kind": BLEND_SERVICE.kind,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": small_spec(**parts),
        }
        return self.kube.apply(BLEND_SERVICE.path(self.namespace, name), manifest)

    def touch(self, name: str = "acme") -> None:
        """Something about it changes that means nothing, so that the operator looks."""
        patch = {"metadata": {"annotations": {"tests/touched": uuid.uuid4().hex}}}
        self.kube.request("PATCH", BLEND_SERVICE.path(self.namespace, name), patch, MERGE)

    def find(self, resource: Resource, name: str) -> Manifest | None:
        return self.kube.get(resource, self.namespace, name)

    def wait_for(self, resource: Resource, name: str) -> Manifest:
        return until(lambda: self.find(resource, name), f"{resource.kind} {name}")

    def status(self, name: str = "acme") -> Manifest:
        live = self.find(BLEND_SERVICE, name)
        return {} if live is None else live.get("status") or {}

    def condition(self, type_: str, name: str = "acme") -> Manifest:
        found = [one for one in self.status(name).get("conditions") or [] if one["type"] == type_]
        return found[0] if found else {}

    def wait_for_condition(self, type_: str, status: str, reason: str = "") -> Manifest:
        def matches() -> Manifest | None:
            one = self.condition(type_)
            is_it = one.get("status") == status and reason in ("", one.get("reason"))
            return one if is_it else None

        return until(matches, f"{type_} is {status} {reason}", lambda: json.dumps(self.status(), indent=1))

    def is_ready(self, ray_service: str) -> None:
        """As KubeRay says that a RayService serves."""
        self.wait_for(RAY_SERVICE, ray_service)
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "NonZeroServeEndpoints",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        path = RAY_SERVICE.path(self.namespace, ray_service, "status")
        self.kube.request("PATCH", path, {"status": {"conditions": [ready]}}, MERGE)

    def selected(self) -> str:
        """The revision that requests go to."""
        service = self.wait_for(Resource("Service", "services"), "acme-grpc")
        return str(service["spec"]["selector"]["kintsugi.dev/revision"])


class Operator:
    """The operator's process."""

    def __init__(
        self,
        team: Team,
        identity: str,
        kubeconfig: Path | None = None,
        home: str = "",
        options: Sequence[str] | None = None,
    ) -> None:
        """`home`: the namespace of its pod, if it is not the team's. `options`: others than to watch the
        team's namespace alone."""
        self.port = free_port()
        self.log = Path(os.environ.get("TMPDIR", "/tmp")) / f"operator-{team.namespace}-{identity}.log"
        # Where tests run in a pod, these would lead to that pod's own cluster.
        here = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_SERVICE_")}
        environ = {**here, "POD_NAME": identity, "POD_NAMESPACE": home or team.namespace}
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "services"), str(ROOT / "operators")])
        if kubeconfig is not None:
            environ["KUBECONFIG"] = str(kubeconfig)
        command = [sys.executable, "-m", "kintsugi_operator"]
        command += options if options is not None else [f"--namespace={team.namespace}"]
        command.append(f"--port={self.port}")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def is_leader(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.port}/leader"
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(json.load(answer)["leader"])
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def wait_until_it_leads(self) -> None:
        until(self.is_leader, "the operator leads", self.said)

    def looks(self) -> int:
        """Number of looks at objects so far."""
        (found,) = self._samples("kintsugi_operator_reconcile_seconds_count")
        return int(found.value)

    def writes(self) -> int:
        """Number of writes to the API server so far; the Lease's apart."""
        requests = self.requests()
        return sum(requests[verb] for verb in WRITES)

    def requests(self) -> dict[str, int]:
        """Number of requests to the API server so far, by verb; the Lease's apart."""
        return {
            one.labels["verb"]: int(one.value) for one in self._samples("kintsugi_operator_requests_total")
        }

    def _samples(self, name: str) -> list[Sample]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return [sample for family in families for sample in family.samples if sample.name == name]

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """At once, as a node that is lost."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def until(
    found: Callable[[], T | None], what: str, more: Callable[[], str] = lambda: "", within_s: float = WITHIN_S
) -> T:
    """What comes within a time; else a failure that says what did not."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(Refused, Unavailable):
            value = found()
            if value:
                return value
        time.sleep(0.2)
    raise AssertionError(f"not within {within_s:.0f} s: {what}\n{more()}")


def kuberay_crds(path: Path) -> Iterator[Manifest]:
    """From a file or a folder."""
    for file in sorted(path.rglob("*.y*ml")) if path.is_dir() else [path]:
        for document in yaml.safe_load_all(file.read_text()):
            if document and document.get("kind") == "CustomResourceDefinition":
                yield document


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def kubeconfig_for(configuration: Configuration, token: str, path: Path) -> Path:
    """A kubeconfig for the same API server that authenticates with a token."""
    cluster: dict[str, Any] = {"server": configuration.host}
    if configuration.ssl_ca_cert:
        authority = Path(configuration.ssl_ca_cert).read_bytes()
        cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
    if not configuration.verify_ssl:
        cluster["insecure-skip-tls-verify"] = True
    context = {"cluster": "c", "user": "u"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [{"name": "x", "context": context}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def kube() -> Iterator[Kube]:
    """The cluster of KUBECONFIG."""
    with asyncio.Runner() as runner:
        configuration = Configuration()
        runner.run(load_kube_config(client_configuration=configuration))
        client = ApiClient(configuration)
        try:
            yield Kube(runner, ApiServer(client), configuration)
        finally:
            runner.run(client.close())


@contextlib.contextmanager
def team_of(cluster: Kube, labels: Mapping[str, str]) -> Iterator[Team]:
    """A namespace that goes again. Without a namespace controller's help it would keep its objects, so what
    has our finalizer is let go first."""
    name = f"kintsugi-{uuid.uuid4().hex[:8]}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels)}}
    cluster.request("POST", "/api/v1/namespaces", body)
    team = Team(cluster, name)
    try:
        yield team
    finally:
        for one in cluster.list(BLEND_SERVICE, name):
            path = BLEND_SERVICE.path(name, one["metadata"]["name"])
            with contextlib.suppress(Refused):
                cluster.request("PATCH", path, {"metadata": {"finalizers": []}}, MERGE)
        with contextlib.suppress(Refused):  # a test may have deleted it
            cluster.request("DELETE", f"/api/v1/namespaces/{name}")


needs_cluster = pytest.mark.skipif(bool(why_not()), reason=f"cluster tests: {why_not()}")
