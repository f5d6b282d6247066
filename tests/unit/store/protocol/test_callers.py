from __future__ import annotations

import re
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField, PermissionDenied
from kintsugi.core.schema import load
from kintsugi.store.protocol.access import (
    ANYONE,
    TENANT_VERBS,
    AccessDocument,
    Caller,
    CertificateGrant,
    Grant,
    Verb,
    parse_time_s,
)

HASH = "0" * 64


def token(**fields: Any) -> dict[str, Any]:
    return {"name": "search", "sha256": HASH, "namespaces": ["search"], **fields}


def document(*tokens: dict[str, Any], **more: Any) -> AccessDocument:
    return load(AccessDocument, {"tokens": list(tokens), **more})


def test_an_entry_without_verbs_may_what_tokens_always_could() -> None:
    (grant,) = document(token()).tokens
    assert grant.caller == Caller("search", ("search",), TENANT_VERBS)
    assert sorted(TENANT_VERBS) == ["delete", "generate", "list", "put"]
    assert not document(token()).names_verbs
    assert document(token(), token(verbs=["put"])).names_verbs


@pytest.mark.parametrize("verb", Verb)
def test_a_verb_is_needed_beside_the_namespace(verb: Verb) -> None:
    (grant,) = document(token(verbs=[verb.value])).tokens
    assert grant.caller.authorize("search", verb) == "search"
    for other in set(Verb) - {verb}:
        with pytest.raises(PermissionDenied, match=f"'search' lacks the verb '{other}'; it has {verb}"):
            grant.caller.authorize("search", other)
        assert not grant.caller.may(other)
    with pytest.raises(PermissionDenied, match="namespace 'docs'"):
        grant.caller.authorize("docs", verb)
    with pytest.raises(PermissionDenied, match="concerns every namespace; bind it to '\\*'"):
        grant.caller.require_everywhere(verb)
    assert ANYONE.may(verb)
    ANYONE.require_everywhere(verb)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (token(verbs=[]), "verbs: of token 'search' is empty"),
        (token(verbs=["read"]), "verbs"),
        (token(expires="tomorrow"), "expires: 'tomorrow' must be a time such as"),
        (token(expires="2027-01-31T12:00:00"), "expires: '2027-01-31T12:00:00' must be a time"),
        (token(expires=3), "expires"),
        (token(revoked="perhaps"), "revoked"),
    ],
)
def test_an_impossible_entry_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(message)):
        document(entry)


def test_a_token_ends_when_it_expires_or_is_revoked() -> None:
    grant = Grant(name="a", sha256=HASH, namespaces=("a",), expires="2027-01-31T12:00:00+01:00")
    end_s = parse_time_s("expires", "2027-01-31T11:00:00Z")
    assert grant.why_refused(end_s - 1) == ""
    assert "expired at 2027-01-31T12:00:00+01:00; ask for another" in grant.why_refused(end_s)
    assert "revoked" in Grant(name="a", sha256=HASH, namespaces=("a",), revoked=True).why_refused(0.0)
    assert Grant(name="a", sha256=HASH, namespaces=("a",)).why_refused(1e12) == ""


@pytest.mark.parametrize("subject", ["worker", "CN=", "O=acme", "", "cn=worker", "IP:127.0.0.1"])
def test_a_subject_says_what_it_names(subject: str) -> None:
    with pytest.raises(InvalidField, match=r"subject.*must be CN=NAME, DNS:NAME or URI:NAME"):
        CertificateGrant(name="worker", subject=subject, namespaces=("a",))


def test_a_certificate_is_found_by_any_of_its_names() -> None:
    entries = document(
        certificates=[
            {"name": "corpus", "subject": "CN=worker", "namespaces": ["docs"], "verbs": ["put"]},
            {"name": "engine", "subject": "URI:spiffe://acme/engine", "namespaces": ["*"]},
        ]
    )
    assert entries.find_certificate(()) is None
    assert entries.find_certificate(["DNS:worker", "CN=Worker", "CN=worker2"]) is None
    found = entries.find_certificate(["CN=any", "URI:spiffe://acme/engine"])
    assert found is not None
    assert found.caller == Caller("engine", ("*",), TENANT_VERBS)
    found = entries.find_certificate(["CN=worker"])
    assert found is not None
    assert found.caller == Caller("corpus", ("docs",), frozenset({Verb.PUT}))
