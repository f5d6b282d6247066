"""The operator's image, built here and run as a pod would run it. Where no builder is, one line says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.images import (
    IMAGES,
    LIMITS,
    MADE_BASE,
    Builder,
    ImagesError,
    build,
    builder,
    contents,
    exists,
    fill_context,
    make_base,
    sbom,
)

pytestmark = [pytest.mark.images, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[3]
REFERENCE = "localhost/kintsugi-test/operator:test"
POD_USER = "10001"
"""Any but root and not the image's own: a cluster may choose."""
PODMAN_OPTIONS = ("--network", "none", "--read-only", "--cap-drop", "all", "--user", POD_USER, *LIMITS)


@dataclass(frozen=True)
class Built:
    """The operator's image and who built it."""

    maker: Builder
    reference: str


@pytest.fixture(scope="module")
def operator() -> Built:
    """Built from this working tree, on a base made here."""
    try:
        maker = builder()
    except ImagesError as error:
        pytest.skip(str(error))
    if maker.name == "docker":
        pytest.skip("only docker is here, and its daemon is not ours to use: install buildah")
    if os.geteuid() != 0:
        pytest.skip("a base is made by root: make images builds on another")
    if not exists(maker, MADE_BASE):
        if shutil.which("debootstrap") is None:
            pytest.skip(f"no {MADE_BASE}, and no debootstrap to make it")
        make_base(maker)
    fill_context(IMAGES["operator"])
    build(maker, IMAGES["operator"], REFERENCE, MADE_BASE)
    return Built(maker, REFERENCE)


@pytest.fixture(scope="module")
def podman(operator: Built) -> str:
    path = shutil.which("podman")
    if path is None:
        pytest.skip("podman is not here to run an image with")
    return path


def run(podman: str, *arguments: str, entrypoint: str = "python") -> subprocess.CompletedProcess[str]:
    """A command in a container of the image, as restricted as a pod."""
    command = [podman, "run", "--rm", "--no-healthcheck", *PODMAN_OPTIONS, "--entrypoint", entrypoint]
    return subprocess.run(
        [*command, REFERENCE, *arguments], capture_output=True, text=True, check=False, timeout=120
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
    found = contents(operator.maker, operator.reference)
    python = {name.lower().replace("_", "-"): version for kind, name, version in found if kind == "pypi"}
    pins = [line for line in IMAGES["operator"].lock.read_text().splitlines() if line and line[0] != "#"]
    assert python.pop("kintsugi-kv")
    assert sorted(f"{name}=={version}" for name, version in python.items()) == sorted(pins)
    document = json.loads(sbom(operator.reference, found))
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


@pytest.fixture
def waiting_operator(podman: str, tmp_path: Path) -> Iterator[str]:
    """The id of a container whose operator finds nobody at its API server's address, and waits."""
    config = tmp_path / "kubeconfig"
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "none", "context": {"cluster": "none", "user": "none"}}
    user: dict[str, object] = {"name": "none", "user": {}}
    lists = {"clusters": [cluster], "contexts": [context], "users": [user]}
    config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "none", **lists}))
    config.chmod(0o644)
    mounted = ["--volume", f"{config}:/kubeconfig:ro", "--env", "KUBECONFIG=/kubeconfig"]
    command = [podman, "run", "--detach", "--no-healthcheck", *PODMAN_OPTIONS, *mounted, REFERENCE]
    started = subprocess.run(command, capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stderr
    container = started.stdout.strip()
    yield container
    subprocess.run([podman, "rm", "--force", "--time", "5", container], capture_output=True, check=True)


def test_it_is_healthy_while_it_waits_for_the_lease(
    podman: str, operator: Built, waiting_operator: str
) -> None:
    """The image's own health check, run in the container: nothing is assumed to exist."""
    config = json.loads(operator.maker.run("inspect", "--type", "image", operator.reference))["Docker"][
        "config"
    ]
    check = config["Healthcheck"]["Test"][1:]
    deadline = time.monotonic() + 60
    while True:
        command = [podman, "exec", waiting_operator, *check]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        logs = subprocess.run([podman, "logs", waiting_operator], capture_output=True, text=True, check=False)
        assert time.monotonic() < deadline, done.stderr + logs.stderr
        time.sleep(0.5)
