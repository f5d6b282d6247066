"""Images that tests build, and pods that podman plays as a kubelet would start them."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.images import (
    IMAGES,
    LIMITS,
    MADE_BASE,
    Builder,
    ImagesError,
    build,
    exists,
    fill_context,
    find_builder,
)
from scripts.images import make_base as made_base

REPOSITORY = "localhost/kintsugi-test"
TAG = "test"
POD_USER = "10001"
"""Any but root and not the image's own: a cluster may choose."""
PODMAN_OPTIONS = ("--network", "none", "--read-only", "--cap-drop", "all", "--user", POD_USER, *LIMITS)
PLAYED_S = 60.0
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

Manifest = dict[str, Any]


def image_builder() -> Builder:
    """What builds here, or a skip that says why nothing does."""
    try:
        maker = find_builder()
    except ImagesError as error:
        pytest.skip(str(error))
    if maker.name == "docker":
        pytest.skip("only docker is here, and its daemon is not a test's to use: install podman")
    if os.geteuid() != 0:
        pytest.skip("a base is made by root; make images takes another")
    return maker


def operator_image(maker: Builder) -> str:
    """The operator's image of this working tree, on a base made here."""
    if not exists(maker, MADE_BASE):
        if shutil.which("debootstrap") is None:
            pytest.skip(f"no {MADE_BASE}, and no debootstrap to make it")
        made_base(maker)
    reference = f"{REPOSITORY}/operator:{TAG}"
    fill_context(IMAGES["operator"])
    build(maker, IMAGES["operator"], reference, MADE_BASE)
    return reference


def podman_path() -> str:
    """Or a skip."""
    path = shutil.which("podman")
    if path is None:
        pytest.skip("podman is not here to run images with")
    return path


class Player:
    """podman with settings that small machines allow."""

    def __init__(self, folder: Path) -> None:
        self._podman = podman_path()
        self._folder = folder
        config = folder / "containers.conf"
        limits = json.dumps([limit for limit in LIMITS if not limit.startswith("--")])
        engine = '[engine]\nruntime="runc"\ncgroup_manager="cgroupfs"\n' if shutil.which("runc") else ""
        config.write_text(f"[containers]\ndefault_ulimits={limits}\n{engine}")
        self._env = {**os.environ, "CONTAINERS_CONF": str(config)}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """podman's answer, whatever that is."""
        command = [self._podman, *arguments]
        return subprocess.run(
            command, env=self._env, capture_output=True, text=True, check=False, timeout=300
        )

    @contextmanager
    def played(self, manifest: Manifest) -> Iterator[str]:
        """The name of the only container of a manifest's pod, while it runs. Skips where none can."""
        file = self._folder / f"{manifest['metadata']['name']}.yaml"
        file.write_text(yaml.safe_dump(manifest))
        try:
            done = self.run("play", "kube", str(file))
            if done.returncode:
                pytest.skip(
                    f"podman play kube cannot start pods here: {done.stderr.strip().splitlines()[-1]}"
                )
            listed = self.run("ps", "--all", "--format", "{{.Names}}").stdout.split()
            name = manifest["metadata"]["name"]
            (container,) = (one for one in listed if one.startswith(name) and not one.endswith("-infra"))
            yield container
        finally:
            self.run("play", "kube", "--down", str(file))

    def eventually(self, container: str, command: Sequence[str]) -> str:
        """What a command in a container prints once it succeeds; fails with the container's log."""
        deadline = time.monotonic() + PLAYED_S
        while True:
            done = self.run("exec", container, *command)
            if done.returncode == 0:
                return done.stdout
            assert time.monotonic() < deadline, done.stderr + self.run("logs", container).stderr
            time.sleep(0.5)


def as_a_kubelet_starts(manifest: Manifest, folder: Path, fields: dict[str, str]) -> Manifest:
    """A Deployment with what kubelets add: the ServiceAccount's files, the API server's address (nobody
    answers there), and the pod's own fields, of which podman 4 knows but a few."""
    played = copy.deepcopy(manifest)
    pod = played["spec"]["template"]["spec"]
    account = folder / "account"
    account.mkdir(exist_ok=True)
    (account / "token").write_text("none")
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    (account / "ca.crt").write_text(authorities.read_text())
    folder.chmod(0o755)
    pod["volumes"].append({"name": "account", "hostPath": {"path": str(account), "type": "Directory"}})
    (container,) = pod["containers"]
    container["volumeMounts"].append({"name": "account", "mountPath": ACCOUNT, "readOnly": True})
    for variable in container["env"]:
        if "valueFrom" in variable:
            variable["value"] = fields[variable.pop("valueFrom")["fieldRef"]["fieldPath"]]
    address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    container["env"] += [{"name": name, "value": value} for name, value in address.items()]
    return played
