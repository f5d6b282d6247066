"""Which part of a namespace a request is narrowed to."""

from __future__ import annotations

import itertools

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces import (
    CACHE_KEY,
    NARROWING,
    SALT,
    SESSION,
    TENANT,
    NamespaceLimits,
    NamespacePrivacy,
    NamespaceRules,
    NamespaceSums,
    PrivacyExpert,
    base_of,
    enclosing,
    find_rule,
    is_within,
    narrow,
)
from kintsugi.core.spaces import check_namespace
from kintsugi.store.protocol.access import Caller


def test_without_values_nothing_changes() -> None:
    assert narrow("docs", {}) == "docs"
    assert narrow("docs", {"user": "somebody"}) == "docs", "what OpenAI calls `user` narrows nothing"


def test_names_of_parts_are_recorded() -> None:
    assert narrow("docs", {TENANT: "acme"}) == "docs/-/acme"
    session = narrow("docs", {SESSION: "one"})
    assert session == "docs/-/.d5b418b91f55d23a9af58364c66c1733"
    assert narrow("docs", {TENANT: "acme", SESSION: "one"}) == session.replace("/-/", "/-/acme/")


def test_every_combination_is_a_part_of_its_own() -> None:
    parts = {"docs"}
    for count in range(1, len(NARROWING) + 1):
        for names in itertools.combinations(NARROWING, count):
            for values in itertools.product(("a", "b"), repeat=count):
                part = check_namespace(narrow("docs", dict(zip(names, values, strict=True))))
                assert part not in parts
                assert base_of(part) == "docs"
                parts.add(part)


def test_the_order_of_values_does_not_matter() -> None:
    values = {SALT: "s", CACHE_KEY: "k", SESSION: "i", TENANT: "t"}
    assert narrow("docs", values) == narrow("docs", dict(reversed(values.items())))


def test_a_part_is_narrowed_further() -> None:
    one = narrow(narrow("docs", {TENANT: "acme"}), {SESSION: "s"})
    assert one == narrow("docs", {TENANT: "acme", SESSION: "s"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (TENANT, ""),
        (TENANT, "../other"),
        (TENANT, "a/b"),
        (TENANT, ".5f1c2b8e6d0a4f379a1b2c3d4e5f6071"),
        (TENANT, "-"),
        (TENANT, "a" * 65),
        (TENANT, "é"),
        (SESSION, ""),
        (SESSION, "s" * 257),
        (CACHE_KEY, ""),
        (CACHE_KEY, 7),
        (CACHE_KEY, ["k"]),
        (SALT, True),
        (SALT, "s" * 257),
    ],
)
def test_a_bad_value_names_its_field(name: str, value: object) -> None:
    with pytest.raises(InvalidField) as caught:
        narrow("docs", {name: value})  # type: ignore[dict-item]
    assert caught.value.field == name


def test_a_part_whose_name_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidField, match="128"):
        narrow("d" * 100, {TENANT: "t" * 40})
    with pytest.raises(InvalidField, match=SESSION):
        narrow("d" * 100, {SESSION: "s"})


def test_parts_lie_within_their_base_and_nothing_else_does() -> None:
    assert is_within("docs/-/acme/.ab", "docs")
    assert is_within("docs/-/acme/.ab", "docs/-/acme")
    assert not is_within("docs/acme", "docs")
    assert not is_within("docs2/-/acme", "docs")
    assert not is_within("docs/-/acme2", "docs/-/acme")
    assert enclosing("docs/-/acme/.ab") == ["docs", "docs/-/acme", "docs/-/acme/.ab"]
    assert enclosing("docs/acme") == ["docs/acme"]


def test_whoever_may_use_a_namespace_may_use_its_parts_and_no_others() -> None:
    caller = Caller("one", ("docs", "team/*", "only/-/acme"))
    assert all(map(caller.may_use, ("docs/-/a", "docs/-/a/.b", "team/x/-/a", "only/-/acme")))
    assert not any(map(caller.may_use, ("docs/a", "other/-/docs", "only", "only/-/b", "docs2/-/a")))
    assert caller.may_use("only/-/acme/.b")
    assert not any(map(caller.may_use, ("team", "team/-/acme", "team/-/.b")))
    assert Caller("two", ("docs/-/*",)).may_use("docs/-/acme/.b")
    assert Caller("three", ("*",)).may_use("docs/-/acme/.b")


