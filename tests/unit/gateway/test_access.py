from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField, PermissionDenied, Unauthenticated, UnknownField
from kintsugi.core.namespaces.rules import NamespaceRules
from kintsugi.gateway import access
from kintsugi.gateway.access import (
    ANYONE,
    Access,
    Caller,
    TokenFile,
    add_grant,
    check_exposure,
    check_namespace_pattern,
    grants_of,
    new_token,
    open_access,
)


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "FILE_CHECK_S", 0.0)


def file_with(folder: Path, **namespaces: tuple[str, ...]) -> tuple[Path, dict[str, str]]:
    tokens = {}
    for name, patterns in namespaces.items():
        tokens[name], grant = new_token(name, patterns)
        add_grant(folder / "tokens.json", grant)
    return folder / "tokens.json", tokens


def test_a_token_names_its_owner_and_is_not_in_the_file(tmp_path: Path) -> None:
    path, tokens = file_with(tmp_path, search=("search",), docs=("docs/*",))
    assert TokenFile(path).caller(tokens["docs"]) == Caller("docs", ("docs/*",))
    assert all(token not in path.read_text() for token in tokens.values())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len({*tokens.values()}) == 2


@pytest.mark.parametrize("token", [None, "", "kg_wrong", "\ud800"])
def test_no_or_another_token_is_refused(tmp_path: Path, token: str | None) -> None:
    path, _ = file_with(tmp_path, search=("search",))
    with pytest.raises(Unauthenticated, match=r"authorization: Bearer|ask for another"):
        TokenFile(path).caller(token)


@pytest.mark.parametrize(
    ("patterns", "allowed", "refused"),
    [
        (("search",), ["search"], ["search2", "searc", "other"]),
        (("docs/*",), ["docs/a", "docs/a/b"], ["docs", "docs2"]),
        (("*",), ["anything", "docs/a"], []),
        (("a", "team-*"), ["a", "team-1"], ["b", "team"]),
    ],
)
def test_patterns_bind_a_caller_to_namespaces(
    patterns: tuple[str, ...], allowed: list[str], refused: list[str]
) -> None:
    caller = Caller("someone", patterns)
    for namespace in allowed:
        assert caller.authorize(namespace) == namespace
    for namespace in refused:
        with pytest.raises(PermissionDenied, match=f"may not use namespace '{namespace}'"):
            caller.authorize(namespace)
    with pytest.raises(InvalidField, match="mandatory"):
        caller.authorize("")
    assert caller.is_unrestricted == (patterns == ("*",))


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, tokens = file_with(tmp_path, first=("a",))
    tokens_now = TokenFile(path)
    second, grant = new_token("second", ["b"])
    add_grant(path, grant)
    assert tokens_now.caller(second).name == "second"
    path.write_text(json.dumps({"tokens": []}))
    with pytest.raises(Unauthenticated):
        tokens_now.caller(tokens["first"])


def test_a_file_that_breaks_leaves_the_tokens_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, tokens = file_with(tmp_path, first=("a",))
    tokens_now = TokenFile(path)
    path.write_text("{")
    assert tokens_now.caller(tokens["first"]).name == "first"
    assert "stay in use" in caplog.text
    path.unlink()
    assert tokens_now.caller(tokens["first"]).name == "first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ('{"tokens": [{"name": "a", "sha256": "00", "namespaces": ["a"]}]}', "sha256"),
        ('{"tokens": [{"name": "a", "sha256": "%s", "namespaces": []}]}', "namespaces"),
        ('{"tokens": [{"name": "a", "sha256": "%s", "namespaces": ["a b"]}]}', "namespaces"),
        ('{"tokens": [{"name": "", "sha256": "%s", "namespaces": ["a"]}]}', "name"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text.replace("%s", "0" * 64))
    with pytest.raises(InvalidField, match=message):
        TokenFile(path)


def test_a_misspelt_key_gets_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text('{"tokens": [{"name": "a", "sha256": "%s", "namespace": ["a"]}]}' % ("0" * 64))
    with pytest.raises(UnknownField, match="did you mean 'namespaces'"):
        TokenFile(path)


def test_bounds_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = file_with(tmp_path, a=("a",), b=("b",))
    monkeypatch.setattr(access, "TOKENS_MAX", 1)
    with pytest.raises(InvalidField, match="at most 1"):
        TokenFile(path)
    monkeypatch.setattr(access, "FILE_BYTES_MAX", 10)
    with pytest.raises(InvalidField, match="more than 10 bytes"):
        TokenFile(path)
    with pytest.raises(InvalidField, match="cannot be read"):
        TokenFile(tmp_path / "absent")


def test_a_name_is_given_once(tmp_path: Path) -> None:
    path, _ = file_with(tmp_path, a=("a",))
    with pytest.raises(InvalidField, match="remove it there first"):
        add_grant(path, new_token("a", ["b"])[1])
    assert len(grants_of(path)) == 1
    if os.geteuid():  # root may write anywhere
        os.chmod(tmp_path, 0o500)
        with pytest.raises(InvalidField, match="cannot be written"):
            add_grant(path, new_token("c", ["b"])[1])
        os.chmod(tmp_path, 0o700)


@pytest.mark.parametrize("pattern", ["", "a b*", "/a", "-*", "a*b"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidField, match="namespaces"):
        check_namespace_pattern(pattern)


def test_every_token_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tokens = file_with(tmp_path, a=("a",), b=("b",), c=("c",))
    compared = []
    whole = access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda x, y: compared.append(y) or whole(x, y))
    TokenFile(path).caller(tokens["a"])
    assert len(compared) == 3


def test_without_a_file_everyone_is_anyone() -> None:
    assert not open_access("").has_tokens
    assert open_access("").caller(None) == ANYONE
    assert ANYONE.authorize("whatever") == "whatever"


def test_beyond_loopback_tokens_and_tls_are_needed() -> None:
    check_exposure("127.0.0.1:7500", False, False, False)
    check_exposure("0.0.0.0:7500", True, True, False)
    check_exposure("0.0.0.0:7500", False, False, True)
    with pytest.raises(InvalidField, match="--tokens-file and --tls-cert with --tls-key, or say --insecure"):
        check_exposure("0.0.0.0:7500", False, False, False)
    with pytest.raises(InvalidField, match="give --tls-cert with --tls-key"):
        check_exposure("0.0.0.0:7500", True, False, False)


def test_rules_beside_the_tokens_are_read_again_and_kept_when_a_token_is_added(tmp_path: Path) -> None:
    path, tokens = file_with(tmp_path, search=("search",))
    access_by_file = TokenFile(path)
    assert access_by_file.rules() == NamespaceRules()
    rules = {"limits": {"search": {"requests_per_s": 3}}, "privacy": {"*": {"accounting": False}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **rules}))
    assert access_by_file.rules().limits["search"].requests_per_s == 3
    add_grant(path, new_token("other", ("other",))[1])
    assert access_by_file.rules().limits["search"].requests_per_s == 3
    assert not access_by_file.rules().privacy_of("any").accounting
    assert access_by_file.caller(tokens["search"]).name == "search"
    path.write_text(json.dumps({"tokens": [], "limits": {"search": {"requests_per_s": -3}}}))
    assert access_by_file.rules().limits["search"].requests_per_s == 3  # the file is invalid
    assert Access().rules() == NamespaceRules()
