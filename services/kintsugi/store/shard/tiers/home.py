"""A directory that a shard owns: its format, its owner, and a lock against other processes."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from pathlib import Path

from kintsugi.core.errors import Corrupted, InvalidField, Unavailable, VersionMismatch
from kintsugi.store.protocol.files import make_folder, make_private, write_durably

DATA_FORMAT_VERSION = 1
"""Format of the files below a data directory. Chunk keys do not depend on it."""

TIER_FOLDER = "kintsugi-tier"
"""Subfolder of an SSD tier in its configured folder."""

_IDENTITY = "kintsugi.json"
_LOCK = "lock"


class Home:
    """An owned directory, locked until `close`."""

    def __init__(self, path: Path, shard_id: str | None = None) -> None:
        """Open or create. `shard_id`: the expected owner; None: the recorded owner, or a new one.

        Raises `Unavailable` if another process has locked it, `VersionMismatch` for another format,
        `InvalidField` if it belongs to another shard, cannot be written or holds links.
        """
        self.path = path
        try:
            make_folder(path)
            make_private(path / _LOCK)
            self._lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise InvalidField("data-dir", f"{path} cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_fd)
            raise Unavailable(f"{path} is in use by another shard; stop it or name another folder") from error
        try:
            self.shard_id = self._load_identity(shard_id)
            """The UUID that decides which chunks the shard holds. Every directory of a shard contains it."""
        except OSError as error:
            self.close()
            raise InvalidField("data-dir", f"{path} cannot be used ({error.strerror})") from error
        except BaseException:
            self.close()
            raise

    def _load_identity(self, shard_id: str | None) -> str:
        file = self.path / _IDENTITY
        if not file.exists():
            new_id = shard_id or str(uuid.uuid4())
            identity = {"format_version": DATA_FORMAT_VERSION, "shard_id": new_id}
            write_durably(file, json.dumps(identity).encode())
            return new_id
        make_private(file)
        try:
            document = json.loads(file.read_bytes())
            self._check_format(document["format_version"])  # first: other formats may have other fields
            if document.keys() != {"format_version", "shard_id"}:
                raise ValueError("unknown or missing fields")
            held_id = str(document["shard_id"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Corrupted(f"{file} is damaged ({error}); restore it or empty the folder") from error
        if shard_id is not None and held_id != shard_id:
            raise InvalidField(
                "ssd",
                f"{self.path} belongs to shard {held_id}, not {shard_id}; name another folder",
            )
        return held_id

    def _check_format(self, version: object) -> None:
        if version != DATA_FORMAT_VERSION:
            raise VersionMismatch(
                f"{self.path} has data format {version}; this version of kintsugi reads "
                f"{DATA_FORMAT_VERSION}. Nothing was changed: use the version that wrote it, or name another "
                "folder"
            )

    def close(self) -> None:
        os.close(self._lock_fd)
