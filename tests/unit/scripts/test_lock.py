"""Locks: every file that is installed has a digest, and pip is told to insist on it."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts import lock as lock_module
from scripts.lock import (
    TARGETS,
    LockError,
    Pin,
    Release,
    Target,
    add_digests,
    find_release,
    format_lock,
    main,
    read_lock,
    resolve,
)

REPOSITORY = Path(__file__).parents[3]
LOCKS = sorted((REPOSITORY / "locks").glob("*.txt"))
DIGEST, OTHER = "a" * 64, "b" * 64
every_lock = pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)


def test_every_lock_is_looked_at() -> None:
    assert [lock.stem for lock in LOCKS] == [
        "clients",
        "cpu",
        "docs",
        "fuzz",
        "gpu",
        "operator",
        "proto",
        "serving-cpu",
    ]


@every_lock
def test_every_requirement_has_a_digest(lock: Path) -> None:
    pins = read_lock(lock)
    assert pins
    bare = [name for name, pin in pins.items() if not pin.digests]
    assert not bare, "run make lock"


@every_lock
def test_a_lock_is_as_make_lock_writes_it(lock: Path) -> None:
    """No host, option or path of a machine gets in."""
    text = lock.read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    named = r"[a-z0-9][a-z0-9._-]*==[^\s\\]+"
    pattern = re.compile(
        rf"{named}(?: \\| --hash=sha256:[0-9a-f]{{64}})|    --hash=sha256:[0-9a-f]{{64}}(?: \\)?"
    )
    assert [line for line in lines if not pattern.fullmatch(line)] == []
    assert "--require-hashes" in text.splitlines()[0]


def test_torch_has_a_digest_for_each_target() -> None:
    """Its builds for CPUs are in PyTorch's index, which `make lock` may not reach."""
    pin = read_lock(REPOSITORY / "locks/cpu.txt")["torch"]
    assert pin.version.endswith("+cpu")
    assert len(pin.digests) == len(TARGETS)


def commands_of(path: Path) -> list[str]:
    """The commands that install or download packages, variables of make expanded."""
    text = path.read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+) := (.*)$", text, re.M))
    text = re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [
        command
        for line in lines
        for command in re.split(r"&&|;", line)
        if re.search(r"\bpip3? (install|download|wheel)\b", command)
    ]


PLACES = [
    REPOSITORY / "Makefile",
    REPOSITORY / ".ci/run",
    *sorted((REPOSITORY / "docker").glob("Dockerfile.*")),
]


@pytest.mark.parametrize("path", PLACES, ids=lambda path: path.name)
def test_pip_is_told_to_insist_on_digests(path: Path) -> None:
    for command in commands_of(path):
        words = shlex.split(command.replace("`", ""))
        ours = {"--editable", "/ours/*.whl"} & set(words)
        if ours:
            # This project itself: nothing is downloaded for it.
            assert "--no-deps" in words, command
            assert {"--no-build-isolation", "--no-index"} & set(words), command
        else:
            assert "--require-hashes" in words, command
            assert {"-r", "--requirement"} & set(words), command


def test_the_commands_are_found() -> None:
    found = {path.name: len(commands_of(path)) for path in PLACES}
    assert found.pop("Makefile") == 9
    assert found.pop("run") == 0, "CI installs by make"
    assert set(found.values()) == {2}


