"""Build the images: `python scripts/images.py [--only NAME ...] [--repository R] [--tag T] [--base IMAGE]`.

First pip downloads exactly the wheels of the lock from its configured sources; the build copies them and
needs no network. Builds with the first of buildah, podman and docker that is installed. `--make-base` makes a
base image from Debian's packages with debootstrap, for machines that cannot reach an image registry; it needs
root. Prints each image's digest and size, and writes its bill of materials as CycloneDX JSON to
build/images/NAME/sbom.cdx.json.
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
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

REPOSITORY = Path(__file__).parents[1]
CONTEXTS = REPOSITORY / "build" / "images"
BUILDERS = ("buildah", "podman", "docker")
BASE = "python:3.11-slim-bookworm"
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
GLIBC_MINORS = (36, 35, 34, 31, 28, 27, 17)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
    *("manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
    *("linux_x86_64", "any"),
)
"""Wheel platforms that Debian 12's C library can run, newest first; pip accepts no range."""
EPOCH_S = 315_532_800
"""1980, the earliest time that zip can store."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
"""Low enough for every machine: the builders' defaults may exceed a machine's own limits."""


class ImagesError(Exception):
    """A build failed, or a tool that it needs is missing."""


@dataclass(frozen=True)
class Image:
    """One of our images."""

    name: str
    lock: Path
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
        Image("operator", REPOSITORY / "locks" / "operator.txt"),
        Image("serving-cpu", REPOSITORY / "locks" / "serving-cpu.txt", "host"),
        Image("serving-gpu", REPOSITORY / "locks" / "gpu.txt", "host"),
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
    raise ImagesError(f"none of {', '.join(BUILDERS)} is installed; install one (apt-get install buildah)")


def run_pip(*arguments: str) -> None:
    """Run pip. Wheels that it builds contain no dates, so the same sources give the same wheel. Raises
    `ImagesError`."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH_S)}
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImagesError(f"pip {arguments[0]} failed:\n{done.stderr.strip()}")


def fill_context(image: Image) -> None:
    """Put the lock's wheels and our own into the context. Keeps wheels that are there, and removes those that
    the lock no longer has."""
    wheels, ours = image.context / "wheels", image.context / "ours"
    wheels.mkdir(parents=True, exist_ok=True)
    pins = [line for line in image.lock.read_text().splitlines() if line and not line.startswith("#")]
    wanted = {wheel_prefix(pin) for pin in pins}
    for wheel in wheels.iterdir():
        if wheel_prefix("==".join(wheel.name.split("-")[:2])) not in wanted:
            wheel.unlink()
    there = {wheel_prefix("==".join(wheel.name.split("-")[:2])) for wheel in wheels.iterdir()}
    missing = [pin for pin in pins if wheel_prefix(pin) not in there]
    if missing:
        print(f"{image.name}: downloading {len(missing)} of {len(pins)} wheels", file=sys.stderr, flush=True)
        download(missing, wheels)
    shutil.rmtree(ours, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Build from a copy, because building writes beside the sources.
        source = Path(scratch) / "source"
        for name in ("services", "operators"):
            shutil.copytree(
                REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, source / name)
        run_pip(
            "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(ours), str(source)
        )
    for wheel in ours.iterdir():
        os.utime(wheel, (EPOCH_S, EPOCH_S))


def download(pins: list[str], wheels: Path) -> None:
    """Download wheels for the image's Python and C library, not this machine's. Raises `ImagesError`."""
    target = ["--python-version", "3.11", "--implementation", "cp", "--dest", str(wheels)]
    abis = [word for abi in ("cp311", "abi3", "none") for word in ("--abi", abi)]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--quiet", "--no-deps", "--only-binary", ":all:"]
    common = ["download", *options, *target, *abis, *platforms]
    torch = [pin for pin in pins if pin.startswith("torch==")]
    rest = [pin for pin in pins if pin not in torch]
    if rest:
        run_pip(*common, *rest)
    if torch:
        try:
            run_pip(*common, *torch)
        except ImagesError:
            print(f"{torch[0]} is not in pip's sources; taking it from {TORCH_INDEX}", file=sys.stderr)
            run_pip(*common, "--index-url", TORCH_INDEX, *torch)


def wheel_prefix(pin: str) -> str:
    """The beginning of a wheel's name, without a local version: `ruamel_yaml-0.18` for
    `ruamel.yaml==0.18`."""
    name, _, version = pin.partition("==")
    return f"{name.lower().replace('-', '_').replace('.', '_')}-{version.split('+')[0]}"


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
        raise ImagesError("a base needs buildah or podman; install buildah, or choose a base with --base")
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
    if maker.name != "buildah":
        out = maker.run(
            "run", "--rm", "--network", "none", "--entrypoint", "python", reference, "-c", CONTENTS
        )
    else:
        container = maker.run("from", *LIMITS, reference)
        try:
            out = maker.run("run", "--network", "none", container, "--", "python", "-c", CONTENTS)
        finally:
            maker.run("rm", container)
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
    if maker.name == "buildah":
        (about,) = json.loads(maker.run("images", "--json", reference))
        inspected = json.loads(maker.run("inspect", "--type", "image", reference))
        return str(inspected["FromImageDigest"]), _parse_size(about["size"])
    (about,) = json.loads(maker.run("image", "inspect", reference))
    return str(about.get("Digest") or about["Id"]), int(about["Size"])


def _parse_size(size: str) -> int:
    """Parse a size in buildah's notation, `133 MB`."""
    number, unit = size.split()
    return round(float(number) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit.upper()])


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
        fill_context(image)
        build(maker, image, reference, base)
        digest, size = digest_and_bytes(maker, reference)
        target = image.context / "sbom.cdx.json"
        target.write_text(make_sbom(reference, list_contents(maker, reference)))
        listed = str(target.relative_to(REPOSITORY))
        print(json.dumps({"image": reference, "digest": digest, "bytes": size, "sbom": listed}), flush=True)


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
    try:
        build_images(parser.parse_args())
    except ImagesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
