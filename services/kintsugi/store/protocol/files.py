"""Files that survive a power loss, files that only their owner may read, and locks of folders.

A new file is durable only after its folder was synced as well. Files with tokens, keys or texts are private.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kintsugi.core.errors import InvalidField


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents so that all of them survive a power loss. Raises `OSError`."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, survive a power loss. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(file: Path, data: bytes) -> None:
    """Replace `file` atomically, so that it survives a crash and a power loss. Only its owner may read it.
    Raises `OSError`, and `InvalidField` for a link."""
    fresh = file.with_suffix(".new")
    make_private(fresh)
    with open(fresh, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(fresh, file)
    sync_path(file.parent)


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Lock a folder; other processes that lock it wait. Raises `OSError`."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


PRIVATE_MODE = 0o600


def make_private(path: Path) -> None:
    """Create a file that only its owner may read, or remove other users' permissions from an existing file. A
    file of another user stays unchanged. Raises `OSError`, and `InvalidField` for a link, which could lead to
    a file of somebody else."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_MODE))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InvalidField(
            path.name, f"{path} is a symbolic link; move the file itself there, or link its whole folder"
        ) from None
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(PRIVATE_MODE)


def check_private(field: str, path: Path) -> None:
    """Raise `InvalidField` for a file that other users may read, for a missing file, and for a pipe, whose
    reader would wait. A file on a read-only mount, such as a Secret, is accepted, because its mode is the
    mount's."""
    try:
        found = path.stat()
        is_mounted = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError as error:
        raise InvalidField(field, f"{path} cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidField(field, f"{path} is not a regular file; name one")
    # A service that does not own its file reads it as a member of the file's group.
    open_to_others = found.st_mode & (0o077 if found.st_uid == os.geteuid() else 0o027)
    if open_to_others and not is_mounted:
        mode = stat.S_IMODE(found.st_mode)
        raise InvalidField(field, f"{path} can be read or written by others (mode {mode:o}); chmod 600 it")
