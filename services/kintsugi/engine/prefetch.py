"""Asks the kernel for the files that starting an engine reads, before they are read.

An engine that starts long after the last one finds its libraries and weights on the disk alone. Imports read
them page by page, in the order of the code; asked for in order and beforehand, they come in long reads.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("torch", "vllm", "transformers")
"""Most of what an engine imports, by bytes."""
SUFFIXES = (".so", ".pyc", ".safetensors")
FILES_MAX = 50_000
BYTES_MAX = 4 << 30
"""What comes last of a larger checkpoint would push out of memory what was asked for first."""
PIECE_BYTES = 128 << 10
"""Linux reads no more at one request than the disk's largest transfer, which is seldom less."""


def prefetch_engine(model: str | Path) -> int:
    """Ask for the files of `PACKAGES` and of the checkpoint in folder `model`; how many bytes that are.

    Returns before they are read. Costs a few system calls per file and one per `PIECE_BYTES`; what is in
    memory already is not read.
    """
    return prefetch([*_package_folders(), Path(model)])


def prefetch(folders: Iterable[Path]) -> int:
    """Ask for what lies in `folders` and ends in `SUFFIXES`, up to `BYTES_MAX`; how many bytes that are.

    Never raises: a file that cannot be opened is read later, or fails there.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    total = 0
    for _, path in zip(range(FILES_MAX), _files(folders), strict=False):
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            size = min(os.fstat(file).st_size, BYTES_MAX - total)
            for start in range(0, size, PIECE_BYTES):
                os.posix_fadvise(file, start, min(PIECE_BYTES, size - start), os.POSIX_FADV_WILLNEED)
            total += size
        except OSError:
            continue
        finally:
            os.close(file)
    return total


def _package_folders() -> Iterator[Path]:
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        for folder in (found and found.submodule_search_locations) or ():
            yield Path(folder)


def _files(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        for parent, _, names in os.walk(folder):
            yield from (
                os.path.join(parent, name) for name in names if ".so." in name or name.endswith(SUFFIXES)
            )
