"""Build the images: `python -m scripts.images [--only NAME ...] [--repository R] [--tag T] [--base IMAGE]`.

pip downloads exactly the wheels whose digests the lock names; the build copies them, installs them by these
digests and needs no network. Builds with podman or docker. `--make-base` makes a base image from Debian's
packages with debootstrap, for machines that cannot reach an image registry; it needs root. Prints each
image's digest and size, and writes to build/images/NAME its bill of materials (sbom.cdx.json, CycloneDX) and
its provenance (provenance.json, SLSA 1.0). `--push` pushes the images and attaches both with cosign.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from scripts.dist import CHECKPOINTS, OPERATOR, SDK, DistError, Project

REPOSITORY = Path(__file__).parents[1]
CONTEXTS = REPOSITORY / "build" / "images"
BUILDERS = ("podman", "docker")
BASE = (
    "docker.io/library/python:3.11-slim-bookworm"
    "@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b"
)
"""Python 3.11.16, as docker-library/repo-info recorded it. The Dockerfiles name the same image."""
SUITE = "bookworm"
"""The Debian release whose Python is 3.11, which the wheels are built for."""
SUITE_PACKAGES = "python3,python3-venv,ca-certificates,libnuma1"
MADE_BASE = f"localhost/kintsugi-base:{SUITE}-{hashlib.sha256(SUITE_PACKAGES.encode()).hexdigest()[:8]}"
"""The digest of the package list is part of the tag."""
UNNEEDED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
)
GLIBC_MINORS = range(36, 4, -1)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
    *("linux_x86_64", "any"),
)
"""Wheel platforms that Debian 12's C library can run, newest first; pip accepts no range."""
EPOCH_S = 315_532_800
"""1980, the earliest time that zip can store."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
"""Low enough for every machine: the builders' defaults may exceed a machine's own limits."""


BUILD_TYPE = "https://kintsugi.dev/build/images/v1"
"""Type of the build. It says that the parameters in a provenance are options of this script."""
BUILDER_ID = "https://kintsugi.dev/build/local"
ATTACHED = {"cyclonedx": "sbom.cdx.json", "slsaprovenance1": "provenance.json"}
"""Files of a context that are attached to an image, by cosign's predicate type."""


class ImagesError(Exception):
    """A build failed, or a tool that it needs is missing."""


@dataclass(frozen=True)
class Image:
    """One of our images."""

    name: str
    lock: Path
    projects: tuple[Project, ...]
    """Distributions of this repository that the image contains."""
    network: str = "none"
    """The build's network: `none`, or `host` to install Debian packages that a base lacks."""

    @property
    def context(self) -> Path:
        return CONTEXTS / self.name

    @property
    def dockerfile(self) -> Path:
        return REPOSITORY / "docker" / f"Dockerfile.{self.name}"


IMAGES = {
    image.name: image
    for image in (
        Image("operator", REPOSITORY / "locks" / "operator.txt", (SDK, OPERATOR)),
        Image("serving-cpu", REPOSITORY / "locks" / "serving-cpu.txt", (SDK, CHECKPOINTS), "host"),
        Image("serving-gpu", REPOSITORY / "locks" / "gpu.txt", (SDK, CHECKPOINTS), "host"),
    )
}
BY_DEFAULT = ("operator", "serving-cpu")
"""Not serving-gpu, which needs gigabytes of CUDA libraries and is only built on request."""


