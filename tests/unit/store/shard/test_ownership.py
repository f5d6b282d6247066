"""Who may change a chunk, and who may take the lock: read from the sources of the shard."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import kintsugi.store.shard
from kintsugi.store.shard.entry import ChunkEntry, Residence

ROOM_NAME = kintsugi.store.shard.__name__
ROOM = Path(kintsugi.store.shard.__file__).parent
STATE = {field.name for kind in (ChunkEntry, Residence) for field in fields(kind)}
TABLE_LOCK = {"_lock", "_changed", "_load_added"}
LOCK_TYPES = {"Lock", "RLock", "Condition"}
MUTATORS = {"add", "append", "clear", "difference_update", "discard", "extend", "pop", "remove", "update"}


def state_changes(tree: ast.AST) -> Iterator[int]:
    """Lines that change a field named like one of an entry or residence, of any object except `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if is_state(node):
                yield node.lineno
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if name in ("setattr", "object.__setattr__") or (
                name.rpartition(".")[2] in MUTATORS and is_state(owner)
            ):
                yield node.lineno


def lock_uses(tree: ast.AST) -> Iterator[int]:
    """Lines that take a lock from another object, or are handed one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr in TABLE_LOCK or node.attr == "lock"):
            if not is_self(node.value):
                yield node.lineno
        elif isinstance(node, ast.arg) and node.annotation is not None:
            words = ast.unparse(node.annotation).replace("|", " ").replace(".", " ").split()
            if LOCK_TYPES & set(words):
                yield node.lineno


def is_state(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in STATE and not is_self(node.value)


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def search(check: Callable[[ast.AST], Iterator[int]], *, but: str = "") -> list[str]:
    """Places in the room that `check` finds, outside one file."""
    files = [path for path in ROOM.rglob("*.py") if str(path.relative_to(ROOM)) != but]
    assert len(files) > 20
    return [f"{path}:{line}" for path in files for line in check(ast.parse(path.read_text()))]


def test_only_the_life_changes_an_entry() -> None:
    assert search(state_changes, but="life.py") == []
    assert list(state_changes(ast.parse((ROOM / "life.py").read_text())))


def test_entries_and_residences_have_no_methods_that_change_them() -> None:
    tree = ast.parse((ROOM / "entry.py").read_text())
    plain = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in ("ChunkEntry", "Residence")]
    assert len(plain) == 2
    attributes = [node for kind in plain for node in ast.walk(kind) if isinstance(node, ast.Attribute)]
    assert [node.lineno for node in attributes if isinstance(node.ctx, ast.Store | ast.Del)] == []


def test_only_the_table_applies_transitions() -> None:
    importers = [
        str(path.relative_to(ROOM))
        for path in ROOM.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (
            (node.module == ROOM_NAME and any(alias.name == "life" for alias in node.names))
            or node.module == f"{ROOM_NAME}.life"
        )
    ]
    assert importers == ["table.py"]


def test_the_lock_is_handed_to_nobody() -> None:
    assert search(lock_uses) == []


@pytest.mark.parametrize(
    "line",
    [
        "entry.ram = None",
        "job.entry.pins += 1",
        "del residence.lost",
        "entry.disk, other = residence, None",
        "target.unloaded.update(range(3))",
        "residence.waiters.append(callback)",
        "setattr(entry, 'gone', True)",
    ],
)
def test_a_change_of_state_is_seen(line: str) -> None:
    assert list(state_changes(ast.parse(line))) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "with shard.lock: pass",
        "with self._table._lock: pass",
        "def bury(lock: threading.RLock) -> None: ...",
        "def start(changed: Condition | None) -> None: ...",
    ],
)
def test_a_lock_that_travels_is_seen(line: str) -> None:
    assert list(lock_uses(ast.parse(line))) == [1]
