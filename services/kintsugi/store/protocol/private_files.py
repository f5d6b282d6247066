"""Files with tokens or texts, which their owner alone may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kintsugi.core.errors import InvalidField

PRIVATE_MODE = 0o600


def make_private(path: Path) -> None:
    """Creates a file that its owner alone may read, or takes others' rights to one away. A file of another
    user is left as it is. Raises `OSError`."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE))
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(PRIVATE_MODE)


def check_private(field: str, path: Path) -> None:
    """Raises `InvalidField` for a file that others may read, and for one that is not there. Where the file is
    mounted, as Secrets are, its mode is the mount's: a read-only mount is accepted."""
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
