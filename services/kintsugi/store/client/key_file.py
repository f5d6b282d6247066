"""Keys in a file that `kintsugi keys` writes. Changes of the file take effect within a second.

The file is JSON. Each key has 64 hexadecimal digits; the newest data key comes first:

    {"namespaces": {
      "acme": {"name_key": "...", "data_keys": ["...", "..."]},
      "gone": {"destroyed": "2026-11-22T18:00:00Z"}}}

A namespace that is not in the file is not encrypted; a part of a namespace has the namespace's keys. A
namespace whose keys were destroyed stays in the file, so that its chunks are refused instead of stored
unencrypted. Error messages never quote the file."""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound, PermissionDenied
from kintsugi.core.namespaces import enclosing, is_within
from kintsugi.core.schema import parse_json
from kintsugi.core.spaces import NAME_KEY_BYTES, check_namespace
from kintsugi.store.protocol.files import check_private, sync_path
from kintsugi.store.protocol.keys import DATA_KEY_BYTES, KeySource, NamespaceKeys
from kintsugi.store.protocol.watched_files import WatchedFiles

FILE_BYTES_MAX = 8 << 20


@dataclass(frozen=True)
class KeyEntry:
    """Entry of one namespace: either its keys, or the time when they were destroyed."""

    keys: NamespaceKeys | None
    destroyed: str = ""


Entries = Mapping[str, KeyEntry]


class KeyFile(KeySource):
    """The keys in the file at `path`."""

    def __init__(self, path: Path) -> None:
        """Raises `InvalidField` for a file that cannot be read or parsed."""
        self.path = path
        self._file = WatchedFiles("key file", (path,), partial(read_entries, path))

    def find(self, namespace: str) -> NamespaceKeys | None:
        entries = self._file.current()
        entry = next((entries[name] for name in reversed(enclosing(namespace)) if name in entries), None)
        if entry is None:
            return None
        if entry.keys is None:
            raise PermissionDenied(
                f"the keys of namespace {namespace!r} were destroyed at {entry.destroyed}; "
                "create new ones with kintsugi keys create to use it again"
            )
        return entry.keys

    def replace(self, namespace: str) -> int:
        entries = read_entries(self.path)
        own = {
            name: entry.keys
            for name, entry in entries.items()
            if entry.keys is not None and is_within(name, namespace)
        }
        if not own:
            return 0
        fresh = {
            name: KeyEntry(replace(keys, data_keys=(secrets.token_bytes(DATA_KEY_BYTES),)))
            for name, keys in own.items()
        }
        _write(self.path, {**entries, **fresh})
        self._file.read_now()
        return sum(len(keys.data_keys) for keys in own.values())


