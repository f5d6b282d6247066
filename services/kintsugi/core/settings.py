"""Settings of a deployment: frozen dataclasses whose fields carry their bounds, and functions that use them.

A setting is defined once, with `setting`: its type, its default and its bounds, as keywords of JSON schema.
`check` enforces bounds and rules in Python; the operator's CRDs and the chart's schema are generated from the
same fields. A subclass may narrow inherited fields (`NARROWED`): Kubernetes needs bounds that one machine
does not need.

A `Rule` over several fields is written once, too: `this.min <= this.max` is a `Term`. Python evaluates it on
an object; in CEL (Common Expression Language), which Kubernetes' API server evaluates from a CRD, it reads
`self.min <= self.max`. A term with `before`, the object before an update, can be evaluated only by the API
server.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, TypeVar, get_type_hints

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.schema import STRICT

T = TypeVar("T")
Bounds = Mapping[str, Any]

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


class Pattern(str):
    """A regular expression, anchored at both ends, and a description of the allowed values, for errors.

    Without a backslash, it reads the same as CEL and as JSON schema.
    """

    words: str

    def __new__(cls, expression: str, words: str) -> Pattern:
        """`words` follows the value, as in "must be a DNS name"."""
        made = super().__new__(cls, expression)
        made.words = words
        return made

    def or_empty(self) -> Pattern:
        """The same pattern, which also allows empty text."""
        return Pattern(f"^({self[1:-1]})?$", f"{self.words}, or empty")


class Settings:
    """Base of frozen dataclasses that are read from untrusted mappings with `core.schema.load`."""

    __pydantic_config__: ClassVar = STRICT
    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Conditions over several fields."""
    NARROWED: ClassVar[Mapping[str, Bounds]] = {}
    """Additional bounds of inherited fields, by field."""


def setting(default: Any = dataclasses.MISSING, **bounds: Any) -> Any:
    """A field of a `Settings` class. If `default` is a type or function, it is called to make the default.

    Keywords of JSON schema: minimum, exclusiveMinimum, maximum, enum, pattern (a `Pattern`), minLength,
    maxLength, minItems, maxItems, minProperties, maxProperties, format, and `items`, the bounds of what a
    list or mapping holds. Kintsugi's own: `mapKey`, the field that is unique among a list's items;
    `reserved`, keys that a mapping must not have; `keys`, the keys that it may have; `also`, values of other
    types that YAML may have in place of one of `enum`; `after`, the field after which a CRD lists this one;
    `description`, the field's description in a CRD, instead of its docstring.
    """
    if callable(default):
        return field(default_factory=default, metadata=bounds)
    return field(default=default, metadata=bounds)


