"""A service on a Ray cluster of several hosts: shards, engines and gateways on hosts of their own, the head
with Redis, and all of it deployed as KubeRay does, by a request to the head's dashboard.

As a kubelet does, `tend` starts Ray again on a host where it ended.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.cluster.hosts import SWITCH, Host
from benchmarks.support.cluster.traffic import Book, Traffic, ask, connect
from benchmarks.support.engines import say
from benchmarks.support.servers import ONE_THREAD, REPOSITORY
from kintsugi.core.deploy import (
    ENGINE_DEPLOYMENT,
    GATEWAY_DEPLOYMENT,
    RAY_CLUSTER_ENVIRONMENT,
    SHARD_DEPLOYMENT,
    EngineExpert,
    EngineSpec,
    GatewaySpec,
    GatewaySpecExpert,
    ModelSpec,
    Placement,
    ServiceSpec,
    StoreExpert,
    StoreSpec,
    TierSpec,
    serve_config,
)
from kintsugi.precompute.local_ray import UNREAD
from kintsugi.serving.deployment import SERVE_ENVIRONMENT
from kintsugi_operator.objects.deployed import ANY_HOST, ENGINE_RESOURCE, GATEWAY_RESOURCE, SHARD_RESOURCE

SHARD, ENGINE, GATEWAY = SHARD_DEPLOYMENT, ENGINE_DEPLOYMENT, GATEWAY_DEPLOYMENT
HEAD = "head"
RAY_PORT, DASHBOARD_PORT, REDIS_PORT = 6379, 8265, 6379
RECONNECT_S = 600
"""Time for which workers wait for a lost head. KubeRay sets it where Redis is configured."""
CPUS = 4
FIRST_NUMBER = 10
"""The last part of the first host's address."""
OBJECT_STORE_BYTES = 80 << 20
ROLES: Mapping[str, Sequence[str]] = {
    HEAD: (),
    "one": (SHARD, GATEWAY),
    "two": (ENGINE, GATEWAY),
    "three": (SHARD,),
    "four": (ENGINE,),
    "five": (SHARD,),
}
"""Replicas for which each host has room. The last host joins when the store grows."""
HOSTS = tuple(ROLES)[:-1]
RESOURCES = {SHARD: SHARD_RESOURCE, ENGINE: ENGINE_RESOURCE, GATEWAY: GATEWAY_RESOURCE}
VLLM = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 << 20,
    # Every answer reads its chunk from the store.
    "enable_prefix_caching": False,
}
START_RAY = """
from ray._private.node import Node
from ray.scripts.scripts import main
Node.start_log_monitor = lambda node: None
main()
"""
"""`ray` without the log monitor of each host, which nothing reads here."""
START_S = 400.0
POLL_S = 0.5
STEADY_S = 5.0
"""Serve reports the replicas of a lost node as running until it has noticed."""


@dataclass(frozen=True)
class Replica:
    """A replica of a deployment, as Serve reports it."""

    deployment: str
    host: str
    """Address."""
    state: str
    name: str
    """Another one after every restart."""


