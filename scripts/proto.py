"""Generate the gRPC stubs in `services/kintsugi/rpc` from `proto/`.

Usage: python scripts/proto.py [--check]

Run it with an interpreter that has locks/proto.txt installed: the generator's version determines the oldest
protobuf that the stubs run on, so it is pinned low. `--check` generates into a temporary folder and fails on
a difference.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
SERVICES = ROOT / "services"
PACKAGE = Path("kintsugi/rpc/v1")


def generate(out: Path) -> None:
    """Write the stubs of all .proto files below `out`."""
    files = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    outputs = [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}", *plugins, *outputs]
    subprocess.run([*command, *files], check=True, cwd=PROTO)
    for path in (out / PACKAGE).glob("*_pb2_grpc.py*"):
        if "Stub" not in path.read_text():
            path.unlink()  # a file without a service


def differences(fresh: Path) -> list[str]:
    """Names of stubs that are missing, left over or different."""
    ours = {path.name for path in (SERVICES / PACKAGE).glob("*_pb2*")}
    theirs = {path.name for path in (fresh / PACKAGE).glob("*_pb2*")}
    changed = {
        name
        for name in ours & theirs
        if not filecmp.cmp(SERVICES / PACKAGE / name, fresh / PACKAGE / name, shallow=False)
    }
    return sorted((ours ^ theirs) | changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        if check:
            stale = differences(fresh)
            if stale:
                sys.exit(f"stale stubs: {', '.join(stale)}; run `make proto` and commit them")
            return
        for path in (SERVICES / PACKAGE).glob("*_pb2*"):
            path.unlink()
        for path in (fresh / PACKAGE).glob("*_pb2*"):
            shutil.copy(path, SERVICES / PACKAGE / path.name)


if __name__ == "__main__":
    main()
