"""JSON that nests too deeply, or holds numbers without end, is an error of ours whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.cli.commands.backup import INDEX, read_index
from kintsugi.core.errors import KintsugiError
from kintsugi.store.client.directory import FileDirectory
from kintsugi.store.client.erasures import read_cursor
from kintsugi.store.shard.tiers.home import Home

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "identity of a tier": ("kintsugi.json", lambda path: Home(path.parent)),
    "shard map": ("map.json", FileDirectory),
    "index of a backup": (INDEX, lambda path: read_index(path.parent)),
    "cursor of erasures": ("cursor", lambda path: read_cursor(path.read_text())),
}


@pytest.mark.parametrize("text", ["[" * 40_000, '{"a": 1e999, "timestamp": []}'], ids=["nested", "endless"])
@pytest.mark.parametrize("reader", READERS)
def test_a_hostile_document_is_an_error_of_ours(reader: str, text: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(KintsugiError):
        read(path)
