"""Files with tokens, keys or texts, which only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kintsugi.core.errors import InvalidField

PRIVATE_MODE = 0o600


def make_private(path: Path) -> None:
    """Create a file that only its owner may read, or remove other users' permissions from an existing file. A
    file of another user stays unchanged. Raises `OSError`."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE))
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(PRIVATE_MODE)


def check_private(field: str, path: Path) -> None:
    """Raise `InvalidField` for a file that other users may read, and for a missing file. A file on a
    read-only mount, such as a Secret, is accepted, because its mode is the mount's."""
    try:
        found = path.stat()
        is_mounted = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError as error:
        raise InvalidField(field, f"{path} cannot be read ({error.strerror})") from error
    # A service that does not own its file reads it as a member of the file's group.
    open_to_others = found.st_mode & (0o077 if found.st_uid == os.geteuid() else 0o027)
    if open_to_others and not is_mounted:
        mode = stat.S_IMODE(found.st_mode)
        raise InvalidField(field, f"{path} can be read or written by others (mode {mode:o}); chmod 600 it")
