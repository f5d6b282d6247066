"""Builds and loads our CPU kernels: one shared library, compiled once per machine by its C++ compiler, for
the best instructions of its processor. It is optional: without it, torch and the engine's own kernels do the
work.

The kernels require AVX-512. Rejected: a torch extension, which requires ninja and torch's headers; one
library for all processors that chooses at run time, because each machine has to compile anyway.
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
    """The instructions that multiply bfloat16 numbers in a library."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    """Converts them to fp32 and multiplies those."""


INSTRUCTION_FLAGS = {
    Instructions.AMX: ("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    Instructions.AVX512_BF16: ("-mavx512bf16",),
    Instructions.AVX512: (),
}
COMPILE_TIMEOUT_S = 60.0
"""Compilation takes 2 to 4 s on an idle core."""


def inputs(instructions: Instructions) -> str:
    """Return everything that a built library depends on, for a digest."""
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    return "\0".join((*texts, *FLAGS, *INSTRUCTION_FLAGS[instructions], find_compiler() or ""))


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: `$CXX`, else g++ or c++. None if there is none."""
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(folder: Path, instructions: Instructions) -> None:
    """Compile the kernels into `folder`. Raises `Unavailable` with the end of the compiler's output."""
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("no C++ compiler was found; install g++ or set CXX")
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
    """Return the instructions that this process may use, best first; empty if our kernels do not support the
    processor. Requests permission to use AMX from the operating system."""
    if not _has("_is_avx512_supported"):
        return ()
    if not _has("_is_avx512_bf16_supported"):
        return (Instructions.AVX512,)
    best = (Instructions.AMX,) if _has("_init_amx") else ()
    return (*best, Instructions.AVX512_BF16, Instructions.AVX512)


def _has(question: str) -> bool:
    """Call a query of `torch.cpu`. False if this version of torch lacks it."""
    ask = getattr(torch.cpu, question, None)
    return ask is not None and bool(ask())


def load(folder: Path) -> ctypes.CDLL:
    """Load the library that `build` wrote to `folder`. Raises `OSError`."""
    return ctypes.CDLL(str(folder / LIBRARY))
