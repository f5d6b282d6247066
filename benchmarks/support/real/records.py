"""What was measured, one JSON object per line, so that a run can be done in parts and joined."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField

Key = tuple[str | int, ...]


class Records:
    """An append-only file of records by key. Its first line says what was measured, and on which prompts."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Open the file, or begin it. Raises `InvalidField` if it holds records of another measurement."""
        self._path = path
        self._found: dict[Key, dict[str, Any]] = {}
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        if lines and not lines[-1].endswith(b"\n"):  # the process was killed while it wrote
            lines.pop()
        if lines and json.loads(lines[0]) != dict(header):
            raise InvalidField(
                "records",
                f"{path} holds another measurement: {lines[0].decode().strip()}; name another folder",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines) or _line(header))
        for line in lines[1:]:
            record = json.loads(line)
            self._found[tuple(record["key"])] = record["values"]

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> dict[str, Any]:
        return self._found[key]

    def add(self, key: Key, values: Mapping[str, Any]) -> None:
        """Keep the values of a new key."""
        assert key not in self._found, key
        self._found[key] = dict(values)
        with self._path.open("ab") as file:
            file.write(_line({"key": list(key), "values": values}))

    def below(self, *start: str | int) -> dict[Key, dict[str, Any]]:
        """The records whose keys begin like this, by the rest of the key."""
        length = len(start)
        return {key[length:]: values for key, values in self._found.items() if key[:length] == start}


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