def bounds_of(cls: type[Any], one: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return all bounds of a field of `cls`: its own and those that `cls` adds."""
    bounds = {**one.metadata, **getattr(cls, "NARROWED", {}).get(one.name, {})}
    if "minimum" in bounds:
        bounds.pop("exclusiveMinimum", None)
    return bounds


def fields_in_order(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of `cls`; one with `after` comes directly after the field that it names."""
    ordered: list[dataclasses.Field[Any]] = []
    for one in dataclasses.fields(cls):
        names = [other.name for other in ordered]
        after = one.metadata.get("after")
        ordered.insert(names.index(after) + 1 if after else len(names), one)
    return ordered


def default_of(one: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; `dataclasses.MISSING` for a mandatory one."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


Naming = Callable[[str], str]
"""Maps a field's name in Python to the name that the user knows."""


def check(settings: Any, where: str = "", naming: Naming = str) -> None:
    """Raise `InvalidField` if `settings`, or anything within, violates a bound or a rule.

    `where` is the path of `settings` in the user's input.
    """
    cls = type(settings)
    names = {one.name: naming(one.name) for one in dataclasses.fields(settings)}
    for one in dataclasses.fields(settings):
        value, bounds = getattr(settings, one.name), bounds_of(cls, one)
        path = _join(where, names[one.name])
        _check_value(value, bounds, path)
        if dataclasses.is_dataclass(value):
            check(value, path, naming)
        elif isinstance(value, tuple):
            _check_items(value, bounds, path, naming)
        elif isinstance(value, Mapping):
            _check_mapping(value, bounds, path, naming)
    for rule in getattr(cls, "RULES", ()):
        if not rule.is_kept_by(settings):
            got = f" (got {getattr(settings, rule.field)!r})" if rule.field else ""
            raise InvalidField(_join(where, names.get(rule.field, "")), rule.message + got)


def _check_items(items: tuple[Any, ...], bounds: Bounds, where: str, naming: Naming) -> None:
    seen = set()
    for index, item in enumerate(items):
        path = _join(where, str(index))
        _check_value(item, bounds.get("items", {}), path)
        if dataclasses.is_dataclass(item):
            check(item, path, naming)
        if key := bounds.get("mapKey"):
            name = getattr(item, key)
            if name in seen:
                raise InvalidField(_join(path, key), f"{name} is repeated")
            seen.add(name)


def _check_mapping(mapping: Mapping[str, Any], bounds: Bounds, where: str, naming: Naming) -> None:
    for key in sorted(set(bounds.get("reserved", ())) & set(mapping)):
        raise InvalidField(_join(where, key), "cannot be set: it is derived from the other settings")
    for key, value in mapping.items():
        if key not in bounds.get("keys", (key,)):
            raise UnknownField(_join(where, key), bounds["keys"])
        _check_value(value, bounds.get("items", {}), _join(where, key))
        if dataclasses.is_dataclass(value):
            check(value, _join(where, key), naming)


def json_schema_bounds(bounds: Bounds) -> dict[str, Any]:
    """Return the keywords of JSON schema for a field itself."""
    ours = ("exclusiveMinimum", "items", "mapKey", "reserved", "keys", "also", "after", "description")
    return {keyword: bound for keyword, bound in bounds.items() if keyword not in ours}


def _check_value(value: Any, bounds: Bounds, where: str) -> None:
    """Numbers are bounded by size, text and containers by length. None is always allowed."""
    if isinstance(value, (int, float)):
        problem = _number_problem(value, bounds)
    elif isinstance(value, (str, tuple, Mapping)):
        problem = _length_problem(value, bounds)
    else:
        return
    if not problem and "enum" in bounds and value not in bounds["enum"]:
        problem = f"{value!r} is not one of {', '.join(map(repr, bounds['enum']))}"
    if not problem and "pattern" in bounds and not re.fullmatch(bounds["pattern"], value):
        problem = f"{value!r} {bounds['pattern'].words}"
    if problem:
        raise InvalidField(where, problem)


def _number_problem(value: float, bounds: Bounds) -> str:
    if not abs(value) <= sys.float_info.max:  # for an integer that large, `math.isfinite` raises
        return "must be a finite number" if isinstance(value, int) else f"{value} must be a finite number"
    if value < bounds.get("minimum", value):
        return f"{value} must be at least {bounds['minimum']}"
    if value <= bounds.get("exclusiveMinimum", -math.inf):
        return f"{value} must be more than {bounds['exclusiveMinimum']}"
    if value > bounds.get("maximum", value):
        return f"{value} must be at most {bounds['maximum']}"
    return ""


def _length_problem(value: Sized, bounds: Bounds) -> str:
    least = bounds.get("minLength", bounds.get("minItems", bounds.get("minProperties", 0)))
    most = bounds.get("maxLength", bounds.get("maxItems", bounds.get("maxProperties", math.inf)))
    unit = "characters" if isinstance(value, str) else "entries"
    if len(value) < least:
        return f"is mandatory: at least {least} {unit}"
    return f"has {len(value)} {unit}, more than {most}" if len(value) > most else ""


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name


def plain(
    value: Any,
    naming: Naming = str,
    keep: Callable[[dataclasses.Field[Any], Any], bool] = lambda one, inner: True,
) -> Any:
    """Convert `value` to types of JSON and YAML; of settings, only the fields that `keep` accepts."""
    if dataclasses.is_dataclass(value):
        pairs = [(one, getattr(value, one.name)) for one in fields_in_order(type(value))]
        return {naming(one.name): plain(inner, naming, keep) for one, inner in pairs if keep(one, inner)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner, naming, keep) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, naming, keep) for inner in value]
    return str(value) if isinstance(value, StrEnum) else value


def non_default_fields(settings: Any, *without: str, naming: Naming = str) -> dict[str, Any]:
    """Return the fields that differ from their defaults, except those in `without`, as plain values.

    A field that a later version adds does not change the result, so an upgrade restarts nothing for it.
    """
    fields: dict[str, Any] = plain(settings, naming, lambda one, inner: inner != default_of(one))
    return {name: value for name, value in fields.items() if name not in without}


_hints_of = cache(get_type_hints)


def convert_settings(cls: type[T], settings: Any, **others: Any) -> T:
    """Make a `cls` from the settings that it and `settings` inherit from a common class, and `others`."""
    common = next(
        base for base in cls.__mro__ if base in type(settings).__mro__ and dataclasses.is_dataclass(base)
    )
    hints = _hints_of(cls)  # type: ignore[arg-type]
    shared = {one.name: getattr(settings, one.name) for one in dataclasses.fields(common)}
    for name, value in shared.items():
        if dataclasses.is_dataclass(value):
            shared[name] = convert_settings(hints[name], value)
    return cls(**{**shared, **others})
