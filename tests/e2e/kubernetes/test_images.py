"""The operator's image, built here and run as a pod would run it. Where no builder is, one line says so."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.images import IMAGES, Builder, list_contents, make_sbom

from tests.e2e.kubernetes.containers import (
    PODMAN_OPTIONS,
    REPOSITORY,
    TAG,
    Player,
    as_a_kubelet_starts,
    image_builder,
    operator_image,
    podman_path,
)
from tests.e2e.kubernetes.rendering import HELMS, NAMESPACE, RELEASE, helm_named, one

pytestmark = [pytest.mark.full, pytest.mark.images, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Built:
    """The operator's image and who built it."""

    maker: Builder
    reference: str


@pytest.fixture(scope="module")
def operator() -> Built:
    """Built from this working tree."""
    maker = image_builder()
    return Built(maker, operator_image(maker))


@pytest.fixture(scope="module")
def podman(operator: Built) -> str:
    return podman_path()


def run(podman: str, *arguments: str, entrypoint: str = "python") -> subprocess.CompletedProcess[str]:
    """A command in a container of the image, as restricted as a pod."""
    command = [podman, "run", "--rm", "--no-healthcheck", *PODMAN_OPTIONS, "--entrypoint", entrypoint]
    return subprocess.run(
        [*command, f"{REPOSITORY}/operator:{TAG}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_it_is_not_root_and_its_health_check_is_in_it(operator: Built) -> None:
    config = json.loads(operator.maker.run("inspect", "--type", "image", operator.reference))["Docker"][
        "config"
    ]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["python", "-m", "kintsugi_operator"]
    kind, program, *_ = config["Healthcheck"]["Test"]
    assert (kind, program) == ("CMD", "python")


def test_everything_in_it_is_listed_as_locked(operator: Built) -> None:
    found = list_contents(operator.maker, operator.reference)
    python = {name.lower().replace("_", "-"): version for kind, name, version in found if kind == "pypi"}
    lines = IMAGES["operator"].lock.read_text().splitlines()
    pins = [line.removesuffix(" \\") for line in lines if line[:1].isalnum()]
    assert python.pop("kintsugi-kv")
    assert sorted(f"{name}=={version}" for name, version in python.items()) == sorted(pins)
    document = json.loads(make_sbom(operator.reference, found))
    assert document["bomFormat"] == "CycloneDX"
    listed = {component["purl"] for component in document["components"]}
    assert len(listed) == len(found)
    assert any(url.startswith("pkg:deb/debian/libc6@") for url in listed)


def test_it_imports_no_engine_and_fits_its_memory(podman: str) -> None:
    program = (
        "import resource, sys, kintsugi_operator.operator\n"
        "heavy = {'torch', 'ray', 'vllm'} & set(sys.modules)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, sorted(heavy))"
    )
    done = run(podman, "-c", program)
    assert done.returncode == 0, done.stderr
    mebibytes, heavy = done.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert int(mebibytes) < 128


def test_nothing_in_it_can_be_written_and_there_is_no_pip(podman: str) -> None:
    done = run(podman, "-c", "open('/opt/kintsugi/x', 'w')")
    assert "Read-only file system" in done.stderr or "Permission denied" in done.stderr
    assert "No module named pip" in run(podman, "-m", "pip").stderr


def test_the_charts_scripts_find_their_interpreter(podman: str) -> None:
    done = run(
        podman, "-c", "import json, ssl, urllib.request; print(ssl.OPENSSL_VERSION)", entrypoint="python3"
    )
    assert done.returncode == 0, done.stderr


def test_the_charts_deployment_starts_under_podman_and_is_healthy(operator: Built, tmp_path: Path) -> None:
    """Its own manifest and the image's own health check: nothing is assumed. It waits for the lease."""
    player = Player(tmp_path)
    images = f"image.repository={REPOSITORY},image.tag={TAG}"
    deployment = one(helm_named(HELMS[1]).template("cpu", "--set", images), "Deployment")
    fields = {"metadata.name": f"{RELEASE}-operator-0", "metadata.namespace": NAMESPACE}
    config = json.loads(operator.maker.run("inspect", "--type", "image", operator.reference))
    health_check = config["Docker"]["config"]["Healthcheck"]["Test"][1:]
    with player.played(as_a_kubelet_starts(deployment, tmp_path, fields)) as container:
        player.eventually(container, health_check)
        status = player.eventually(container, ["cat", "/proc/1/status"])
        written = player.run("exec", container, "python", "-c", "open('/opt/x', 'w')")
    found = dict(line.split(":", 1) for line in status.splitlines())
    assert found["Uid"].split() == ["65532"] * 4
    assert int(found["VmHWM"].split()[0]) < 128 << 10, "the memory that the chart gives it"
    assert int(found["CapEff"], 16) == 0
    assert "Read-only file system" in written.stderr
