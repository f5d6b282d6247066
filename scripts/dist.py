"""Build the wheels of all distributions into dist/, and try them in an empty environment.

Usage: python scripts/dist.py [--build-only]

Each wheel is built from a copy of its sources, because setuptools writes beside them. Wheels have no dates,
so the same sources produce the same wheel. A wheel must contain every file of its packages. The wheel of
kintsugi-kv must be small. Installed alone, it must provide the SDK without heavy dependencies: the SDK calls
a server with canned answers. Then each extra and the operator are installed, with a run of a command that
needs them.
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
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DIST = REPOSITORY / "dist"
EPOCH_S = 1_767_225_600
"""2026-01-01, the date of every file in a wheel."""
SDK_BYTES_MAX = 1_500_000
"""Size limit of the wheel of kintsugi-kv."""
UNAVAILABLE = 4
"""The exit code of a command that lacks a service or an extra."""
EXTRAS = (("cli", "size --help"), ("store", "store --help"), ("serving", "serve --print-config"))
"""Extras, each with a command that needs the extra but no engine."""
SMOKE = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
import kintsugi
from kintsugi.rpc.v1 import gateway_pb2 as pb, gateway_pb2_grpc as services

class Canned(services.KintsugiServicer):
    def PutChunks(self, request, context):
        return pb.PutChunksResponse(results=[pb.PutResult(key="ab" * 32, num_tokens=3)])

    def Generate(self, request, context):
        yield pb.GenerateResponse(resolved=pb.Resolved())
        yield pb.GenerateResponse(delta=pb.Delta(text="gold"))
        yield pb.GenerateResponse(finished=pb.Finished())

server = grpc.server(ThreadPoolExecutor(2))
services.add_KintsugiServicer_to_server(Canned(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with kintsugi.Client(f"127.0.0.1:{port}", "docs") as client:
    (put,) = client.put_chunks(["Seams of gold."])
    answer = client.generate([kintsugi.Key(put.key)], "Which metal?")
server.stop(None)
assert answer.text == "gold", answer
heavy = {"torch", "vllm", "ray", "typer", "rich", "cryptography"} & set(sys.modules)
assert not heavy, heavy
print(kintsugi.__version__, kintsugi.__file__)
"""


class DistError(Exception):
    """A wheel was not built, or does not work."""


@dataclass(frozen=True)
class Project:
    """A distribution of this repository, with one package."""

    name: str
    folder: Path
    package: str
    """The package's folder, relative to `folder`."""

    @property
    def sources(self) -> list[Path]:
        """Files that the wheel must contain."""
        files = (self.folder / self.package).rglob("*")
        return sorted(path for path in files if path.is_file() and "__pycache__" not in path.parts)

    def missing_from(self, wheel: Path) -> list[str]:
        """Files of the package that the wheel lacks."""
        root = (self.folder / self.package).parent
        with zipfile.ZipFile(wheel) as archive:
            return sorted({str(path.relative_to(root)) for path in self.sources} - set(archive.namelist()))

    def build(self, out: Path) -> Path:
        """Build the wheel into `out`, and return its path. Raises `DistError`."""
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            source, wheels = Path(scratch) / "source", Path(scratch) / "wheels"
            for path in [*self.sources, self.folder / "pyproject.toml", self.folder / "README.md"]:
                copied = source / path.relative_to(self.folder)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copied)
            shutil.copy(REPOSITORY / "LICENSE", source)
            options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels))
            run([sys.executable, "-m", "pip", "wheel", *options, str(source)], SOURCE_DATE_EPOCH=str(EPOCH_S))
            (wheel,) = wheels.iterdir()
            if missing := self.missing_from(wheel):
                raise DistError(f"{wheel.name} lacks {', '.join(missing)}; see its package-data")
            return Path(shutil.copy(wheel, out / wheel.name))


SDK = Project("kintsugi-kv", REPOSITORY, "services/kintsugi")
CHECKPOINTS = Project("kintsugi-checkpoints", REPOSITORY / "checkpoints", "kintsugi_checkpoints")
OPERATOR = Project("kintsugi-operator", REPOSITORY / "operators", "kintsugi_operator")
PROJECTS = (SDK, CHECKPOINTS, OPERATOR)


def smoke(wheels: Path) -> str:
    """Install wheels into an empty environment and use them. Returns the SDK's version and path. Raises
    `DistError`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        venv.create(folder / "env", with_pip=True)
        python, kintsugi = str(folder / "env/bin/python"), str(folder / "env/bin/kintsugi")
        install = [python, "-m", "pip", "install", "--quiet", "--find-links", str(wheels)]
        run([*install, SDK.name])
        said = run([python, "-c", SMOKE], cwd=folder)
        if str(folder) not in said:
            raise DistError(f"another installation was imported: {said}")
        for extra, command in EXTRAS:
            expect(f"kintsugi-kv[{extra}", [kintsugi, command.split()[0]], folder)
            run([*install, f"{SDK.name}[{extra}]"])
            run([kintsugi, *command.split()], cwd=folder)
        run([*install, OPERATOR.name])
        run([str(folder / "env/bin/kintsugi-operator"), "--help"], cwd=folder)
    return said


def expect(text: str, command: Sequence[str], cwd: Path) -> None:
    """Run a command that must exit with `UNAVAILABLE` and print `text`. Raises `DistError` if it does not."""
    said = run(command, cwd, UNAVAILABLE)
    if text not in said:
        raise DistError(f"{' '.join(command)} does not say {text!r}:\n{said}")


def run(command: Sequence[str], cwd: Path | None = None, code: int = 0, **more: str) -> str:
    """Run a command without `PYTHON*` variables. Returns its output. Raises `DistError` unless it exits with
    `code`."""
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
        for project in PROJECTS:
            wheel = project.build(DIST)
            size = wheel.stat().st_size
            print(f"{wheel.relative_to(REPOSITORY)}: {size:,} bytes", flush=True)
            if project is SDK and size > SDK_BYTES_MAX:
                raise DistError(f"{wheel.name} has {size:,} bytes, at most {SDK_BYTES_MAX:,} allowed")
        if not arguments.build_only:
            print(f"an empty environment runs them: {smoke(DIST)}")
    except DistError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
