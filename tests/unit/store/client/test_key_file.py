"""The key file: what it may hold, how it changes, and that no message or freed block repeats a key."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField, NotFound, PermissionDenied
from kintsugi.store.client import key_file
from kintsugi.store.client.key_file import (
    KeyFile,
    create_keys,
    destroy_keys,
    read_entries,
    retire_keys,
    rotate_keys,
)
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol import watched_files
from kintsugi.store.protocol.interface import DATA_KEYS, KEPT_KEYS
from kintsugi.store.protocol.keys import DATA_KEYS_MAX, NamespaceKeys, key_id_of

SECRET = "5ec7e7" + "0" * 58


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)
    return tmp_path / "keys.json"


def write(path: Path, entry: object, namespace: str = "acme") -> Path:
    path.write_text(json.dumps({"namespaces": {namespace: entry}}))
    path.chmod(0o600)
    return path


def test_a_part_of_a_namespace_has_its_keys_and_none_once_they_are_destroyed(path: Path) -> None:
    keys = create_keys(path, "docs")
    file = KeyFile(path)
    assert file.find("docs/-/acme") == file.find("docs") == keys
    assert file.find("docs/acme") is None
    destroy_keys(path, "docs")
    with pytest.raises(PermissionDenied):
        file.find("docs/-/acme")


def test_replacing_data_keys_destroys_them_and_keeps_the_names(path: Path) -> None:
    create_keys(path, "docs")
    before = rotate_keys(path, "docs")
    own = create_keys(path, "docs/-/acme")
    other = create_keys(path, "other")
    file = KeyFile(path)
    assert file.replace("docs/-/beta") == 0, "a part without keys of its own uses the namespace's"
    assert file.find("docs") == before
    assert file.replace("docs") == 3
    after, part = file.find("docs"), file.find("docs/-/acme")
    assert after is not None
    assert part is not None
    assert (after.name_key, part.name_key) == (before.name_key, own.name_key)
    assert not set(after.data_keys + part.data_keys) & set(before.data_keys + own.data_keys)
    assert file.find("other") == other
    assert KeyFile(path).find("docs") == after


def test_a_receipt_says_what_became_of_data_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_keys(path, "docs")
    options = GrpcOptions(keys=KeyFile(path))
    assert GrpcOptions().destroy_keys("docs") == options.destroy_keys("plain") == []
    (destroyed,) = options.destroy_keys("docs")
    assert (destroyed.place, destroyed.items) == (DATA_KEYS, 1)
    monkeypatch.setattr(os, "replace", read_only)
    (kept,) = options.destroy_keys("docs")
    assert (kept.place, kept.items) == (KEPT_KEYS, 0)


def read_only(*paths: object) -> None:
    raise OSError(30, "Read-only file system")


def test_a_session_of_a_tenant_has_the_tenants_keys(path: Path) -> None:
    create_keys(path, "docs")
    tenants = create_keys(path, "docs/-/acme")
    file = KeyFile(path)
    assert file.find("docs/-/acme/.s") == tenants
    destroy_keys(path, "docs/-/acme")
    with pytest.raises(PermissionDenied):
        KeyFile(path).find("docs/-/acme/.s")
    assert file.find("docs/-/beta/.s") is not None


def test_a_file_that_others_may_read_is_refused(path: Path) -> None:
    create_keys(path, "acme")
    path.chmod(0o644)
    with pytest.raises(InvalidField, match="chmod 600"):
        KeyFile(path)
    with pytest.raises(InvalidField, match="chmod 600"):
        rotate_keys(path, "acme")


def test_a_file_that_was_refused_is_read_once_its_mode_is_right(path: Path) -> None:
    create_keys(path, "acme")
    source = KeyFile(path)
    destroy_keys(path, "acme")
    path.chmod(0o644)
    assert source.find("acme") is not None, "the previous keys stay in use"
    path.chmod(0o600)
    with pytest.raises(PermissionDenied, match="destroyed"):
        source.find("acme")


def test_a_changed_file_keeps_its_group_and_mode(path: Path) -> None:
    create_keys(path, "acme")
    path.chmod(0o700)
    before = path.stat()
    rotate_keys(path, "acme")
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_new_keys_are_random_and_their_owners_alone(path: Path) -> None:
    first, second = create_keys(path, "acme"), create_keys(path, "other")
    assert len({first.name_key, second.name_key, *first.data_keys, *second.data_keys}) == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyFile(path).find("acme") == first
    assert KeyFile(path).find("other") == second
    assert KeyFile(path).find("unnamed") is None


def test_keys_are_not_created_twice(path: Path) -> None:
    create_keys(path, "acme")
    with pytest.raises(InvalidField, match="rotate them instead"):
        create_keys(path, "acme")
    with pytest.raises(InvalidField, match="namespace"):
        create_keys(path, "no/such name")


def test_a_rotated_key_encrypts_and_the_old_ones_decrypt_until_they_are_retired(path: Path) -> None:
    create_keys(path, "acme")
    source = KeyFile(path)
    first = source.find("acme")
    assert first is not None
    second = rotate_keys(path, "acme")
    assert source.find("acme") == second
    assert second.name_key == first.name_key
    assert second.newest_id != first.newest_id
    assert list(second.by_id) == [second.newest_id, first.newest_id]
    assert retire_keys(path, "acme") == ((first.newest_id,), second.newest_id)
    assert source.find("acme") == NamespaceKeys(first.name_key, second.data_keys[:1])
    assert retire_keys(path, "acme") == ((), second.newest_id)


def test_there_is_an_end_to_rotation(path: Path) -> None:
    create_keys(path, "acme")
    for _ in range(DATA_KEYS_MAX - 1):
        rotate_keys(path, "acme")
    with pytest.raises(InvalidField, match="between 1 and 16"):
        rotate_keys(path, "acme")


def test_a_namespace_stays_refused_once_its_keys_are_destroyed(path: Path) -> None:
    create_keys(path, "acme")
    keys, source = rotate_keys(path, "acme"), KeyFile(path)
    key_ids, destroyed = destroy_keys(path, "acme")
    assert key_ids == tuple(keys.by_id)
    with pytest.raises(PermissionDenied, match=f"destroyed at {destroyed}; create new ones"):
        source.find("acme")
    for change in (rotate_keys, retire_keys, destroy_keys):
        with pytest.raises(NotFound, match="kintsugi keys create"):
            change(path, "acme")
    fresh = create_keys(path, "acme")
    assert source.find("acme") == fresh
    assert fresh.name_key != keys.name_key


@pytest.mark.parametrize("change", [retire_keys, destroy_keys])
def test_what_the_file_was_is_overwritten(path: Path, change: object) -> None:
    """Whoever had it open, as a thief has the blocks of a disk, reads nothing of it afterwards."""
    create_keys(path, "acme")
    keys = rotate_keys(path, "acme")
    with path.open("rb") as before:
        change(path, "acme")  # type: ignore[operator]
        assert set(before.read()) == {0}
    old = keys.data_keys[1].hex()
    assert not any(old in one.read_text() for one in path.parent.iterdir())


def test_a_link_to_the_file_stays_one(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    create_keys(path, "acme")
    rotate_keys(link, "acme")
    assert link.is_symlink()
    assert KeyFile(path).find("acme") == KeyFile(link).find("acme")


def test_a_file_that_becomes_invalid_leaves_the_keys_in_use(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_keys(path, "acme")
    source = KeyFile(path)
    keys = source.find("acme")
    write(path, {"name_key": SECRET, "data_keys": ["short"]})
    assert source.find("acme") == keys
    assert "the key file is invalid; its previous content stays in use" in caplog.text
    assert SECRET not in caplog.text


def test_the_file_is_looked_at_once_a_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "CHECK_S", 1.0)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    create_keys(path, "acme")
    source = KeyFile(path)
    before, after = source.find("acme"), rotate_keys(path, "acme")
    assert source.find("acme") == before
    now_s += 1.0
    assert source.find("acme") == after


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SECRET, "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (f'["{SECRET}"]', "must hold one object"),
        (f'{{"namespaces": {{}}, "{SECRET}": 1}}', "must hold one object"),
        (f'{{"namespaces": "{SECRET}"}}', "must hold one object"),
    ],
)
def test_a_file_of_another_form_is_refused(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidField, match=problem) as refused:
        KeyFile(path)
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (SECRET, "must have name_key and a list"),
        ({"name_key": SECRET}, "must have name_key and a list"),
        ({"name_key": SECRET, "data_keys": SECRET}, "must have name_key and a list"),
        ({"name_key": SECRET, "data_keys": [SECRET], "more": 1}, "must have name_key and a list"),
        ({"name_key": SECRET, "data_keys": [SECRET], "destroyed": "now"}, "must have name_key and a list"),
        ({"destroyed": 7}, "must have name_key and a list"),
        ({"name_key": SECRET, "data_keys": []}, "acme.data_keys: has 0 keys"),
        ({"name_key": SECRET, "data_keys": [SECRET] * 17}, "acme.data_keys: has 17 keys"),
        ({"name_key": SECRET, "data_keys": [SECRET[:-2]]}, "acme.data_keys: has a key of 31 bytes"),
        ({"name_key": SECRET[:-2], "data_keys": [SECRET]}, "acme.name_key: has 31 bytes"),
        ({"name_key": SECRET, "data_keys": [SECRET + "x"]}, "acme.key: is not hexadecimal"),
        ({"name_key": 7, "data_keys": [SECRET]}, "acme.key: is not hexadecimal"),
    ],
)
def test_an_invalid_entry_is_named_without_its_keys(path: Path, entry: object, problem: str) -> None:
    with pytest.raises(InvalidField, match=problem) as refused:
        read_entries(write(path, entry))
    assert SECRET[:12] not in str(refused.value)


def test_a_file_that_is_not_there_or_too_large_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidField, match="cannot be read"):
        KeyFile(path)
    with pytest.raises(InvalidField, match="cannot be written"):
        create_keys(path.parent / "none" / "keys.json", "acme")
    monkeypatch.setattr(key_file, "FILE_BYTES_MAX", 8)
    path.write_text(" " * 9)
    path.chmod(0o600)
    with pytest.raises(InvalidField, match="more than 8 bytes"):
        KeyFile(path)


def test_keys_are_not_shown() -> None:
    keys = NamespaceKeys(bytes.fromhex(SECRET), (bytes.fromhex(SECRET),))
    assert repr(bytes.fromhex(SECRET)) not in repr(keys)
    assert key_id_of(keys.data_keys[0]) not in SECRET
