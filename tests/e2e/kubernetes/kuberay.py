"""What KubeRay and a kubelet make of a RayService, as far as podman needs it to play the pods of one.

Neither is here. Ray's command line, environment and the way that Serve's configuration takes (the dashboard's
REST API) are KubeRay's since 1.4; volumes, addresses and probes are as kubelets and Services give them. The
pod templates themselves are the operator's: nothing in them is changed but what podman 4 does not know.
"""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from kintsugi_operator.objects.pods import AGENT_PORT, DASHBOARD_PORT, GCS_PORT, METRICS_PORT, quantity
from tests.e2e.kubernetes.containers import Player
from tests.e2e.kubernetes.rendering import NAMESPACE

READY_S = 300.0
"""For a pod, or a whole application, on one busy core."""
MEMORY_PEAK = "/sys/fs/cgroup/memory/memory.max_usage_in_bytes", "/sys/fs/cgroup/memory.peak"
"""Of a container, from within: control groups of version 1 and 2."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class RayPod:
    """A pod of a RayService's cluster."""

    service: str
    group: str
    """Name of the worker group; empty for the head."""
    start: Mapping[str, str]
    """rayStartParams."""
    template: Manifest

    @property
    def name(self) -> str:
        return f"{self.service}-{self.group or 'head'}"

    @property
    def head_host(self) -> str:
        """Host of KubeRay's Service in front of the head."""
        return f"{self.service}-head-svc.{NAMESPACE}.svc.cluster.local"

    @property
    def role(self) -> str:
        return str(self.template["metadata"]["labels"]["kintsugi.dev/role"])

    @property
    def container(self) -> Manifest:
        (container,) = self.template["spec"]["containers"]
        return dict(container)

    def command(self) -> str:
        """For a shell, as KubeRay writes it."""
        limit = self.container["resources"]["limits"]["memory"]
        own = {
            "memory": str(int(quantity(limit))),
            "metrics-export-port": str(METRICS_PORT),
            "dashboard-agent-listen-port": str(AGENT_PORT),
            **({} if not self.group else {"address": f"{self.head_host}:{GCS_PORT}"}),
        }
        options = " ".join(f"--{name}={value}" for name, value in {**self.start, **own}.items())
        return f"ulimit -n 65536; ray start {'' if self.group else '--head '}--block {options}"