def test_a_part_escapes_no_rule_of_its_base() -> None:
    strict = NamespacePrivacy(expert=PrivacyExpert(accounting=False))
    rules = NamespaceRules(
        limits={"docs": NamespaceLimits(ram_gib=1), "*": NamespaceLimits(ram_gib=9)},
        privacy={"docs": strict, "docs*": NamespacePrivacy(), "docs/*": NamespacePrivacy()},
    )
    part = narrow("docs", {SESSION: "s"})
    assert find_rule(rules.limits, part)[0] == "docs"
    assert rules.privacy_of(part) == strict
    assert rules.account_of(part) == "docs"
    counts = {"docs": 1, part: 2, narrow("docs", {TENANT: "t"}): 4, "docs/other": 8}
    sums = NamespaceSums(counts.items())
    assert [sums.of_account(name, rules) for name in ("docs", part, "docs/other")] == [7, 7, 8]


def test_parts_may_have_rules_of_their_own() -> None:
    own = NamespacePrivacy(shared="docs")
    rules = NamespaceRules(limits={"docs/-/acme": NamespaceLimits(weight=2)}, privacy={"docs/-/*": own})
    assert rules.privacy_of("docs/-/acme") == own
    assert not rules.privacy_of("docs").shared
    assert [rules.account_of(name) for name in ("docs/-/acme", "docs/-/beta")] == ["docs/-/acme", "docs"]
    counts = {"docs": 1, "docs/-/acme": 2, "docs/-/beta": 4}
    sums = NamespaceSums(counts.items())
    assert [sums.of_account(name, rules) for name in counts] == [5, 2, 5]


def test_a_session_escapes_no_rule_of_its_tenant() -> None:
    rules = NamespaceRules(
        limits={"docs/-/acme": NamespaceLimits(weight=2), "docs/-/.*": NamespaceLimits(weight=9)},
        privacy={"docs/-/acme": NamespacePrivacy(expert=PrivacyExpert(accounting=False))},
    )
    session = narrow("docs", {TENANT: "acme", SESSION: "s"})
    assert rules.limits_of(session) == NamespaceLimits(weight=2)
    assert rules.account_of(session) == "docs/-/acme"
    assert not rules.privacy_of(session).expert.accounting
    assert rules.limits_of(narrow("docs", {SESSION: "s"})) is None
    assert rules.account_of(narrow("docs", {SESSION: "s"})) == "docs"


def test_a_part_reveals_no_more_than_its_base() -> None:
    rules = NamespaceRules(
        privacy={
            "docs": NamespacePrivacy(
                expert=PrivacyExpert(accounting=False, ttft_step_ms=400, chunk_tokens_multiple=64)
            ),
            "docs/-/*": NamespacePrivacy(
                shared="docs", expert=PrivacyExpert(ttft_step_us_per_token=5, chunk_tokens_multiple=32)
            ),
        }
    )
    assert rules.privacy_of("docs/-/acme/.b") == NamespacePrivacy(
        shared="docs",
        expert=PrivacyExpert(
            accounting=False, ttft_step_ms=400, ttft_step_us_per_token=5, chunk_tokens_multiple=64
        ),
    )


def test_where_a_base_forbids_discovery_no_part_discovers() -> None:
    def discovers(*, base: bool | None, own: bool | None) -> bool:
        of_part = NamespacePrivacy(shared="docs", discover=own)
        rules = NamespaceRules(privacy={"docs": NamespacePrivacy(discover=base), "docs/-/*": of_part})
        return rules.privacy_of("docs/-/acme").discovers

    assert not discovers(base=False, own=None)
    assert not discovers(base=False, own=True)
    assert discovers(base=None, own=None)
    assert not discovers(base=True, own=False)


def test_a_base_that_ends_as_parts_begin_is_refused() -> None:
    with pytest.raises(InvalidField, match="which separates parts"):
        narrow("a/-", {TENANT: "x"})


def test_an_account_without_any_rule_is_still_the_bases() -> None:
    rules = NamespaceRules()
    assert rules.account_of("docs/-/acme") == "docs"
    assert NamespaceSums({"docs/-/a": 1, "docs/-/b": 2}.items()).of_account("docs/-/c", rules) == 3
