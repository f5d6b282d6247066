"""`kintsugi keys`: what each command does to the file, and that no key is ever printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.store.client.key_file import KeyFile
from kintsugi.store.protocol.keys import NamespaceKeys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def run(file: Path, command: str, *more: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["keys", command, "acme", "--file", str(file), *more], input=typed)


def document_of(done: Result) -> dict[str, Any]:
    assert done.exit_code == ExitCode.OK, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def keys_in(file: Path) -> NamespaceKeys:
    keys = KeyFile(file).find("acme")
    assert keys is not None
    return keys


def test_keys_are_made_rotated_retired_and_destroyed(file: Path) -> None:
    secrets: set[str] = set()
    printed = ""
    ids = []
    for command in ("create", "rotate"):
        done = run(file, command)
        assert done.exit_code == ExitCode.OK, done.output
        keys = keys_in(file)
        ids.append(keys.newest_id)
        assert done.stdout == f"encrypts with {keys.newest_id}\n"
        secrets |= {keys.name_key.hex(), *(key.hex() for key in keys.data_keys)}
        printed += done.output
    first, second = ids
    done = run(file, "retire", "--json")
    assert document_of(done) == {"namespace": "acme", "key_id": second, "destroyed": [first]}
    assert tuple(keys_in(file).by_id) == (second,)
    printed += done.output
    done = run(file, "destroy", "--yes", "--json")
    document = document_of(done)
    assert document.pop("destroyed_at").endswith("Z")
    assert document == {"namespace": "acme", "key_id": "", "destroyed": [second]}
    assert "still hold these keys" in done.stderr
    printed += done.output
    assert not any(secret in printed for secret in secrets)


def test_keys_are_destroyed_only_once_it_is_confirmed(file: Path) -> None:
    run(file, "create")
    before = keys_in(file)
    assert run(file, "destroy", typed="n\n").exit_code != ExitCode.OK
    assert keys_in(file) == before
    done = run(file, "destroy", typed="y\n")
    assert done.exit_code == ExitCode.OK
    assert f"destroyed {before.newest_id}\n" in done.stdout


@pytest.mark.parametrize("command", ["rotate", "retire", "destroy"])
def test_a_namespace_without_keys_is_named(file: Path, command: str) -> None:
    CliRunner().invoke(app, ["keys", "create", "other", "--file", str(file)])
    done = run(file, command, *(["--yes"] if command == "destroy" else []))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "namespace 'acme' has no keys" in done.stderr