def make_wheel(folder: Path, tag: str, name: str = "tiny", version: str = "1.0") -> str:
    """The smallest wheel that pip installs. Returns its digest."""
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder in which pip finds packages."""
    folder = tmp_path / "found"
    folder.mkdir()
    # setuptools warns where pip is imported after distutils, which building torch's kernels imports.
    monkeypatch.delitem(sys.modules, "distutils", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    lock_module._find_package.cache_clear()
    yield folder
    lock_module._find_package.cache_clear()


def test_every_file_for_a_target_counts_and_no_other(found: Path) -> None:
    wanted = {
        make_wheel(found, f"{interpreter}-manylinux_{glibc}_{machine}")
        for interpreter in ("cp311-cp311", "cp312-cp312", "cp39-abi3")
        for machine in ("x86_64", "aarch64")
        for glibc in ("2_17", "2_28")
    }
    for tag in (
        "cp311-cp311-win_amd64",
        "cp310-cp310-manylinux_2_28_x86_64",
        "cp311-cp311-musllinux_1_2_x86_64",
    ):
        make_wheel(found, tag)
    make_wheel(found, "py3-none-any", version="2.0")
    (found / "tiny-1.0.tar.gz").write_bytes(b"an archive")
    release = find_release("tiny", "1.0")
    assert release.digests == wanted
    assert release.unserved == ()


def test_an_archive_counts_where_a_target_has_no_wheel(found: Path) -> None:
    wheel = make_wheel(found, "cp311-cp311-manylinux_2_28_x86_64")
    (found / "tiny-1.0.tar.gz").write_bytes(b"an archive")
    release = find_release("tiny", "1.0")
    assert release.digests == {wheel, hashlib.sha256(b"an archive").hexdigest()}
    assert release.unserved == tuple(target for target in TARGETS if target != Target("3.11", "x86_64"))


def test_old_digests_of_the_same_version_stay_where_sources_lack_wheels() -> None:
    said: list[str] = []

    def find(name: str, version: str) -> Release:
        return Release({"tiny.whl": DIGEST}, {}, TARGETS[1:])

    for version, digests in (("1.0", {DIGEST, OTHER}), ("0.9", {DIGEST})):
        before = {"tiny": Pin("tiny", version, frozenset({OTHER}))}
        (pin,) = add_digests([Pin("tiny", "1.0")], before, find, said.append)
        assert pin.digests == digests
    assert "tiny==1.0: no file for CPython 3.11 on aarch64, CPython 3.12 on x86_64" in said[0]


def test_a_pin_without_a_file_is_an_error() -> None:
    with pytest.raises(LockError, match=r"tiny==1\.0 has no file"):
        add_digests(
            [Pin("tiny", "1.0")], {}, lambda name, version: Release({}, {}, TARGETS), lambda text: None
        )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    pins = [Pin("b.c", "1.0+cpu", frozenset({OTHER, DIGEST})), Pin("a-b", "2.post1", frozenset({DIGEST}))]
    lock = tmp_path / "lock.txt"
    lock.write_text(format_lock(pins, Path("locks/cpu.in"), ["torchvision"]))
    assert read_lock(lock) == {pin.name: pin for pin in pins}
    assert lock.read_text().splitlines()[1:3] == ["# Left out on purpose: torchvision.", "a-b==2.post1 \\"]


@pytest.mark.parametrize(
    "line", ["tiny>=1.0", "--index-url https://a", f"tiny==1.0 --hash=md5:{DIGEST}", "-e ."]
)
def test_other_lines_are_refused(line: str, tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(f"# A lock.\n{line}\n")
    with pytest.raises(LockError, match=r"lock\.txt"):
        read_lock(lock)


def test_a_lock_constrains_versions_alone(found: Path, tmp_path: Path) -> None:
    """pip would ask for a digest of every requirement if a constraint had one."""
    for version in ("1.0", "2.0"):
        make_wheel(found, "py3-none-any", version=version)
    (tmp_path / "all.txt").write_text(format_lock([Pin("tiny", "1.0", frozenset({OTHER}))], Path("a.in"), []))
    (tmp_path / "some.in").write_text("-c all.txt\ntiny\n")
    assert resolve(tmp_path / "some.in") == {"tiny": "1.0"}


@pytest.mark.parametrize("option", ["--keep", "--bare"])
def test_versions_are_kept_or_resolved_again(
    found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    old, new = (make_wheel(found, "py3-none-any", version=version) for version in ("1.0", "2.0"))
    requirements, lock = tmp_path / "all.in", tmp_path / "all.txt"
    requirements.write_text("tiny\n")
    lock.write_text(format_lock([Pin("tiny", "1.0")], requirements, []))
    monkeypatch.setattr(sys, "argv", ["lock.py", str(requirements), str(lock), option])
    assert main() == 0
    kept, resolved = Pin("tiny", "1.0", frozenset({old})), Pin("tiny", "2.0")
    assert read_lock(lock) == {"tiny": kept if option == "--keep" else resolved}
    assert new not in lock.read_text()


def test_pip_refuses_another_file_than_the_locks(found: Path, tmp_path: Path) -> None:
    digest = make_wheel(found, "py3-none-any")
    lock = tmp_path / "lock.txt"
    for pinned, status, says in ((digest, 0, ""), (OTHER, 1, "DO NOT MATCH THE HASHES")):
        lock.write_text(format_lock([Pin("tiny", "1.0", frozenset({pinned}))], Path("a.in"), []))
        options = ["--no-deps", "--require-hashes", "--dry-run", "--target", str(tmp_path / "target")]
        pip = [sys.executable, "-m", "pip", "install", *options, "-r", str(lock)]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert says in done.stderr
