"""Files and folders that survive a power loss, and locks of folders between processes. A new file is durable
only after its folder was synced as well."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents so that all of them survive a power loss. Raises `OSError`."""
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
    """Replace `file` atomically, so that it survives a crash and a power loss. Raises `OSError`."""
    fresh = file.with_suffix(".new")
    with open(fresh, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(fresh, file)
    sync_folder(file.parent)


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Lock a folder; other processes that lock it wait. Raises `OSError`."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
