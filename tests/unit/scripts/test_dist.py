"""The wheels: what they hold, and that a wheel which lacks something is found out."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

import pytest
from scripts.dist import CHECKPOINTS, PROJECTS, SDK, SDK_BYTES_MAX, DistError, Project, expect, run

from kintsugi import __version__


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_distributions_have_one_version_and_require_it_of_each_other(project: Project) -> None:
    document = tomllib.loads((project.folder / "pyproject.toml").read_text())["project"]
    assert (document["name"], document["version"]) == (project.name, __version__)
    extras = document.get("optional-dependencies", {}).values()
    required = [one for some in (document.get("dependencies", []), *extras) for one in some]
    ours = {one for one in required if one.startswith("kintsugi-") and "[" not in one}
    assert ours <= {f"{each.name}=={__version__}" for each in PROJECTS}


@pytest.mark.full
@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_a_wheel_holds_every_file_of_its_package_and_no_other(project: Project, tmp_path: Path) -> None:
    wheel = project.build(tmp_path)
    package = Path(project.package).name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert f"{package}/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} <= {package, project.name.replace("-", "_")}
    assert project is not SDK or wheel.stat().st_size <= SDK_BYTES_MAX


@pytest.mark.full
def test_a_file_that_the_wheel_lacks_is_named(tmp_path: Path) -> None:
    wheel, poorer = CHECKPOINTS.build(tmp_path), tmp_path / "poorer.whl"
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(poorer, "w") as copy:
        for name in archive.namelist():
            if name != "kintsugi_checkpoints/py.typed":
                copy.writestr(name, archive.read(name))
    assert CHECKPOINTS.missing_from(poorer) == ["kintsugi_checkpoints/py.typed"]


def test_a_command_that_fails_is_told_with_what_it_said() -> None:
    with pytest.raises(DistError, match="no such thing"):
        run(["sh", "-c", "echo no such thing >&2; exit 3"])


def test_a_command_that_must_fail_is_told_by_its_code_and_its_words(tmp_path: Path) -> None:
    refuse = ["sh", "-c", "echo install the extra >&2; exit 4"]
    expect("the extra", refuse, tmp_path)
    with pytest.raises(DistError, match="does not say 'another'"):
        expect("another", refuse, tmp_path)
    with pytest.raises(DistError, match="failed"):
        expect("", ["true"], tmp_path)
