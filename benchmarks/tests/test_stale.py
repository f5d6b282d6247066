"""Which results are older than the code they depend on."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import stale

SOURCES = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    for name in ("core", "store", "gateway"):
        change(tmp_path, f"services/kintsugi/{name}/one.py")
    change(tmp_path, "benchmarks/store.py")
    commit(tmp_path)
    return tmp_path


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    ran = subprocess.run(["git", *identity, *arguments], cwd=repository, capture_output=True, check=True)
    return ran.stdout.decode().strip()


def change(repository: Path, path: str) -> None:
    file = repository / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(file.read_text() + "x = 1\n" if file.exists() else "x = 1\n")


def commit(repository: Path) -> str:
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "a change")
    return git(repository, "rev-parse", "--short", "HEAD")


def put_result(repository: Path, name: str, **values: Any) -> None:
    folder = repository / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(values))


def test_a_result_is_stale_once_a_package_that_it_depends_on_has_changed(repository: Path) -> None:
    made_on = git(repository, "rev-parse", "--short", "HEAD")
    put_result(repository, "store.json", benchmark="store", commit=made_on, figures=[])
    change(repository, "services/kintsugi/gateway/one.py")
    commit(repository)
    (fresh,) = stale.judge_all(repository, Path("benchmarks/results"))
    assert (fresh.state, fresh.commits_since, fresh.changed) == ("fresh", 0, ())
    for path in ("services/kintsugi/store/one.py", "services/kintsugi/store/two.py", "benchmarks/store.py"):
        change(repository, path)
        commit(repository)
    (old,) = stale.judge_all(repository, Path("benchmarks/results"))
    assert (old.state, old.commits_since, old.changed) == ("stale", 3, ("store", "its script"))
    assert "stale" in stale.table_of([old])


def test_what_a_script_imports_counts_wherever_it_stands(repository: Path) -> None:
    files = {
        "benchmarks/store.py": "from benchmarks.support import figures, rounds\nfrom pathlib import Path\n",
        "benchmarks/support/__init__.py": "",
        "benchmarks/support/rounds.py": "def run():\n    from tests.fakes.disk import Disk\n",
        "benchmarks/support/other.py": "",
        "benchmarks/support/figures.py": "",
        "tests/fakes/disk.py": "import benchmarks.support.bytes as sizes\nimport missing.module\n",
        "benchmarks/support/bytes.py": "",
    }
    for path, text in files.items():
        change(repository, path)
        (repository / path).write_text(text)
    made_on = commit(repository)
    put_result(repository, "store.json", benchmark="store", commit=made_on, figures=[])
    others = {"benchmarks/support/other.py", "benchmarks/support/figures.py"}
    for path in others:
        change(repository, path)
    commit(repository)
    (fresh,) = stale.judge_all(repository, Path("benchmarks/results"))
    assert fresh.state == "fresh"
    assert set(stale.imports_of("benchmarks/store.py", repository)) == set(files) - others
    change(repository, "benchmarks/support/bytes.py")
    commit(repository)
    (old,) = stale.judge_all(repository, Path("benchmarks/results"))
    assert (old.state, old.commits_since, old.changed) == ("stale", 1, ("what its script imports",))


def test_a_result_of_the_gpu_depends_on_its_folder(repository: Path) -> None:
    change(repository, "benchmarks/gpu/device.py")
    made_on = commit(repository)
    put_result(repository, "gpu.json", benchmark="gpu", commit=made_on, figures=[])
    change(repository, "benchmarks/gpu/engine_ttft.py")
    change(repository, "services/kintsugi/fusor/one.py")
    commit(repository)
    (old,) = stale.judge_all(repository, Path("benchmarks/results"))
    assert (old.state, old.changed) == ("stale", ("fusor", "its script"))


def test_what_cannot_be_judged_is_unknown_and_a_dirty_tree_is_named(repository: Path) -> None:
    head = git(repository, "rev-parse", "--short", "HEAD")
    put_result(repository, "dirty.json", benchmark="store", commit=f"{head}+")
    put_result(repository, "elsewhere.json", benchmark="store", commit="0123456")
    put_result(repository, "nameless.json", benchmark="before and after", commits=[head])
    commit(repository)
    found = {one.result: one for one in stale.judge_all(repository, Path("benchmarks/results"))}
    assert {name: one.state for name, one in found.items()} == {
        "dirty.json": "fresh",
        "elsewhere.json": "unknown",
        "nameless.json": "unknown",
    }
    assert found["dirty.json"].note == "made with changes that were not committed"


def test_every_benchmark_and_package_in_the_table_exists() -> None:
    for benchmark in stale.DEPENDS_ON:
        for paths in stale.paths_of(benchmark, SOURCES).values():
            for path in paths:
                assert (SOURCES / path).exists(), path
    scripts = {path.stem for path in (SOURCES / "benchmarks").glob("*.py")}
    assert scripts <= set(stale.DEPENDS_ON), "a benchmark without a line in DEPENDS_ON"
    measuring = stale.paths_of("gpu", SOURCES)["what its script imports"]
    assert {"tests/fakes/paged_stack.py", "tests/contracts/scattered_attention.py"} <= set(measuring)


def test_what_a_listed_package_imports_is_listed() -> None:
    """Except for `routing`, which runs one module of `serving`."""
    imports = {
        package.name: {
            name
            for file in package.rglob("*.py")
            for name in re.findall(r"^from kintsugi\.(\w+)", file.read_text(), re.MULTILINE)
        }
        for package in (SOURCES / "services/kintsugi").iterdir()
    }
    for benchmark in stale.DEPENDS_ON.keys() - {"routing"}:
        listed = {name.split("/")[0] for name in stale.DEPENDS_ON[benchmark]}
        imported = set().union(*(imports.get(name, set()) for name in listed))
        assert imported - {"rpc"} <= listed, benchmark


def test_it_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert stale.main(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    if not printed:
        pytest.skip("not a git checkout, so no result is committed")
    assert {"result", "state", "commit", "changed"} <= set(printed[0])
