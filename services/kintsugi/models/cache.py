"""Kintsugi's cache on this machine: folders that are made once and that all processes share."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kintsugi.core.errors import InvalidField, KintsugiError, ResourceExhausted

CACHE_VARIABLE = "KINTSUGI_CACHE"


def cache_folder() -> Path:
    """Return `$KINTSUGI_CACHE`, or `kintsugi` in the user's XDG cache folder."""
    if explicit := os.environ.get(CACHE_VARIABLE):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kintsugi"


def make_folder_once(final: Path, make: Callable[[Path], object]) -> Path:
    """Return the folder `final`. If it does not exist, let `make` fill a draft, and rename the draft.

    One process makes the folder while others wait for it. It appears whole or not at all. The next process
    removes the draft of a process that was killed. Raises `InvalidField` if the cache cannot be written,
    `ResourceExhausted` if the disk is full, and what `make` raises.
    """
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final.parent / f".{final.name}.lock"):
            if not final.is_dir():
                _make_folder(final, make)
    except OSError as error:
        raise cache_error(final.parent, error) from error
    return final


def _make_folder(final: Path, make: Callable[[Path], object]) -> None:
    prefix = f".{final.name}.draft-"
    for abandoned in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(dir=final.parent, prefix=prefix))
    try:
        make(draft)
        draft.chmod(0o755)
        draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def cache_error(folder: Path, error: OSError) -> KintsugiError:
    """Convert an operating system error in the cache to an error that says what the user can do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(
            f"the disk of the cache {folder} is full; free some space, or set {CACHE_VARIABLE} to a folder "
            "on a larger disk"
        )
    return InvalidField(
        CACHE_VARIABLE, f"{folder} cannot be used ({error.strerror or error}); set it to a writable folder"
    )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock. The operating system releases it when the process ends in any way.

    The file is not deleted: a process that waits for a deleted file and one that creates the file again would
    hold two different locks.
    """
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
