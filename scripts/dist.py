"""Build the wheel of kintsugi-kv into dist/, and try it in an environment that has nothing else.

Usage: python scripts/dist.py [--build-only]

The wheel is built from a copy of the tree, because setuptools writes beside its sources, and without dates:
the same sources give the same wheel. pip installs it with its requirements from its configured sources; then
what every installation can do is done once: the commands' help, the SDK's imports without torch, asking a
service that is not there. Then extras: a command that named one works once it is installed. Before all that,
the wheel is compared with the tree: package data are easily forgotten.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DIST = REPOSITORY / "dist"
EPOCH_S = 1_767_225_600
"""2026-01-01, for every file in the wheel."""
SOURCES = ("services", "operators")
BESIDE = ("pyproject.toml", "README.md", "LICENSE")
EXTRAS = (("store", "store --help"), ("serving", "serve --print-config"))
"""Each with a command that needs it, and no engine."""
UNAVAILABLE = 4
"""The exit code of a command that lacks a service or an extra."""
SMOKE = """
import sys
import kintsugi
from kintsugi.core.deploy import spec_from_yaml_mapping
with kintsugi.Client("127.0.0.1:1", "docs") as client:
    assert client.list_models
assert kintsugi.AsyncClient and kintsugi.Key
assert spec_from_yaml_mapping({"model": {"path": "bundled"}}).model.path == "bundled"
heavy = {"torch", "vllm", "ray"} & set(sys.modules)
assert not heavy, heavy
print(kintsugi.__version__, kintsugi.__file__)
"""


class DistError(Exception):
    """The wheel was not built, or does not work."""


def build(out: Path) -> Path:
    """Build the wheel into `out`, and return its path. Raises `DistError`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, wheels = Path(scratch) / "source", Path(scratch) / "wheels"
        for name in SOURCES:
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
        for name in BESIDE:
            shutil.copy(REPOSITORY / name, source / name)
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels))
        run([sys.executable, "-m", "pip", "wheel", *options, str(source)], SOURCE_DATE_EPOCH=str(EPOCH_S))
        (wheel,) = wheels.iterdir()
        return Path(shutil.copy(wheel, out / wheel.name))


def missing_from(wheel: Path) -> list[str]:
    """Files of the packages that the wheel should hold and does not."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = {
        str(path.relative_to(REPOSITORY / source))
        for source in SOURCES
        for path in (REPOSITORY / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    }
    return sorted(wanted - held)


def smoke(wheel: Path) -> str:
    """Install the wheel into an empty environment and use it; what it says of itself. Raises `DistError`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        venv.create(folder / "env", with_pip=True)
        python, kintsugi = folder / "env/bin/python", str(folder / "env/bin/kintsugi")
        run([str(python), "-m", "pip", "install", "--quiet", str(wheel)])
        for command in ("--help", "size --help"):
            run([kintsugi, *command.split()], cwd=folder)
        expect("kintsugi serve", [kintsugi, "status", "--url", "http://127.0.0.1:1"], folder)
        said = run([str(python), "-c", SMOKE], cwd=folder)
        for extra, command in EXTRAS:
            expect(f"kintsugi-kv[{extra}", [kintsugi, command.split()[0]], folder)
            run([str(python), "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]"])
            run([kintsugi, *command.split()], cwd=folder)
    if str(folder) not in said:
        raise DistError(f"another installation was imported: {said}")
    return said


def expect(text: str, command: Sequence[str], cwd: Path) -> None:
    """Run a command that cannot do what is asked and says so with `text`. Raises `DistError`."""
    said = run(command, cwd, UNAVAILABLE)
    if text not in said:
        raise DistError(f"{' '.join(command)} does not say {text!r}:\n{said}")


def run(command: Sequence[str], cwd: Path | None = None, code: int = 0, **more: str) -> str:
    """The output of a command that ends with this code, and sees none of this tree. Raises `DistError`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise DistError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()}")
    return "\n".join(filter(None, (done.stdout.strip(), done.stderr.strip() if code else "")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-only", action="store_true", help="do not install what was built")
    arguments = parser.parse_args()
    try:
        wheel = build(DIST)
        if missing := missing_from(wheel):
            raise DistError(f"{wheel.name} lacks {', '.join(missing)}; see package-data in pyproject.toml")
        print(wheel.relative_to(REPOSITORY))
        if not arguments.build_only:
            print(f"an empty environment runs it: {smoke(wheel)}")
    except DistError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
