"""Which rule is about which namespace."""

from __future__ import annotations

import pytest

from kintsugi.core.namespaces import (
    NamespaceLimits,
    NamespacePrivacy,
    NamespaceRules,
    NamespaceSums,
    PrivacyExpert,
    find_rule,
)


@pytest.mark.parametrize(
    ("namespace", "pattern"),
    [
        ("docs", "docs"),
        ("docs/a", "docs/*"),
        ("docs/abc/x", "docs/abc*"),
        ("other", "*"),
        ("doc", "*"),
        ("docs2", "docs*"),
    ],
)
def test_the_pattern_that_matches_most_decides(namespace: str, pattern: str) -> None:
    patterns = {name: name for name in ("docs", "docs*", "docs/*", "docs/abc*", "*")}
    assert find_rule(patterns, namespace) == (pattern, pattern)


def test_without_a_pattern_there_is_no_rule() -> None:
    assert find_rule({"docs/*": 1}, "docs") == ("", None)
    assert NamespaceRules().limits_of("docs") is None
    assert not NamespaceRules().privacy_of("docs").pads


def test_use_is_counted_where_limits_are_shared() -> None:
    together, each = NamespaceLimits(together=True), NamespaceLimits()
    rules = NamespaceRules(limits={"team/*": together, "docs/*": each})
    assert [rules.account_of(name) for name in ("team/a", "docs/a", "x")] == ["team/*", "docs/a", "x"]
    sums = NamespaceSums({"team/a": 1, "team/b": 2, "docs/a": 4, "docs/b": 8}.items())
    assert [sums.of_account(name, rules) for name in ("team/c", "docs/a", "x")] == [3, 4, 0]
    sums.add("team/c", 16)
    sums.add("team/b", -2)
    assert set(sums) == {"team/a", "team/c", "docs/a", "docs/b"}
    assert sums.of_account("team/x", rules) == 17
    assert sums.of_account("team/a", NamespaceRules(limits={"team/*": each})) == 1
    assert sums.of_account("team/x", rules) == 17


def test_a_sum_does_not_visit_every_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who makes namespaces at will made every put of all callers wait for a walk over them."""
    rules = NamespaceRules(limits={"pre*": NamespaceLimits(together=True)})
    sums = NamespaceSums((f"pre{number}", 1) for number in range(100))
    visits, account_of = list[str](), rules.account_of
    assert sums.of_account("pre0", rules) == 100
    monkeypatch.setattr(
        NamespaceRules, "account_of", lambda self, name: (visits.append(name), account_of(name))[1]
    )
    sums.add("pre100", 1)
    assert sums.of_account("pre0", rules) == 101
    assert visits == ["pre100", "pre0"]


def test_the_other_rules_count_first() -> None:
    mine = NamespaceRules(limits={"a": NamespaceLimits(weight=1.0), "b": NamespaceLimits(weight=2.0)})
    other = NamespaceRules(
        limits={"a": NamespaceLimits(weight=9.0)},
        privacy={"a": NamespacePrivacy(expert=PrivacyExpert(accounting=False))},
    )
    merged = mine.overridden_by(other)
    assert [merged.limits[name].weight for name in "ab"] == [9.0, 2.0]
    assert not merged.privacy_of("a").expert.accounting
    assert mine.overridden_by(NamespaceRules()) is mine


def test_a_step_grows_with_the_prompt() -> None:
    privacy = NamespacePrivacy(expert=PrivacyExpert(ttft_step_ms=100, ttft_step_us_per_token=50))
    assert privacy.step_s(2000) == pytest.approx(0.2)


def test_namespaces_with_discovery_are_those_whose_rule_says_or_implies_it() -> None:
    rules = NamespaceRules(
        privacy={
            "default": NamespacePrivacy(discover=True),
            "users/*": NamespacePrivacy(shared="team"),
            "quiet/*": NamespacePrivacy(shared="team", discover=False),
            "acme": NamespacePrivacy(expert=PrivacyExpert(accounting=False)),
        }
    )
    assert rules.discovering == ["default", "users/*"]
