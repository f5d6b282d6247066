from __future__ import annotations

import hmac
import json
import os
import stat
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField, NotFound, PermissionDenied, Unauthenticated, UnknownField
from kintsugi.core.namespaces import NamespaceRules, check_namespace_pattern
from kintsugi.gateway import access as gateway_access
from kintsugi.gateway.access import add_grant, check_exposure, new_token, revoke_grant
from kintsugi.store.protocol import access, watched_files
from kintsugi.store.protocol.access import (
    ANYONE,
    Access,
    Caller,
    TokenFile,
    Verb,
    identities_of_certificate,
    open_access,
    read_document,
    read_values,
)


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)


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


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[2J", "\udcff"])
def test_a_name_that_logs_and_messages_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(InvalidField, match=r"^name: "):
        new_token(name, ("search",))


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
    assert "the tokens file is invalid; its previous content stays in use" in caplog.text
    path.unlink()
    assert tokens_now.caller(tokens["first"]).name == "first"


def test_a_file_that_others_may_read_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, tokens = file_with(tmp_path, first=("a",))
    tokens_now = TokenFile(path)
    path.chmod(0o644)
    with pytest.raises(InvalidField, match=r"tokens_file: .*\(mode 644\); chmod 600 it"):
        TokenFile(path)
    path.write_bytes(path.read_bytes() + b"\n")
    assert tokens_now.caller(tokens["first"]).name == "first"
    assert "chmod 600" in caplog.text
    add_grant(path, new_token("second", ("b",))[1])
    assert [grant.name for grant in read_document(path).tokens] == ["first", "second"], (
        "which makes it private"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"tokens": [], "tokens": []}', "'tokens' occurs twice"),
        ("[" * 100_000, "is not JSON"),
        ('{"tokens": [{"name": "a", "sha256": "00", "namespaces": ["a"]}]}', "sha256"),
        ('{"tokens": [{"name": "a", "sha256": "%s", "namespaces": []}]}', "namespaces"),
        ('{"tokens": [{"name": "a", "sha256": "%s", "namespaces": ["a b"]}]}', "namespaces"),
        ('{"tokens": [{"name": "", "sha256": "%s", "namespaces": ["a"]}]}', "name"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokens.json"
    path.touch(0o600)
    path.write_text(text.replace("%s", "0" * 64))
    with pytest.raises(InvalidField, match=message):
        TokenFile(path)


def test_a_misspelt_key_gets_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.touch(0o600)
    path.write_text('{"tokens": [{"name": "a", "sha256": "%s", "namespace": ["a"]}]}' % ("0" * 64))
    with pytest.raises(UnknownField, match="did you mean 'namespaces'"):
        TokenFile(path)


def test_bounds_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = file_with(tmp_path, a=("a",), b=("b",))
    monkeypatch.setattr(access, "ENTRIES_MAX", 1)
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
    assert len(read_document(path).tokens) == 1
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
    whole = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda x, y: compared.append(y) or whole(x, y))
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
    with pytest.raises(InvalidField, match="--tokens-file and --tls-cert with --tls-key, or pass --insecure"):
        check_exposure("0.0.0.0:7500", False, False, False)
    with pytest.raises(InvalidField, match="give --tls-cert with --tls-key"):
        check_exposure("0.0.0.0:7500", True, False, False)


def test_a_token_with_verbs_expires_by_the_clock_and_can_be_revoked(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token, grant = new_token("ingest", ["docs"], [Verb.PUT], "2027-01-31T12:00:00Z")
    add_grant(path, grant)
    now_s = datetime(2027, 1, 31, 11, 59, 59, tzinfo=UTC).timestamp()
    tokens = TokenFile(path, lambda: now_s)
    assert tokens.caller(token) == Caller("ingest", ("docs",), frozenset({Verb.PUT}))
    assert tokens.names_verbs
    now_s += 1
    with pytest.raises(Unauthenticated, match="expired at 2027-01-31T12:00:00Z"):
        tokens.caller(token)
    now_s -= 1
    revoke_grant(path, "ingest")
    with pytest.raises(Unauthenticated, match="was revoked"):
        tokens.caller(token)
    assert json.loads(path.read_text())["tokens"][0]["revoked"]
    with pytest.raises(NotFound, match="no token named 'ingestt'"):
        revoke_grant(path, "ingestt")


def test_a_token_that_one_of_its_entries_revokes_is_refused(tmp_path: Path) -> None:
    path, tokens = file_with(tmp_path, old=("a",))
    values = json.loads(path.read_text())
    values["tokens"][0]["revoked"] = True
    values["tokens"].append({**values["tokens"][0], "name": "again", "revoked": False})
    path.write_text(json.dumps(values))
    with pytest.raises(Unauthenticated, match="was revoked"):
        TokenFile(path).caller(tokens["old"])


def test_a_new_token_leaves_the_rest_of_the_file_as_it_is(tmp_path: Path) -> None:
    path, _ = file_with(tmp_path, first=("a",))
    assert json.loads(path.read_text())["tokens"][0].keys() == {"name", "sha256", "namespaces"}
    values = json.loads(path.read_text())
    values["certificates"] = [{"name": "worker", "subject": "CN=worker", "namespaces": ["a"]}]
    path.write_text(json.dumps(values))
    add_grant(path, new_token("second", ["b"])[1])
    revoke_grant(path, "first")
    after = json.loads(path.read_text())
    assert after["certificates"] == values["certificates"]
    assert [entry["name"] for entry in after["tokens"]] == ["first", "second"]


def test_a_certificate_stands_for_a_caller_who_shows_no_token(tmp_path: Path) -> None:
    path, tokens = file_with(tmp_path, search=("search",))
    assert not TokenFile(path).has_certificates
    values = json.loads(path.read_text())
    entry = {"name": "worker", "subject": "CN=worker", "namespaces": ["docs"], "verbs": ["put"]}
    path.write_text(json.dumps({**values, "certificates": [entry]}))
    access = TokenFile(path)
    assert access.has_certificates
    worker = Caller("worker", ("docs",), frozenset({Verb.PUT}))
    assert access.caller(None, ("CN=worker", "DNS:worker.acme")) == worker
    assert access.caller(tokens["search"], ("CN=worker",)).name == "search"
    with pytest.raises(Unauthenticated, match="unknown"):
        access.caller("kg_wrong", ("CN=worker",))
    with pytest.raises(Unauthenticated, match="no entry is for the certificate CN=other"):
        access.caller(None, ("CN=other",))


def test_the_names_of_a_certificate_as_python_gives_them() -> None:
    certificate = {
        "subject": ((("organizationName", "acme"),), (("commonName", "worker"),)),
        "subjectAltName": (("DNS", "worker.acme"), ("IP Address", "127.0.0.1"), ("URI", "spiffe://acme/w")),
    }
    assert identities_of_certificate(certificate) == ("CN=worker", "DNS:worker.acme", "URI:spiffe://acme/w")
    assert identities_of_certificate(None) == identities_of_certificate({}) == ()


def test_two_changes_at_a_time_are_both_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be a revocation."""
    path, _ = file_with(tmp_path, old=("a",))
    both_have_read = threading.Barrier(2)

    def read_and_wait(read: Path) -> Any:
        values = read_values(read)
        with suppress(threading.BrokenBarrierError):
            both_have_read.wait(0.2)
        return values

    monkeypatch.setattr(gateway_access, "read_values", read_and_wait)
    changes = [
        threading.Thread(target=revoke_grant, args=(path, "old")),
        threading.Thread(target=add_grant, args=(path, new_token("new", ["b"])[1])),
    ]
    for change in changes:
        change.start()
    for change in changes:
        change.join()
    old, new = read_document(path).tokens
    assert (old.name, old.revoked, new.name) == ("old", True, "new")


def test_rules_beside_the_tokens_are_read_again_and_kept_when_a_token_is_added(tmp_path: Path) -> None:
    path, tokens = file_with(tmp_path, search=("search",))
    access_by_file = TokenFile(path)
    assert access_by_file.rules() == NamespaceRules()
    rules = {"limits": {"search": {"requests_per_s": 3}}, "privacy": {"*": {"expert": {"accounting": False}}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **rules}))
    assert access_by_file.rules().limits["search"].requests_per_s == 3
    add_grant(path, new_token("other", ("other",))[1])
    assert access_by_file.rules().limits["search"].requests_per_s == 3
    assert not access_by_file.rules().privacy_of("any").expert.accounting
    assert access_by_file.caller(tokens["search"]).name == "search"
    path.write_text(json.dumps({"tokens": [], "limits": {"search": {"requests_per_s": -3}}}))
    assert access_by_file.rules().limits["search"].requests_per_s == 3  # the file is invalid
    assert Access().rules() == NamespaceRules()


def test_a_file_that_is_made_private_again_is_read(tmp_path: Path) -> None:
    """Or a token that was revoked while others could read the file would be accepted for good."""
    path, tokens = file_with(tmp_path, first=("a",))
    tokens_now = TokenFile(path)
    revoke_grant(path, "first")
    path.chmod(0o644)
    assert tokens_now.caller(tokens["first"]).name == "first"
    path.chmod(0o600)
    with pytest.raises(Unauthenticated, match="revoked"):
        tokens_now.caller(tokens["first"])
