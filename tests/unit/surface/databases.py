"""What is kept in SQLite: the tables of ledger and known chunks."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.precompute.ledger import Ledger


def surface() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Ledger(folder).close()
        KnownChunks(folder).close()
        return {path.name: _schema(path) for path in sorted(folder.glob("*.sqlite"))}


def _schema(path: Path) -> dict[str, Any]:
    """Version of the schema, and the statement that makes each table and index."""
    database = sqlite3.connect(path)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        made = database.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        )
        return {"version": version, **{f"{kind} {name}": " ".join(sql.split()) for kind, name, sql in made}}
    finally:
        database.close()
