"""The chart as helm renders it, and the helms themselves."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]
CHART = REPOSITORY / "charts" / "kintsugi"
VALUES = {
    path.stem: path
    for folder in (Path(__file__).with_name("values"), CHART / "profiles")
    for path in sorted(folder.glob("*.yaml"))
}
"""Value sets: those of the tests, and the profiles that come with the chart."""
TOOLS = REPOSITORY / ".tools"
RELEASE, NAMESPACE = "kintsugi", "rag"
HELMS = ("helm-3.17.2", "helm-4.1.4")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Helm:
    """One version of it."""

    path: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Its answer, whatever that is."""
        return subprocess.run(
            [str(self.path), *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )

    def template(self, value_set: str, *arguments: str) -> list[Manifest]:
        """What a value set becomes, hooks and tests too."""
        done = self.run(
            "template",
            RELEASE,
            str(CHART),
            "-n",
            NAMESPACE,
            "-f",
            str(VALUES[value_set]),
            *arguments,
        )
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]


def helm_named(name: str) -> Helm:
    """One of `HELMS`, or a skip that says how to get it."""
    path = TOOLS / name
    if not path.is_file():
        reason = "npm is not here to fetch it" if shutil.which("npm") is None else "run make tools"
        pytest.skip(f"{name} is not in .tools: {reason}")
    return Helm(path)


@functools.cache
def rendered(helm: str, value_set: str) -> list[Manifest]:
    """Once per session: nothing changes between tests."""
    return helm_named(helm).template(value_set)


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    """The only object of a kind, or of that name."""
    (found,) = (each for each in manifests if each["kind"] == kind and name in ("", each["metadata"]["name"]))
    return found


def canonical(manifest: Manifest) -> str:
    return json.dumps(manifest, sort_keys=True)


def pod_of(manifest: Manifest) -> Manifest | None:
    """The metadata and spec of the pods that an object is or makes."""
    if manifest["kind"] == "Pod":
        return manifest
    template = manifest.get("spec", {}).get("template")
    return template if isinstance(template, dict) and manifest["kind"] in ("Deployment", "Job") else None
