"""Rules over several fields of a settings object, each written once for Python and for CEL.

`this.min <= this.max` is a `Term`. Python evaluates it on an object; in CEL (Common Expression Language),
which Kubernetes' API server evaluates from a CRD, it reads `self.min <= self.max`. A term with `before`, the
object before an update, can be evaluated only by the API server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_CEL_RESERVED = re.compile(
    "as|break|const|continue|else|false|for|function|if|import|in|let|loop|namespace|null|package|return|true|var"
    "|void|while"
)
"""Words that CEL reserves; Kubernetes escapes a field of such a name with underscores."""


def camel(name: str) -> str:
    """A field's name as YAML and CEL write it: `ram_gib` is `ramGib`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Term:
    """A value or a condition, as CEL and as a function of the object. `|` is "or", `~` is "not"."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, cel: str, evaluate: Callable[[Any], Any]) -> None:
        self.cel = cel
        self.evaluate = evaluate

    def __getattr__(self, name: str) -> Term:
        """Return the field `name`. Dunder names belong to Python and are never fields."""
        if name.startswith("__"):
            raise AttributeError(name)
        in_yaml = camel(name)
        escaped = f"__{in_yaml}__" if _CEL_RESERVED.fullmatch(in_yaml) else in_yaml
        return Term(f"{self.cel}.{escaped}", lambda value: getattr(self.evaluate(value), name))

    def __eq__(self, other: object) -> Term:  # type: ignore[override]
        return self._compare("==", other, lambda mine, theirs: mine == theirs)

    def __ne__(self, other: object) -> Term:  # type: ignore[override]
        return self._compare("!=", other, lambda mine, theirs: mine != theirs)

    def __lt__(self, other: object) -> Term:
        return self._compare("<", other, lambda mine, theirs: mine < theirs)

    def __le__(self, other: object) -> Term:
        return self._compare("<=", other, lambda mine, theirs: mine <= theirs)

    def __ge__(self, other: object) -> Term:
        return self._compare(">=", other, lambda mine, theirs: mine >= theirs)

    def __or__(self, other: Term) -> Term:
        return Term(f"{self.cel} || {other.cel}", lambda value: self.evaluate(value) or other.evaluate(value))

    def __invert__(self) -> Term:
        """Negate a single call or field; for a comparison, use the opposite operator."""
        return Term(f"!{self.cel}", lambda value: not self.evaluate(value))

    def matches(self, pattern: str) -> Term:
        """Whether text contains a match of `pattern`."""
        return Term(
            f"{self.cel}.matches('{pattern}')", lambda value: bool(re.search(pattern, self.evaluate(value)))
        )

    def _compare(self, sign: str, other: object, compare: Callable[[Any, Any], bool]) -> Term:
        theirs = other if isinstance(other, Term) else _literal(other)
        return Term(
            f"{self.cel} {sign} {theirs.cel}",
            lambda value: compare(self.evaluate(value), theirs.evaluate(value)),
        )


def _literal(value: object) -> Term:
    assert isinstance(value, str), f"{value!r}: rules compare fields with fields or with text"
    return Term(f"'{value}'", lambda _: value)


def _absent(_: object) -> Any:
    raise AssertionError("only the API server has the object before an update")


this = Term("self", lambda value: value)
"""The object that a rule is about."""
before = Term("oldSelf", _absent)
"""The object as it was before an update."""


def is_set(term: Term) -> Term:
    """Whether an optional field is set."""
    return Term(f"has({term.cel})", lambda value: term.evaluate(value) is not None)


def has_items(term: Term) -> Term:
    """Whether a list that has a default is not empty."""
    return Term(f"size({term.cel}) > 0", lambda value: bool(term.evaluate(value)))


@dataclass(frozen=True, eq=False)
class Rule:
    """A condition that a settings object must meet, and the error message if it does not."""

    condition: Term
    message: str
    field: str = ""
    """Name of the field that an error points to; empty: the object itself."""

    @property
    def is_transition(self) -> bool:
        """Whether the rule compares an object with the object before an update."""
        return "oldSelf" in self.condition.cel

    def is_kept_by(self, settings: object) -> bool:
        """Whether an object meets the rule. True for transition rules, which need the earlier object, too."""
        return self.is_transition or bool(self.condition.evaluate(settings))

    def manifest(self) -> Mapping[str, str]:
        """The rule as an entry of `x-kubernetes-validations`."""
        return {"rule": self.condition.cel, "message": self.message}
