"""Builds and loads our CPU kernels: one shared library, compiled once per machine by a C++ compiler that is
found there, for the best instructions that this processor has. Nothing requires it: where it cannot be built,
torch and the engine's own kernels do the work.

The kernels need AVX-512. Rejected: a build as a torch extension, which needs ninja and all of torch's
headers; one library for all processors that chooses when it runs, as each machine has to compile anyway.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from enum import StrEnum
from pathlib import Path

import torch

from kintsugi.core.errors import Unavailable

_HERE = Path(__file__).parent
SOURCES = tuple(_HERE / name for name in ("packed.cpp", "mass.cpp", "rotation.cpp"))
HEADERS = tuple(_HERE / name for name in ("products.h", "vectors.h", "amx.h", "avx512.h"))
LIBRARY = "native.so"
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
)


class Instructions(StrEnum):
    """What multiplies bfloat16 numbers in a library."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    """Widens them and multiplies in fp32."""


INSTRUCTION_FLAGS = {
    Instructions.AMX: ("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    Instructions.AVX512_BF16: ("-mavx512bf16",),
    Instructions.AVX512: (),
}
COMPILE_TIMEOUT_S = 60.0
"""Takes 2 to 4 s on an idle core."""


def inputs(instructions: Instructions) -> str:
    """All that a built library depends on."""
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    return "\0".join((*texts, *FLAGS, *INSTRUCTION_FLAGS[instructions], find_compiler() or ""))


def find_compiler() -> str | None:
    """Path of the C++ compiler: `$CXX`, or what is installed as g++ or c++."""
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(folder: Path, instructions: Instructions) -> None:
    """Compile the kernels into `folder`. Raises `Unavailable` with the end of the compiler's output."""
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("there is no C++ compiler; install g++ or set CXX")
    flags = (*FLAGS, *INSTRUCTION_FLAGS[instructions])
    command = [compiler, *flags, *map(str, SOURCES), "-o", str(folder / LIBRARY)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} failed; install g++ 12 or later: {error}") from error
    if done.returncode:
        raise Unavailable(f"{compiler} failed; install g++ 12 or later: {done.stderr.strip()[-300:]}")


@functools.cache
def find_instructions() -> tuple[Instructions, ...]:
    """What this process may multiply with, best first; empty for a processor that our kernels do not know.
    Asks the operating system for leave to use AMX, which AMX needs."""
    if not _has("_is_avx512_supported"):
        return ()
    if not _has("_is_avx512_bf16_supported"):
        return (Instructions.AVX512,)
    best = (Instructions.AMX,) if _has("_init_amx") else ()
    return (*best, Instructions.AVX512_BF16, Instructions.AVX512)


def _has(question: str) -> bool:
    """What torch answers; no where this version of it does not know the question."""
    ask = getattr(torch.cpu, question, None)
    return ask is not None and bool(ask())


def load(folder: Path) -> ctypes.CDLL:
    """Load what `build` left in `folder`. Raises `OSError` if it cannot be loaded."""
    return ctypes.CDLL(str(folder / LIBRARY))
