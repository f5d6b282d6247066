"""A rule is one statement: its CEL and what Python checks cannot differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.settings import Rule, Term, before, has_items, is_set, this


@pytest.mark.parametrize(
    ("term", "cel", "kept", "broken"),
    [
        (
            this.least <= this.most,
            "self.least <= self.most",
            {"least": 1, "most": 1},
            {"least": 2, "most": 1},
        ),
        (this.a < this.b, "self.a < self.b", {"a": 1, "b": 2}, {"a": 2, "b": 2}),
        (this.a >= this.b, "self.a >= self.b", {"a": 2, "b": 2}, {"a": 1, "b": 2}),
        (this.a != this.b, "self.a != self.b", {"a": 1, "b": 2}, {"a": 2, "b": 2}),
        (
            (this.tls_secret != "") | this.insecure,
            "self.tlsSecret != '' || self.insecure",
            {"tls_secret": "", "insecure": True},
            {"tls_secret": "", "insecure": False},
        ),
        (
            (this.namespace == "") | ~is_set(this.cidr),
            "self.__namespace__ == '' || !has(self.cidr)",
            {"namespace": "a", "cidr": None},
            {"namespace": "a", "cidr": "10.0.0.0/8"},
        ),
        (has_items(this.tiers), "size(self.tiers) > 0", {"tiers": (1,)}, {"tiers": ()}),
        (~this.name.matches("^A_"), "!self.name.matches('^A_')", {"name": "B"}, {"name": "A_B"}),
    ],
)
def test_a_rule_reads_in_cel_as_it_is_checked(
    term: Term, cel: str, kept: dict[str, Any], broken: dict[str, Any]
) -> None:
    rule = Rule(term, "says why")
    assert rule.manifest() == {"rule": cel, "message": "says why"}
    assert rule.is_kept_by(SimpleNamespace(**kept))
    assert not rule.is_kept_by(SimpleNamespace(**broken))


def test_a_field_of_a_field() -> None:
    rule = Rule((this.store.tls_secret != "") | this.network.policies, "")
    assert rule.condition.cel == "self.store.tlsSecret != '' || self.network.policies"
    spec = SimpleNamespace(store=SimpleNamespace(tls_secret=""), network=SimpleNamespace(policies=False))
    assert not rule.is_kept_by(spec)


def test_only_the_api_server_sees_an_update() -> None:
    rule = Rule(this.gib >= before.gib, "a volume cannot shrink")
    assert rule.condition.cel == "self.gib >= oldSelf.gib"
    assert rule.is_transition
    assert rule.is_kept_by(SimpleNamespace(gib=1))