def ray_pods(objects: Iterable[Manifest]) -> list[RayPod]:
    """One of each group of all RayServices, heads before their workers."""
    found = []
    for one in objects:
        if one["kind"] == "RayService":
            service, cluster = one["metadata"]["name"], one["spec"]["rayClusterConfig"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                found.append(
                    RayPod(service, group.get("groupName", ""), group["rayStartParams"], group["template"])
                )
    return found


@dataclass(frozen=True)
class Node:
    """What a kubelet has for its pods."""

    folder: Path
    memory: Path
    """A folder in memory."""
    secrets: Mapping[str, Mapping[str, str]]

    def pod(self, pod: RayPod, hosts: Mapping[str, str]) -> Manifest:
        """For podman, which starts no probes without systemd, publishes every port on the host, and knows
        neither volumes' owners nor ephemeral ones."""
        spec = copy.deepcopy(pod.template["spec"])
        spec["hostAliases"] = [{"ip": ip, "hostnames": [name]} for name, ip in hosts.items()]
        spec["volumes"] = [self._volume(pod.name, one) for one in spec["volumes"]]
        (container,) = spec["containers"]
        for name in ("startupProbe", "livenessProbe", "readinessProbe", "ports"):
            del container[name]
        container["command"] = ["/bin/bash", "-c", "--"]
        container["args"] = [pod.command()]
        container["env"] += [
            {"name": "RAY_PORT", "value": str(GCS_PORT)},
            {"name": "RAY_ADDRESS", "value": f"{pod.head_host if pod.group else '127.0.0.1'}:{GCS_PORT}"},
            {"name": "RAY_CLOUD_INSTANCE_ID", "value": pod.name},
        ]
        metadata = {"name": pod.name, "labels": pod.template["metadata"]["labels"]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _volume(self, pod: str, volume: Manifest) -> Manifest:
        name = volume["name"]
        in_memory = volume.get("emptyDir", {}).get("medium") == "Memory"
        folder = (self.memory if in_memory else self.folder) / pod / name
        folder.mkdir(parents=True)
        # As kubelets make them: for everybody.
        folder.chmod(0o777)
        for key, text in self.secrets[volume["secret"]["secretName"]].items() if "secret" in volume else ():
            (folder / key).write_text(text)
        return {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}


class Network:
    """A network of podman's own, and who has which address on it."""

    def __init__(self, player: Player, name: str) -> None:
        self.name = name
        self._player = player
        self._given: dict[str, str] = {}

    def create(self) -> str:
        """Why there is none, in podman's words; empty if there is."""
        done = self._player.run("network", "create", self.name)
        return _last_line(done.stderr) if done.returncode else ""

    def remove(self) -> None:
        self._player.run("network", "rm", "--force", self.name)

    @functools.cached_property
    def _prefix(self) -> str:
        (about,) = json.loads(self._player.run("network", "inspect", self.name).stdout)
        return str(about["subnets"][0]["subnet"]).rsplit(".", 1)[0]

    def address(self, pod: str) -> str:
        """Always the same for the same pod."""
        return self._given.setdefault(pod, f"{self._prefix}.{len(self._given) + 10}")


class PlayedService:
    """The pods of RayServices under podman, and what asks after them."""

    def __init__(self, player: Player, network: Network, node: Node, objects: Iterable[Manifest]) -> None:
        self._player = player
        self._network = network
        self._node = node
        self._services = {one["metadata"]["name"]: one for one in objects if one["kind"] == "RayService"}
        self.pods = ray_pods(self._services.values())
        self._hosts = self._service_addresses()
        self._files: list[Path] = []

    def _service_addresses(self) -> dict[str, str]:
        """Names of Services, and the one pod behind each."""
        addresses = {pod.head_host: self.address(pod) for pod in self.pods if not pod.group}
        directory = next(one for one in self.pods if not one.group and "directory" in _ports(one))
        return {**addresses, f"kintsugi-directory.{NAMESPACE}.svc": self.address(directory)}

    def address(self, pod: RayPod) -> str:
        return self._network.address(pod.name)

    def one(self, role: str) -> RayPod:
        """The first pod with a role of ours."""
        return next(pod for pod in self.pods if pod.role == role)

    def start(self) -> None:
        """All pods; each is waited for as a kubelet would, then Serve gets its configuration."""
        for pod in self.pods:
            self.play(self._node.pod(pod, self._hosts), self.address(pod))
            self.eventually(functools.partial(self.is_healthy, pod), f"{pod.name} is not healthy")
        for name in self._services:
            self.deploy(name)

    def finished(self, manifest: Manifest) -> tuple[int, str]:
        """The exit code of a pod that ends by itself, and what it printed."""
        name = manifest["metadata"]["name"]
        self.play(manifest, self._network.address(name))
        (container,) = manifest["spec"]["containers"]
        full_name = f"{name}-{container['name']}"
        code = int(self._player.run("wait", full_name).stdout)
        done = self._player.run("logs", full_name)
        return code, done.stdout + done.stderr

    def play(self, manifest: Manifest, address: str) -> None:
        file = self._node.folder / f"{manifest['metadata']['name']}.yaml"
        file.write_text(yaml.safe_dump(manifest))
        self._files.append(file)
        done = self._player.run("play", "kube", "--network", self._network.name, "--ip", address, str(file))
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        for file in reversed(self._files):
            self._player.run("play", "kube", "--down", str(file))

    def is_healthy(self, pod: RayPod, probe: str = "startupProbe") -> bool:
        """What one of its probes answers."""
        asked = pod.container[probe]["httpGet"]
        port = _ports(pod).get(asked["port"], asked["port"])
        try:
            answer = httpx.get(f"http://{self.address(pod)}:{port}{asked['path']}", timeout=10)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def deploy(self, service: str) -> None:
        """A RayService's Serve configuration, until all of it runs."""
        (head,) = (pod for pod in self.pods if pod.service == service and not pod.group)
        url = f"http://{self.address(head)}:{DASHBOARD_PORT}/api/serve/applications/"
        config = yaml.safe_load(self._services[service]["spec"]["serveConfigV2"])
        httpx.put(url, json=config, timeout=60).raise_for_status()
        said = ""

        def runs() -> bool:
            nonlocal said
            applications = httpx.get(url, timeout=60).json()["applications"]
            statuses = {one["status"] for one in applications.values()}
            said = json.dumps(applications, indent=1)
            assert "DEPLOY_FAILED" not in statuses, said
            return statuses == {"RUNNING"}

        self.eventually(runs, lambda: f"{service} does not run: {said}")

    def eventually(self, condition: Callable[[], bool], problem: str | Callable[[], str]) -> None:
        """Fails with what every pod logged."""
        deadline = time.monotonic() + READY_S
        while not condition():
            if time.monotonic() > deadline:
                said = problem if isinstance(problem, str) else problem()
                raise AssertionError(f"{said}\n{self.logs()}")
            time.sleep(0.5)

    def container_name(self, pod: RayPod) -> str:
        return f"{pod.name}-{pod.container['name']}"

    def logs(self) -> str:
        """Their last lines."""
        return "\n".join(
            f"--- {pod.name}\n{_tail(self._player.run('logs', self.container_name(pod)))}"
            for pod in self.pods
        )

    def read(self, pod: RayPod, path: str) -> str:
        """A file within a pod."""
        done = self._player.run("exec", self.container_name(pod), "cat", path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def memory_peak(self, pod: RayPod) -> int:
        """Bytes."""
        for path in MEMORY_PEAK:
            done = self._player.run("exec", self.container_name(pod), "cat", path)
            if done.returncode == 0:
                return int(done.stdout)
        raise AssertionError(done.stderr)


def _ports(pod: RayPod) -> dict[str, int]:
    return {one["name"]: one["containerPort"] for one in pod.container["ports"]}


def _tail(done: Any) -> str:
    return "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
