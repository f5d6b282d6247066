"""Builds and loads our CPU kernels: one shared library, compiled once per machine by a C++ compiler that is
found there. Nothing requires it: where it cannot be built, torch and the engine's own kernels do the work.

The kernels need AVX-512 and AMX in bfloat16. Rejected: a build as a torch extension, which needs ninja and
all of torch's headers.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import torch

from kintsugi.core.errors import Unavailable

_HERE = Path(__file__).parent
SOURCES = tuple(_HERE / name for name in ("packed.cpp", "mass.cpp", "rotation.cpp"))
HEADERS = (_HERE / "amx.h",)
LIBRARY = "native.so"
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)
COMPILE_TIMEOUT_S = 60.0
"""Takes 4 s on an idle core."""


def inputs() -> str:
    """All that a built library depends on."""
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    return "\0".join((*texts, *FLAGS, find_compiler() or ""))


def find_compiler() -> str | None:
    """Path of the C++ compiler: `$CXX`, or what is installed as g++ or c++."""
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(folder: Path) -> None:
    """Compile the kernels into `folder`. Raises `Unavailable` with the end of the compiler's output."""
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("there is no C++ compiler; install g++ or set CXX")
    command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(folder / LIBRARY)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} failed; install g++ 12 or later: {error}") from error
    if done.returncode:
        raise Unavailable(f"{compiler} failed; install g++ 12 or later: {done.stderr.strip()[-300:]}")


def has_amx() -> bool:
    """Whether this process may use AMX in bfloat16. Asks the operating system for leave, which AMX needs."""
    asked = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_init_amx")]
    return all(ask is not None and ask() for ask in asked)


def load(folder: Path) -> ctypes.CDLL:
    """Load what `build` left in `folder`. Raises `OSError` if it cannot be loaded."""
    return ctypes.CDLL(str(folder / LIBRARY))