@dataclass(frozen=True)
class Builder:
    """A program that builds images."""

    name: str
    path: str

    @property
    def options(self) -> list[str]:
        """Options of `build`. Docker's image format supports health checks; OCI's does not."""
        return [] if self.name == "docker" else ["--format", "docker", "--layers", *LIMITS]

    def run(self, *arguments: str) -> str:
        """Run the builder. Returns its output. Raises `ImagesError`."""
        done = subprocess.run([self.path, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise ImagesError(f"{self.name} {' '.join(arguments[:2])} failed:\n{tail}")
        return done.stdout.strip()


def find_builder() -> Builder:
    """Find the first installed builder. Raises `ImagesError`."""
    for name in BUILDERS:
        if path := shutil.which(name):
            return Builder(name, path)
    raise ImagesError(f"none of {', '.join(BUILDERS)} is installed; install one (apt-get install podman)")


def run_pip(*arguments: str) -> None:
    """Run pip. Wheels that it builds contain no dates, so the same sources give the same wheel. Raises
    `ImagesError`."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH_S)}
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImagesError(f"pip {arguments[0]} failed:\n{done.stderr.strip()}")


def fill_context(image: Image) -> None:
    """Put the lock, its wheels and our own into the context, and remove all other wheels. Raises
    `ImagesError`."""
    wheels, ours = image.context / "wheels", image.context / "ours"
    wheels.mkdir(parents=True, exist_ok=True)
    lock = Path(shutil.copy(image.lock, image.context / "lock.txt"))
    download(lock, wheels)
    for wheel in wheels.iterdir():
        if sha256_of(wheel) not in lock.read_text():
            wheel.unlink()
    shutil.rmtree(ours, ignore_errors=True)
    for project in image.projects:
        try:
            wheel = project.build(ours)
        except DistError as error:
            raise ImagesError(str(error)) from error
        os.utime(wheel, (EPOCH_S, EPOCH_S))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def target_options() -> list[str]:
    """pip's options for wheels of the image's Python and C library, not this machine's."""
    abis = [word for abi in ("cp311", "abi3", "none") for word in ("--abi", abi)]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    only = ["--quiet", "--no-deps", "--only-binary", ":all:"]
    return [*only, "--python-version", "3.11", "--implementation", "cp", *abis, *platforms]


def download(lock: Path, wheels: Path) -> None:
    """Download the missing wheels of a lock. If pip's sources lack a wheel, PyTorch's own index is searched,
    too: it has torch's builds for CPUs. Raises `ImagesError`, also for a wrong digest."""
    options = [*target_options(), "--require-hashes", "--requirement", str(lock), "--dest", str(wheels)]
    try:
        run_pip("download", *options)
    except ImagesError as error:
        if "No matching distribution" not in str(error):
            raise
        print(f"pip's sources lack a wheel of {lock}; trying {TORCH_INDEX} too", file=sys.stderr)
        run_pip("download", *options, "--extra-index-url", TORCH_INDEX)


def build(maker: Builder, image: Image, reference: str, base: str) -> None:
    """Build one image from its context. Raises `ImagesError`."""
    print(f"{image.name}: building {reference}", file=sys.stderr, flush=True)
    arguments = ["--build-arg", f"BASE={base}", "-f", str(image.dockerfile), "-t", reference]
    maker.run("build", *maker.options, "--network", image.network, *arguments, str(image.context))


def make_base(maker: Builder) -> None:
    """Make a base image of Debian with its own Python. Raises `ImagesError`."""
    if shutil.which("debootstrap") is None:
        raise ImagesError("debootstrap is not installed; install it, or choose a base with --base")
    if maker.name == "docker":
        raise ImagesError("a base needs podman; install it, or choose a base with --base")
    print(f"making {MADE_BASE} with debootstrap, which takes about two minutes", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={SUITE_PACKAGES}", SUITE, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ImagesError(f"debootstrap failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        for name in UNNEEDED:
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir()
        recipe = Path(scratch) / "Dockerfile"
        recipe.write_text("FROM scratch\nCOPY root /\n")
        maker.run("build", *maker.options, "--network", "none", "-f", str(recipe), "-t", MADE_BASE, scratch)


CONTENTS = """
import importlib.metadata as metadata, json, re
found = [["pypi", d.metadata["Name"], d.version] for d in metadata.distributions()]
with open("/var/lib/dpkg/status", encoding="utf-8") as status:
    for entry in status.read().split("\\n\\n"):
        fields = dict(re.findall(r"^(Package|Version): (.*)$", entry, re.M))
        found += [["deb", fields["Package"], fields["Version"]]] if fields else []
print(json.dumps(found))
"""
"""Runs inside an image: prints the installed Python and Debian packages."""


def list_contents(maker: Builder, reference: str) -> list[tuple[str, str, str]]:
    """List (kind, name, version) of every package installed in an image."""
    command = ("run", "--rm", "--network", "none", "--entrypoint", "python", reference, "-c", CONTENTS)
    out = maker.run(*command)
    return sorted({(str(kind), str(name), str(version)) for kind, name, version in json.loads(out)})


def make_sbom(reference: str, found: list[tuple[str, str, str]]) -> str:
    """Make the bill of materials, as CycloneDX 1.6 JSON."""
    bom = Bom()
    name, _, tag = reference.rpartition(":")
    bom.metadata.component = Component(name=name, version=tag, type=ComponentType.CONTAINER)
    for kind, package, version in found:
        namespace = "debian" if kind == "deb" else None
        url = PackageURL(kind, namespace, package, version)
        bom.components.add(
            Component(name=package, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url))
        )
    bom.register_dependency(bom.metadata.component, bom.components)
    return str(JsonV1Dot6(bom).output_as_string(indent=2))


def digest_and_bytes(maker: Builder, reference: str) -> tuple[str, int]:
    """Digest and size of a local image. A registry that compresses it again computes another digest."""
    (about,) = json.loads(maker.run("image", "inspect", reference))
    return str(about.get("Digest") or about["Id"]), int(about["Size"])


def exists(maker: Builder, reference: str) -> bool:
    try:
        maker.run("inspect", "--type", "image", reference)
    except ImagesError:
        return False
    return True


def version() -> str:
    """The chart's appVersion, which is its default image tag."""
    chart = (REPOSITORY / "charts" / "kintsugi" / "Chart.yaml").read_text()
    (line,) = (line for line in chart.splitlines() if line.startswith("appVersion:"))
    return line.split(":", 1)[1].strip()


def make_provenance(image: Image, base: str, commit: str, began: datetime, ended: datetime) -> dict[str, Any]:
    """Make the predicate of an image's provenance, SLSA 1.0: its sources, and how it was built.

    `base`: reference of the base image. `commit`: of this repository; empty: not known.
    """
    name, _, digest = base.partition("@sha256:")
    depends: list[dict[str, Any]] = [{"uri": name, **({"digest": {"sha256": digest}} if digest else {})}]
    if commit:
        depends.append({"name": "source", "digest": {"gitCommit": commit}})
    for wheel in sorted(image.context.glob("*/*.whl")):
        depends.append({"name": wheel.name, "digest": {"sha256": sha256_of(wheel)}})
    moments = {"startedOn": began, "finishedOn": ended}
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"only": image.name, "base": base},
            "resolvedDependencies": depends,
        },
        "runDetails": {
            "builder": {"id": BUILDER_ID},
            "metadata": {name: f"{at:%Y-%m-%dT%H:%M:%SZ}" for name, at in moments.items()},
        },
    }