def read_entries(path: Path) -> dict[str, KeyEntry]:
    """Return the file's entries by namespace. Raises `InvalidField`, also for a file that other users may
    read."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidField(
            "keys", f"{path} cannot be read ({error.strerror}); make a key file with kintsugi keys create"
        ) from None
    check_private("keys", path)
    if len(text) > FILE_BYTES_MAX:
        raise InvalidField("keys", f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        values = parse_json(text)
    except (ValueError, RecursionError):  # their messages would quote the file
        raise InvalidField("keys", f"{path} is not JSON; make a key file with kintsugi keys create") from None
    namespaces = values.get("namespaces") if isinstance(values, dict) and len(values) == 1 else None
    if not isinstance(namespaces, dict):
        raise InvalidField("keys", f'{path} must hold one object: {{"namespaces": {{…}}}}')
    try:
        return {check_namespace(name): _parse_entry(name, entry) for name, entry in namespaces.items()}
    except InvalidField as error:
        raise InvalidField("keys", f"{path}: {error}") from None


def _parse_entry(namespace: str, entry: Any) -> KeyEntry:
    names = set(entry) if isinstance(entry, dict) else set()
    if names == {"destroyed"} and isinstance(entry["destroyed"], str):
        return KeyEntry(None, entry["destroyed"])
    if names != {"name_key", "data_keys"} or not isinstance(entry["data_keys"], list):
        raise InvalidField(namespace, "must have name_key and a list data_keys, or only destroyed")
    try:
        data_keys = tuple(_parse_key(key) for key in entry["data_keys"])
        return KeyEntry(NamespaceKeys(_parse_key(entry["name_key"]), data_keys))
    except InvalidField as error:
        raise InvalidField(f"{namespace}.{error.field}", error.problem) from None


def _parse_key(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        raise InvalidField("key", "is not hexadecimal digits") from None


def create_keys(path: Path, namespace: str) -> NamespaceKeys:
    """Add new keys for a namespace. A missing file is created with mode 0600. Raises `InvalidField` for an
    invalid file, and for a namespace that already has keys."""
    check_namespace(namespace)
    entries = read_entries(path) if path.exists() else {}
    before = entries.get(namespace)
    if before is not None and before.keys is not None:
        raise InvalidField("namespace", f"{namespace!r} has keys in {path}; rotate them instead")
    keys = NamespaceKeys(secrets.token_bytes(NAME_KEY_BYTES), (secrets.token_bytes(DATA_KEY_BYTES),))
    _write(path, {**entries, namespace: KeyEntry(keys)})
    return keys


def rotate_keys(path: Path, namespace: str) -> NamespaceKeys:
    """Add a data key, which encrypts new chunks. Chunks encrypted with older keys stay readable. Raises
    `InvalidField` and `NotFound`."""
    entries, keys = _find_keys(path, namespace)
    keys = replace(keys, data_keys=(secrets.token_bytes(DATA_KEY_BYTES), *keys.data_keys))
    _write(path, {**entries, namespace: KeyEntry(keys)})
    return keys


def retire_keys(path: Path, namespace: str) -> tuple[tuple[str, ...], str]:
    """Destroy every data key except the newest, which makes the chunks of those keys unreadable. Returns the
    ids of the destroyed keys, and the id of the newest. Raises `InvalidField` and `NotFound`."""
    entries, keys = _find_keys(path, namespace)
    _write(path, {**entries, namespace: KeyEntry(replace(keys, data_keys=keys.data_keys[:1]))})
    newest, *retired = keys.by_id
    return tuple(retired), newest


def destroy_keys(path: Path, namespace: str) -> tuple[tuple[str, ...], str]:
    """Destroy all keys of a namespace. Its chunks become unreadable, and without the name key no one can
    check whether a text was stored. Returns the ids of the destroyed data keys, and the time. Raises
    `InvalidField` and `NotFound`."""
    entries, keys = _find_keys(path, namespace)
    destroyed = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    _write(path, {**entries, namespace: KeyEntry(None, destroyed)})
    return tuple(keys.by_id), destroyed


def _find_keys(path: Path, namespace: str) -> tuple[Entries, NamespaceKeys]:
    entries = read_entries(path)
    entry = entries.get(namespace)
    if entry is None or entry.keys is None:
        raise NotFound(
            f"namespace {namespace!r} has no keys in {path}; create some with kintsugi keys create"
        )
    return entries, entry.keys


def _write(path: Path, entries: Entries) -> None:
    """Replace the file atomically and durably, then overwrite the old content with zeros, because a destroyed
    key must not stay readable in freed blocks. A copy-on-write file system may still hold it. Owner, group
    and mode stay, so that the service can read a file that an administrator wrote."""
    values = {name: _to_json(entry) for name, entry in sorted(entries.items())}
    path = path.resolve()  # a symbolic link stays a link
    try:
        old = os.open(path, os.O_RDWR) if path.exists() else None
        try:
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # mode 0600
                file.write(json.dumps({"namespaces": values}, indent=2) + "\n")
                file.flush()
                if old is not None:
                    was = os.fstat(old)
                    os.fchown(file.fileno(), was.st_uid, was.st_gid)
                    os.fchmod(file.fileno(), stat.S_IMODE(was.st_mode))
                os.fsync(file.fileno())
            os.replace(file.name, path)
            sync_path(path.parent)
            if old is not None:
                os.pwrite(old, bytes(os.fstat(old).st_size), 0)
                os.fsync(old)
        finally:
            if old is not None:
                os.close(old)
    except OSError as error:
        raise InvalidField("file", f"{path} cannot be written ({error.strerror})") from None


def _to_json(entry: KeyEntry) -> dict[str, Any]:
    if entry.keys is None:
        return {"destroyed": entry.destroyed}
    return {
        "name_key": entry.keys.name_key.hex(),
        "data_keys": [key.hex() for key in entry.keys.data_keys],
    }
