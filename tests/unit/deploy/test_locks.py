"""What pip installs: every lock has digests, and every command that installs insists on them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
LOCKS = sorted((REPOSITORY / "locks").glob("*.txt"))
INSTALLING = [REPOSITORY / "Makefile", *sorted((REPOSITORY / "docker").glob("Dockerfile.*"))]


def pins_of(lock: Path) -> list[list[str]]:
    """Each requirement of a lock, followed by its options."""
    text = lock.read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_holds_exact_versions_with_digests_and_nothing_else(lock: Path) -> None:
    """No host, option or path of a machine gets in."""
    pins = pins_of(lock)
    assert pins
    for requirement, *digests in pins:
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[^\s=]+", requirement), requirement
        assert digests, f"{requirement}: run make lock"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in digests), requirement


def test_every_lock_is_resolved_by_make_lock() -> None:
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nlock: setup\n")[2].partition("\n\n")[0]
    for lock in LOCKS:
        assert lock.with_suffix(".in").is_file()
        assert re.search(rf"(locks/| ){lock.stem}(\.txt| |;)", recipe), lock.stem


def test_torch_has_a_digest_for_each_interpreter_and_machine() -> None:
    (torch,) = (pin for pin in pins_of(REPOSITORY / "locks/cpu.txt") if pin[0].startswith("torch=="))
    assert torch[0].endswith("+cpu")
    assert len(torch[1:]) == 4


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


@pytest.mark.parametrize("path", INSTALLING, ids=lambda path: path.name)
def test_pip_is_told_to_insist_on_digests(path: Path) -> None:
    assert commands_of(path)
    for command in commands_of(path):
        words = shlex.split(command.replace("`", ""))
        if {"--editable", "/ours/*.whl"} & set(words):
            # These projects themselves: nothing is downloaded for them.
            assert "--no-deps" in words, command
            assert {"--no-build-isolation", "--no-index"} & set(words), command
        else:
            assert "--require-hashes" in words, command
            assert {"-r", "--requirement"} & set(words), command
