"""The CPU profile's own pods, played by podman from the image that `make images` built; Ray's operator apart.

The pods are what the operator makes of the chart's BlendService: a head and a shard, a head, an engine and a
gateway, with the limits, users and read-only file systems that they have in a cluster.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kintsugi.sdk.client import Client, ClientOptions
from kintsugi.sdk.types import Sampling
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.api.status import BlendServiceStatus
from kintsugi_operator.desired.plan import plan_service
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.pods import USER_ID, quantity
from kintsugi_operator.observed.views import Observed, RayServiceView
from tests.e2e.kubernetes.containers import Player
from tests.e2e.kubernetes.kuberay import Network, Node, PlayedService
from tests.e2e.kubernetes.rendering import HELMS, NAMESPACE, RELEASE, REPOSITORY, helm_named, one

pytestmark = [pytest.mark.full, pytest.mark.images, pytest.mark.timeout(1500)]

MEMORY_FREE_GIB = 8
"""The peaks of the profile's pods add up to 6."""
GREEDY = Sampling(max_tokens=8, temperature=0.0)
TEXTS = [
    "The tide comes in twice a day in most harbours of the coast, and twice a day it goes.",
    "Salt was once worth its weight in gold, and roads were built for it alone.",
]
CONTENTS = """
import hashlib, json, pathlib
root = pathlib.Path("/opt/kintsugi/kintsugi")
files = root.rglob("*.py")
print(json.dumps({str(one.relative_to(root)): hashlib.sha256(one.read_bytes()).hexdigest() for one in files}))
"""
"""Run within the image: the code that its pods run."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Played:
    """The service under podman, and the chart's objects that it was made from."""

    service: PlayedService
    player: Player
    manifests: list[Manifest]

    @property
    def token(self) -> str:
        return str(one(self.manifests, "Secret", f"{RELEASE}-client")["stringData"]["token"])

    def gateway(self, port: int) -> str:
        return f"{self.service.address(self.service.one('gateway'))}:{port}"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("pods")
    player = Player(folder)
    manifests = helm_named(HELMS[1]).template("cpu")
    blend = one(manifests, "BlendService")
    check_image(player, blend["spec"]["image"])
    check_memory()
    spec = from_manifest(BlendServiceSpec, blend["spec"])
    owner = Owner("BlendService", RELEASE, NAMESPACE, "uid")
    seen = Observed(store=RayServiceView(is_ready=True))
    objects = plan_service(spec, owner, BlendServiceStatus(), seen, datetime.now(UTC)).objects
    secrets = {each["metadata"]["name"]: each["stringData"] for each in manifests if each["kind"] == "Secret"}
    network = Network(player, f"kintsugi-{os.getpid()}")
    if problem := network.create():
        pytest.skip(f"podman makes no network here: {problem}")
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    memory.chmod(0o755)
    service = PlayedService(player, network, Node(folder, memory, secrets), objects)
    try:
        service.start()
        yield Played(service, player, manifests)
    finally:
        service.stop()
        network.remove()
        shutil.rmtree(memory)


def check_image(player: Player, image: str) -> None:
    """Skips where it is not here, or not made from this working tree."""
    if os.geteuid() != 0:
        pytest.skip("pods get addresses of their own from root's podman only")
    if player.run("image", "exists", image).returncode:
        pytest.skip(f"no {image}: make images ONLY=serving-cpu (MAKE_BASE=1 without a registry of images)")
    done = player.run("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", CONTENTS)
    if done.returncode:
        pytest.skip(f"podman cannot start containers here: {done.stderr.strip().splitlines()[-1]}")
    sources = REPOSITORY / "services" / "kintsugi"
    here = {
        str(file.relative_to(sources)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sources.rglob("*.py")
    }
    if json.loads(done.stdout) != here:
        pytest.skip(f"{image} was made from other sources than these: make images ONLY=serving-cpu")


def check_memory() -> None:
    free_gib = psutil.virtual_memory().available / (1 << 30)
    if free_gib < MEMORY_FREE_GIB:
        pytest.skip(f"{free_gib:.1f} GiB of memory are free, the pods take up to {MEMORY_FREE_GIB}")


def test_chunks_that_were_put_are_hit(played: Played) -> None:
    options = ClientOptions(token=played.token, insecure=True)
    with Client(played.gateway(7500), namespace="default", options=options) as client:
        assert all(put.new for put in client.put_chunks(TEXTS, wait=True))
        answer = client.generate(TEXTS, "When does the tide come in?", sampling=GREEDY)
    assert answer.text
    assert answer.accounting["chunks_hit"] == len(TEXTS), answer.accounting
    assert answer.accounting["tokens_hit"] > 0


def test_the_charts_first_request_is_answered(played: Played) -> None:
    """The pod of `helm test`, but with this image's Python instead of that of the operator's."""
    pod = copy.deepcopy(one(played.manifests, "Pod", f"{RELEASE}-first-request"))
    (container,) = pod["spec"]["containers"]
    container["image"] = played.service.one("gateway").container["image"]
    for variable in container["env"]:
        if variable.pop("valueFrom", None):
            variable["value"] = played.token
        if variable["name"] == "KINTSUGI_URL":
            variable["value"] = f"http://{played.gateway(8000)}"
    code, said = played.service.finished(pod)
    assert code == 0, said
    assert json.loads(said)["usage"]["completion_tokens"] > 0


def test_nobody_gets_in_without_the_token(played: Played) -> None:
    body = {"model": "bundled", "prompt": "Kintsugi", "max_tokens": 1}
    headers = {"X-Kintsugi-Namespace": "default"}
    answer = httpx.post(f"http://{played.gateway(8000)}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 401


def test_the_images_own_health_check_passes_beside_the_gateway(played: Played) -> None:
    """Kubernetes asks its own; this one is for who runs the image by itself."""
    gateway = played.service.one("gateway")
    found = played.player.run(
        "image", "inspect", "--format", "{{json .HealthCheck}}", gateway.container["image"]
    )
    kind, *command = json.loads(found.stdout)["Test"]
    assert kind == "CMD"
    done = played.player.run("exec", played.service.container_name(gateway), *command)
    assert done.returncode == 0, done.stderr


def test_every_pod_is_as_restricted_as_its_template_says(played: Played) -> None:
    for pod in played.service.pods:
        status = dict(line.split(":", 1) for line in played.service.read(pod, "/proc/1/status").splitlines())
        assert status["Uid"].split() == [str(USER_ID)] * 4
        assert int(status["CapEff"], 16) == 0
        assert status["NoNewPrivs"].strip() == "1"
        mounts = [line.split() for line in played.service.read(pod, "/proc/1/mounts").splitlines()]
        (root,) = (options for _, path, _, options, *_ in mounts if path == "/")
        assert "ro" in root.split(",")


def test_every_pod_is_alive_and_ready_within_its_memory(played: Played) -> None:
    for pod in played.service.pods:
        for probe in ("livenessProbe", "readinessProbe"):
            assert played.service.is_healthy(pod, probe), f"{pod.name}: {probe}"
        limit = quantity(pod.container["resources"]["limits"]["memory"])
        assert played.service.memory_peak(pod) < limit, pod.name