def commit_of(repository: Path) -> str:
    """Return the commit that is checked out; empty without git, or if files differ from the commit."""
    git = ["git", "-C", str(repository)]
    try:
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return "" if changed.stdout.strip() else head.stdout.strip()


def push(maker: Builder, reference: str) -> str:
    """Push an image. Returns its digest in the registry, by which charts and signatures name it. Raises
    `ImagesError`."""
    if maker.name == "docker":
        maker.run("push", reference)
        (about,) = json.loads(maker.run("image", "inspect", reference))
        repository = reference.rpartition(":")[0]
        digests: list[str] = about["RepoDigests"]
        found = [one.partition("@") for one in digests]
        return next(digest for name, _, digest in found if name == repository)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "digest"
        maker.run("push", "--digestfile", str(file), reference)
        return file.read_text().strip()


def attach(reference: str, digest: str, folder: Path, key: str) -> None:
    """Attach the bill of materials and the provenance in `folder` to an image that was pushed, signed by
    cosign: with a key, or with the identity that cosign asks for. Raises `ImagesError`."""
    path = shutil.which("cosign")
    if path is None:
        raise ImagesError("cosign is not installed; install it, or attach with another tool without --push")
    image = f"{reference.rpartition(':')[0]}@{digest}"
    signed = ["--key", key] if key else []
    for kind, name in ATTACHED.items():
        predicate = str(folder / name)
        command = ["attest", "--yes", *signed, "--type", kind, "--predicate", predicate, image]
        Builder("cosign", path).run(*command)


def build_images(arguments: argparse.Namespace) -> None:
    """Build the requested images and print a line about each. Raises `ImagesError`."""
    maker = find_builder()
    base = arguments.base
    if arguments.make_base:
        base = MADE_BASE
        if not exists(maker, MADE_BASE):
            make_base(maker)
    for image in (IMAGES[name] for name in arguments.only):
        reference = f"{arguments.repository}/{image.name}:{arguments.tag}"
        began = datetime.now(UTC)
        fill_context(image)
        build(maker, image, reference, base)
        digest, size = digest_and_bytes(maker, reference)
        sbom = make_sbom(reference, list_contents(maker, reference))
        provenance = make_provenance(image, base, commit_of(REPOSITORY), began, datetime.now(UTC))
        (image.context / ATTACHED["cyclonedx"]).write_text(sbom)
        (image.context / ATTACHED["slsaprovenance1"]).write_text(json.dumps(provenance, indent=1) + "\n")
        if arguments.push:
            digest = push(maker, reference)
            attach(reference, digest, image.context, arguments.key)
        sbom_file, provenance_file = (
            str((image.context / name).relative_to(REPOSITORY)) for name in ATTACHED.values()
        )
        about = {"image": reference, "digest": digest, "bytes": size}
        print(json.dumps({**about, "sbom": sbom_file, "provenance": provenance_file}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(BY_DEFAULT), choices=list(IMAGES))
    parser.add_argument("--repository", default="localhost/kintsugi", help="image.repository of the chart")
    parser.add_argument("--tag", default=version())
    parser.add_argument("--base", default=BASE, help="a Debian 12 with Python 3.11")
    parser.add_argument(
        "--make-base", action="store_true", help=f"use {MADE_BASE}; make it if it does not exist"
    )
    parser.add_argument(
        "--push", action="store_true", help="push, and attach sbom and provenance with cosign"
    )
    parser.add_argument("--key", default="", help="cosign's key; unset: the identity that cosign requests")
    arguments = parser.parse_args()
    try:
        build_images(arguments)
    except ImagesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
