"""Makes the kernel read an engine's files before the engine needs them, and keeps them in the page cache.

An engine that starts long after the last one finds its libraries and weights only on disk. Imports would read
them page by page, in the order of the code. If the files are requested in order and in advance, the kernel
reads them in long runs. A running engine keeps the files in memory for its successor.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

PACKAGES = ("torch", "vllm", "transformers")
"""Packages that make up most of the bytes that an engine imports."""
SUFFIXES = (".so", ".pyc", ".safetensors")
FILES_MAX = 50_000
BYTES_MAX = 4 << 30
"""Maximum bytes to read. The end of a larger checkpoint would evict its beginning from memory."""
PIECE_BYTES = 128 << 10
"""Bytes per request. Linux reads at most the disk's largest transfer at a time, which is seldom smaller than
this."""
KEEP_PERIOD_S = 60.0
"""Period of reading files again. Reading 1.4 GB that are in memory takes 0.06 s of CPU; nothing is copied."""
READING_SHARE_MAX = 0.01
"""Maximum share of time spent reading. If memory is short, the files are read from disk."""


def prefetch_engine(model: str | Path) -> int:
    """Ask the kernel to read the files of `PACKAGES` and of the checkpoint in folder ``model`` that end in
    `SUFFIXES`, up to `BYTES_MAX`. Returns the number of bytes.

    Returns before they are read. Costs a few system calls per file and one per `PIECE_BYTES`; the kernel
    reads no file that is in memory. Never raises: a file that cannot be opened now is read, or fails, when
    the engine needs it.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    total = 0
    for _, path in zip(range(FILES_MAX), _files([*_package_folders(), Path(model)]), strict=False):
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


def files_in_use(model: str | Path) -> list[str]:
    """Return the paths of the files that the next start of the same engine reads: the libraries that this
    process has mapped (Linux only), the bytecode of its imported modules, and the weights in folder
    ``model``, in this order."""
    found: dict[str, None] = {}
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            name = line.rstrip("\n").partition("/")[2]
            if ".so" in name:
                found[f"/{name}"] = None
    for module in list(sys.modules.values()):
        # `getattr` would run the `__getattr__` of modules that import others on demand.
        bytecode = getattr(module, "__dict__", {}).get("__cached__")
        if isinstance(bytecode, str):
            found[bytecode] = None
    return [*found, *(str(path) for path in sorted(Path(model).glob("*.safetensors")))]


def read_through(paths: Iterable[str]) -> int:
    """Make the kernel read files without copying them, at most `BYTES_MAX`. Returns the number of bytes.

    The kernel then treats their pages as recently used. Skips files that cannot be read.
    """
    total = 0
    with open(os.devnull, "wb") as nowhere:
        for path in paths:
            with suppress(OSError), open(path, "rb") as file:
                size = min(os.fstat(file.fileno()).st_size, BYTES_MAX - total)
                offset = 0
                while offset < size:
                    sent = os.sendfile(nowhere.fileno(), file.fileno(), offset, size - offset)
                    if not sent:
                        break
                    offset += sent
                    total += sent
    return total


class FileKeeper:
    """Reads files on a thread until `close`, so that they stay in memory: every `KEEP_PERIOD_S`, or less
    often to keep the share of time within `READING_SHARE_MAX`."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._closed = threading.Event()
        threading.Thread(target=self._keep, name="kintsugi-keeper", daemon=True).start()

    def _keep(self) -> None:
        wait_s = KEEP_PERIOD_S
        while not self._closed.wait(wait_s):
            began_s = time.monotonic()
            read_through(self._paths)
            wait_s = max(KEEP_PERIOD_S, (time.monotonic() - began_s) / READING_SHARE_MAX)

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()


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
