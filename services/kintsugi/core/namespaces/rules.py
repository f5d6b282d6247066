"""Limits and privacy by pattern: a namespace, a prefix that ends in `*`, or `*` alone.

The pattern that matches the most of a namespace's name decides, and no other applies. A part of a namespace
(`core.namespaces.parts`) has the rule of its base unless a pattern is about parts of it. See docs/TENANTS.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces.limits import NamespaceLimits
from kintsugi.core.namespaces.parts import MARK, base_of, enclosing, is_within, without_digest
from kintsugi.core.namespaces.privacy import NO_PRIVACY, NamespacePrivacy
from kintsugi.core.settings import Settings, check, setting
from kintsugi.core.spaces import check_namespace

PATTERNS_MAX = 1_000

T = TypeVar("T")


@dataclass(frozen=True)
class NamespaceRules(Settings):
    """Limits and privacy by pattern. Making one checks all that it holds, and raises `InvalidField`."""

    limits: Mapping[str, NamespaceLimits] = setting(dict, maxProperties=PATTERNS_MAX)
    privacy: Mapping[str, NamespacePrivacy] = setting(dict, maxProperties=PATTERNS_MAX)

    def __post_init__(self) -> None:
        check(self)
        for name in ("limits", "privacy"):
            for pattern in getattr(self, name):
                check_namespace_pattern(pattern, name)
        for pattern, privacy in self.privacy.items():
            if privacy.shared:
                _check_shared(pattern, privacy.shared)

    def limits_of(self, namespace: str) -> NamespaceLimits | None:
        """The limits of a namespace; None where no pattern matches it."""
        return find_rule(self.limits, without_digest(namespace))[1]

    def account_of(self, namespace: str) -> str:
        """The name under which the namespace's use is counted: the pattern of limits that namespaces share,
        or else the namespace; of a tenant's part without limits of its own, its base. Sessions, cache keys
        and salts have no account: who makes many has no more."""
        counted = without_digest(namespace)
        pattern, limits = find_rule(self.limits, counted)
        if limits is not None and limits.together:
            return pattern
        return counted if _is_about_part(pattern, counted) else base_of(counted)

    def privacy_of(self, namespace: str) -> NamespacePrivacy:
        """The namespace's own rule; of a part, never less strict than those of the namespaces around it."""
        *around, own = (find_rule(self.privacy, name)[1] or NO_PRIVACY for name in enclosing(namespace))
        for outer in around:
            own = own.at_least(outer)
        return own

    @property
    def discovering(self) -> list[str]:
        """Patterns of namespaces in which chunks are discovered."""
        return sorted(pattern for pattern, privacy in self.privacy.items() if privacy.discovers)

    def overridden_by(self, other: NamespaceRules) -> NamespaceRules:
        """These rules and the other's, which count where both have a pattern."""
        if not (other.limits or other.privacy):
            return self
        merged = {name: {**getattr(self, name), **getattr(other, name)} for name in ("limits", "privacy")}
        return dataclasses.replace(self, **merged)


NO_RULES = NamespaceRules()


def find_rule(rules: Mapping[str, T], namespace: str) -> tuple[str, T | None]:
    """Return the pattern that matches most of the namespace's name, and its rule; empty and None if none
    does. A part without a rule of its own has that of the namespace around it."""
    base, *parts = enclosing(namespace)
    for part in reversed(parts):
        pattern, rule = _find_longest(rules, part)
        if _is_about_part(pattern, part):
            return pattern, rule
    return _find_longest(rules, base)


def _is_about_part(pattern: str, namespace: str) -> bool:
    """Whether a pattern that matches a part is about parts of its base, not about namespaces in general."""
    return pattern.startswith(f"{base_of(namespace)}{MARK}")


def _find_longest(rules: Mapping[str, T], namespace: str) -> tuple[str, T | None]:
    if not rules:
        return "", None
    if namespace in rules:
        return namespace, rules[namespace]
    for length in range(len(namespace), -1, -1):
        pattern = f"{namespace[:length]}*"
        if pattern in rules:
            return pattern, rules[pattern]
    return "", None


def sum_account(counts: Mapping[str, int], namespace: str, rules: NamespaceRules) -> int:
    """Sum the counts of all namespaces whose use is counted with that of ``namespace``."""
    limits, account = rules.limits_of(namespace), rules.account_of(namespace)
    if limits is not None and limits.together:
        return sum(count for name, count in counts.items() if rules.account_of(name) == account)
    return sum(
        count
        for name, count in counts.items()
        if is_within(name, account) and rules.account_of(name) == account
    )


def check_namespace_pattern(pattern: str, where: str = "namespaces") -> str:
    """Returns the pattern. Raises `InvalidField`."""
    stem = pattern.removesuffix("*")
    try:
        # A prefix need not be a whole namespace by itself.
        check_namespace(stem if stem or not pattern.endswith("*") else "any")
    except InvalidField as error:
        raise InvalidField(where, f"{pattern!r}: {error.problem}") from None
    return pattern


def _check_shared(pattern: str, shared: str) -> None:
    try:
        check_namespace(shared)
    except InvalidField as error:
        raise InvalidField(f"privacy.{pattern}.shared", error.problem) from None
    if find_rule({pattern: True}, shared)[1]:
        raise InvalidField(
            f"privacy.{pattern}.shared", f"{shared!r} matches the pattern itself; name a namespace outside it"
        )
