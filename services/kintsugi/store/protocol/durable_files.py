"""Files and folders that survive a power loss, and are changed by one process at a time. A new file is safe
only once its folder was synced, too."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents; all of them survive a power loss. Raises `OSError`."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power loss. Raises `OSError`."""
    sync_path(path)


def sync_path(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, survive a power loss. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(file: Path, data: bytes) -> None:
    """Replace `file` whole or not at all, across a crash and a power loss. Raises `OSError`."""
    fresh = file.with_suffix(".new")
    with open(fresh, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(fresh, file)
    sync_folder(file.parent)


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Keep other processes that lock the same folder waiting. Raises `OSError`."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