class Bed:
    """The hosts and the service on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder / "host"
        self.place.mkdir()
        (folder / "logs").mkdir()
        names = folder / "names"
        self.hosts = {
            name: Host(name, FIRST_NUMBER + number, folder / name, self.place, names)
            for number, name in enumerate(ROLES)
        }
        lines = [f"{host.address} {name}" for name, host in self.hosts.items()]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self.book = Book()
        self._kubelets: dict[str, subprocess.Popen[bytes]] = {}
        self._redis: subprocess.Popen[bytes] | None = None
        engines = EngineSpec(
            replicas=2,
            quality="off",
            vllm=VLLM,
            expert=EngineExpert(ratio=0.15, loading_controller=False),
        )
        store = StoreSpec(
            shards=2,
            replication=2,
            ram_gib=0.125,
            tiers=(TierSpec(str(self.place / "ssd"), 2.0),),
            data_dir=str(self.place / "data"),
            expert=StoreExpert(host=ANY_HOST, insecure=True),
        )
        gateway = GatewaySpec(
            replicas=2,
            host=ANY_HOST,
            insecure=True,
            # A lost chunk must stay lost, so that it is found.
            expert=GatewaySpecExpert(fill_on_miss=False),
        )
        self.spec = ServiceSpec(ModelSpec("bundled"), engines, store, gateway)

    @property
    def head(self) -> Host:
        return self.hosts[HEAD]

    def start(self, has_redis: bool) -> None:
        """Start the hosts and the service, and wait until everything runs. ``has_redis``: with Redis."""
        if has_redis:
            self._redis = self._start_redis()
        for name in HOSTS:
            self.boot(name)
            # One after the other: together they would take longer than Ray waits.
            self.wait(partial(self._has_ray, name), START_S, f"Ray starts on {name}")
        self.wait(lambda: self._ask_serve("GET") is not None, START_S, "the head's dashboard answers")
        self.deploy(self.spec)
        self.wait_ready(START_S)

    def _start_redis(self) -> subprocess.Popen[bytes]:
        command = ["redis-server", "--bind", SWITCH, "--port", str(REDIS_PORT), "--protected-mode", "no"]
        command += ["--save", "", "--appendonly", "no"]
        with (self.folder / "logs/redis").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log)

    def boot(self, name: str) -> None:
        self.hosts[name].boot()
        self._start_ray(name)

    def _has_ray(self, name: str) -> bool:
        return "Ray runtime started" in (self.folder / f"logs/{name}").read_text()

    def kill(self, name: str) -> None:
        self.hosts[name].kill()
        self._kubelets.pop(name).wait()

    def close(self) -> None:
        for name in list(self._kubelets):
            self.kill(name)
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()

    def _start_ray(self, name: str) -> None:
        host, is_head = self.hosts[name], name == HEAD
        resources = json.dumps({RESOURCES[role]: 1 for role in ROLES[name]})
        options = {
            "node-ip-address": host.address,
            "num-cpus": 0 if is_head else CPUS,
            "resources": resources,
            "object-store-memory": OBJECT_STORE_BYTES,
            **(
                {"port": RAY_PORT, "dashboard-host": ANY_HOST, "temp-dir": self.place / "ray"}
                if is_head
                else {"address": f"{HEAD}:{RAY_PORT}"}
            ),
        }
        shutil.rmtree(self.folder / name / "ray", ignore_errors=True)
        command = [sys.executable, "-c", START_RAY, "start", "--block", "--disable-usage-stats"]
        command += [f"--{option}={value}" for option, value in options.items()]
        command += ["--head"] * is_head
        environment = self.environment()
        if is_head and self._redis is not None:
            environment["RAY_REDIS_ADDRESS"] = f"{SWITCH}:{REDIS_PORT}"
            environment["RAY_external_storage_namespace"] = "bed"
        elif self._redis is not None:
            environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(RECONNECT_S)
        self._kubelets[name] = host.start(command, environment, self.folder / f"logs/{name}")

    def environment(self) -> dict[str, str]:
        """The environment of processes on hosts, as in the operator's pods."""
        return {
            **RAY_CLUSTER_ENVIRONMENT,
            **SERVE_ENVIRONMENT,
            **UNREAD,
            **ONE_THREAD,
            # Five hosts share two cores.
            "RAY_prestart_worker_first_driver": "false",
            "RAY_raylet_start_wait_time_s": "120",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": ":".join(str(REPOSITORY / part) for part in ("services", "operators", ".")),
            "HOME": str(self.place),
            # The other resolver asks only name servers, and here are none.
            "GRPC_DNS_RESOLVER": "native",
        }

    def tend(self) -> None:
        """Start Ray again on hosts that are up and where it ended."""
        for name, kubelet in list(self._kubelets.items()):
            if kubelet.poll() is not None and self.hosts[name].is_up:
                say(f"Ray ended on {name} ({kubelet.returncode}), and starts again")
                self._start_ray(name)

    def deploy(self, spec: ServiceSpec) -> None:
        """Apply the configuration of ``spec``."""
        placement = Placement({SHARD_RESOURCE: 1}, {ENGINE_RESOURCE: 1}, {GATEWAY_RESOURCE: 1})
        response = httpx.put(self._serve_url(), json=serve_config(spec, placement), timeout=60)
        response.raise_for_status()
        self.spec = spec

    def scale(self, shards: int = 2, engines: int = 2, gateways: int = 2) -> None:
        spec = self.spec
        self.deploy(
            replace(
                spec,
                store=replace(spec.store, shards=shards),
                engines=replace(spec.engines, replicas=engines),
                gateway=replace(spec.gateway, replicas=gateways),
            )
        )

    def _serve_url(self) -> str:
        return f"http://{self.head.address}:{DASHBOARD_PORT}/api/serve/applications/"

    def _ask_serve(self, method: str) -> dict[str, Any] | None:
        """Return what Serve reports; None while the head does not answer."""
        try:
            response = httpx.request(method, self._serve_url(), timeout=10)
            response.raise_for_status()
            found: dict[str, Any] = response.json()
            return found
        except (httpx.HTTPError, ValueError):
            return None

    def replicas(self) -> list[Replica]:
        """Return all replicas; none while the head does not answer."""
        found = []
        for application in ((self._ask_serve("GET") or {}).get("applications") or {}).values():
            for name, deployment in application["deployments"].items():
                for one in deployment["replicas"]:
                    found.append(Replica(name, one.get("node_ip") or "", one["state"], one["replica_id"]))
        return found

    def running(self, deployment: str) -> list[str]:
        """Return the addresses of the hosts of running replicas."""
        return [one.host for one in self.replicas() if (one.deployment, one.state) == (deployment, "RUNNING")]

    def host_of(self, *roles: str) -> str:
        """Return the name of a host, apart from the head, that runs replicas of just these deployments."""
        replicas = self.replicas()
        for name in (*HOSTS[1:], "five"):
            found = {one.deployment for one in replicas if one.host == self.hosts[name].address}
            if found == set(roles):
                return name
        raise RuntimeError(f"no host runs just {roles}: {replicas}")

    def wanted(self) -> dict[str, int]:
        spec = self.spec
        return {
            SHARD: spec.store.shards,
            ENGINE: spec.engines.replicas,
            GATEWAY: spec.gateway.replicas,
        }

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until exactly the wanted replicas have run for `STEADY_S`, and every gateway is ready."""
        since_s = time.monotonic()

        def is_ready() -> bool:
            found = self.replicas()
            counts = {name: sum(one.deployment == name for one in found) for name in self.wanted()}
            if counts != self.wanted() or any(one.state != "RUNNING" for one in found):
                nonlocal since_s
                since_s = time.monotonic()
            return time.monotonic() - since_s >= STEADY_S

        self.wait(is_ready, timeout_s, "all replicas run")
        self.wait(
            lambda: all(map(self._is_gateway_ready, self.running(GATEWAY))), timeout_s, "gateways are ready"
        )

    def _is_gateway_ready(self, address: str) -> bool:
        try:
            return httpx.get(f"http://{address}:8000/readyz", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def wait(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Raises `TimeoutError`."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {timeout_s:.0f} s: {what}; {self.replicas()}")
            if self._redis is not None and self._redis.poll() is not None:
                raise RuntimeError("Redis ended")
            self.tend()
            time.sleep(POLL_S)

    @contextmanager
    def traffic(self, without: str = "") -> Iterator[Traffic]:
        """Ask questions at all gateways, apart from those on the host ``without``."""
        lost = self.hosts[without].address if without else ""
        addresses = [address for address in self.running(GATEWAY) if address != lost]
        traffic = Traffic(addresses, self.book)
        try:
            yield traffic
        finally:
            traffic.stop()

    def gateway(self, without: str = "") -> str:
        """Return the address of a gateway on another host than ``without``."""
        lost = self.hosts[without].address if without else ""
        return next(address for address in self.running(GATEWAY) if address != lost)

    def find_lost(self) -> list[str]:
        """Return the acknowledged chunks that a gateway does not find, over all gateways."""
        lost: set[str] = set()
        for address in self.running(GATEWAY):
            with connect(address) as client:
                lost.update(self.book.find_lost(client))
        return sorted(lost)

    def count_wrong(self) -> int:
        """Ask for every chunk again, at each gateway; learn the answers to new ones by full prefill first.
        Returns how many answers differ from a full prefill's."""
        wrong = 0
        for address in self.running(GATEWAY):
            with connect(address) as client:
                self.book.learn(client)
                texts = self.book.texts.values()
                wrong += sum(ask(client, text).token_ids != self.book.answers[text] for text in texts)
        return wrong
