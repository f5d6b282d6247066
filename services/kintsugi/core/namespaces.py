"""Namespaces: their parts, and the rules that say what each may use and what its answers reveal.

A request selects a part of a namespace with a tenant, a session, a cache key or a salt. A part is a namespace
of its own, named after its base:

    docs/-/acme                                      tenant acme
    docs/-/.5f1c2b8e6d0a4f379a1b2c3d4e5f6071         a session, cache key or salt, or several of them
    docs/-/acme/.5f1c2b8e6d0a4f379a1b2c3d4e5f6071    both

The name of a tenant appears unchanged, so that rules can name it. The other values are arbitrary texts and
appear as one digest. A caller that may use a namespace may use its parts. A part has the rules and the keys
of its base unless it has its own, counts against the limits of its base, and is erased with it.

Rules are limits and privacy by pattern: a namespace, a prefix that ends in `*`, or `*` alone. The pattern
that matches most of a namespace's name applies, and no other. See docs/TENANTS.md and docs/adr/0011.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import blake3

from kintsugi.core.errors import InvalidField
from kintsugi.core.settings import Settings, check, setting
from kintsugi.core.spaces import NAMESPACE_BYTES_MAX, check_namespace

GIB = 1 << 30
PATTERNS_MAX = 1_000

EVERY_NAMESPACE = "*"

MARK = "/-/"
"""Separates the base from the rest of a part's name."""
TENANT = "x-tenant-id"
SESSION = "x-session-id"
CACHE_KEY = "prompt_cache_key"
SALT = "cache_salt"
NARROWING = (TENANT, SESSION, CACHE_KEY, SALT)
"""Names of the headers and of the fields of an OpenAI body that narrow a namespace."""
VALUE_CHARS_MAX = 256
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST_BYTES = 16
NARROWING_HEADERS = (TENANT, SESSION)
AUTHORIZATION, NAMESPACE_HEADER = "authorization", "x-kintsugi-namespace"
SINGLE_HEADERS = (AUTHORIZATION, NAMESPACE_HEADER, *NARROWING_HEADERS)
"""Headers and metadata that select the caller or the namespace."""
NARROWING_FIELDS = (CACHE_KEY, SALT)
"""Fields of an OpenAI request's body, or of the query of a request without one."""

T = TypeVar("T")


def narrow(namespace: str, values: Mapping[str, str]) -> str:
    """Return the part of ``namespace`` that ``values`` select by their names in `NARROWING`; without such
    values, the namespace itself. Other names are ignored.

    Raises `InvalidField`, naming the value.
    """
    given = {name: check_value(name, values[name]) for name in NARROWING if values.get(name) is not None}
    if not given:
        return namespace
    check_namespace(namespace)
    if namespace.endswith("/-"):
        raise InvalidField(
            "namespace", f"{namespace!r} ends in '/-', which separates parts; use another namespace"
        )
    tenant = given.pop(TENANT, None)
    components = [*([tenant] if tenant is not None else []), *([_digest(given)] if given else [])]
    part = f"{namespace}{'/' if MARK in namespace else MARK}{'/'.join(components)}"
    if len(part) > NAMESPACE_BYTES_MAX:
        name = TENANT if tenant is not None else next(iter(given))
        raise InvalidField(
            name,
            f"makes the namespace {part!r}, which exceeds {NAMESPACE_BYTES_MAX} characters; shorten "
            f"{'the tenant or ' if tenant is not None else ''}the namespace {namespace!r}",
        )
    return part


def check_value(name: str, value: object, where: str = "") -> str:
    """Return a narrowing value. ``where``: its field, if not ``name``. Raises `InvalidField` if it is not
    valid."""
    where = where or name
    if not isinstance(value, str):
        raise InvalidField(where, f"must be a string, not a {type(value).__name__}")
    if name == TENANT and not _TENANT.fullmatch(value):
        raise InvalidField(
            where,
            "must start with a letter or digit, hold only letters, digits and . _ - and have at most 64",
        )
    if not 0 < len(value) <= VALUE_CHARS_MAX:
        raise InvalidField(
            where, f"has {len(value)} characters; send 1 to {VALUE_CHARS_MAX}, or leave it out"
        )
    return value


def base_of(namespace: str) -> str:
    """The namespace that ``namespace`` is a part of; itself if it is not a part."""
    return namespace.partition(MARK)[0]


def without_digest(namespace: str) -> str:
    """Remove the digest of a session, cache key or salt; return other namespaces unchanged."""
    outer, _, last = namespace.rpartition("/")
    return outer.removesuffix("/-") if MARK in namespace and last.startswith(".") else namespace


def is_within(namespace: str, outer: str) -> bool:
    """Whether ``namespace`` is ``outer`` or a part of it."""
    return namespace == outer or namespace.startswith(f"{outer}{'/' if MARK in outer else MARK}")


def matches(pattern: str, namespace: str) -> bool:
    """Whether a pattern includes a namespace. A namespace includes its parts. The pattern `docs/*` does not
    include the parts of `docs` itself; `docs/-/*` does."""
    if not pattern.endswith("*"):
        return is_within(namespace, pattern)
    return (namespace if MARK in pattern else base_of(namespace)).startswith(pattern[:-1])


def includes(pattern: str, inner: str) -> bool:
    """Whether a pattern includes every namespace that the pattern ``inner`` includes."""
    return matches(pattern, inner.removesuffix("*")) and (pattern.endswith("*") or not inner.endswith("*"))


def enclosing(namespace: str) -> list[str]:
    """Return the namespaces that contain ``namespace``, outermost first, and itself."""
    base, mark, inner = namespace.partition(MARK)
    components = inner.split("/") if mark else []
    return [base, *(f"{base}{MARK}{'/'.join(components[:count])}" for count in range(1, len(components) + 1))]


def _digest(values: Mapping[str, str]) -> str:
    hasher = blake3.blake3(b"kintsugi-part")
    for name, value in values.items():  # in the order of `NARROWING`
        for text in (name, value):
            data = text.encode("utf-8", "surrogatepass")
            hasher.update(len(data).to_bytes(4, "little") + data)
    # No tenant begins with a dot.
    return f".{hasher.digest(_DIGEST_BYTES).hex()}"


def narrow_by_headers(namespace: str, headers: Mapping[str, str]) -> str:
    """Narrow a namespace by HTTP headers or gRPC metadata. Raises `InvalidField`, also for repeated
    headers."""
    return narrow(namespace, _read_headers(headers))


def narrow_by_request(namespace: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Narrow a namespace by HTTP headers and by the fields of an OpenAI request's body. Raises as
    `narrow_by_headers`."""
    fields = {name: body[name] for name in NARROWING_FIELDS if name in body}
    return narrow(namespace, {**_read_headers(headers), **fields})


def check_sent_once(names: Iterable[str]) -> None:
    """Raise `InvalidField` if one of ``names``, all headers or metadata of a request, selects the caller or
    the namespace and is repeated: a proxy may have added its own after the client's, and servers differ in
    which one they take."""
    sent = Counter(names)
    for name in SINGLE_HEADERS:
        if sent[name] > 1:
            raise InvalidField(name, "is repeated; send it once")


def _read_headers(headers: Mapping[str, str]) -> dict[str, str]:
    check_sent_once(getattr(headers, "keys", list)())
    return {name: headers[name] for name in NARROWING_HEADERS if name in headers}


@dataclass(frozen=True)
class NamespaceLimits(Settings):
    """What a namespace may use. A limit that is unset is not enforced.

    Each gateway and each shard enforces the limits independently.
    """

    weight: float = setting(1.0, minimum=0.01, maximum=1000)
    """Share of the engines' capacity while namespaces wait, relative to the weights of other namespaces."""
    requests_per_s: float | None = setting(None, minimum=0.01)
    """Requests per second; a burst may contain the requests of two seconds."""
    tokens_per_s: float | None = setting(None, minimum=1)
    """Tokens per second in prompts, answers and put chunks."""
    concurrent: int | None = setting(None, minimum=1)
    """Concurrent requests, including requests that wait for an engine."""
    ram_gib: float | None = setting(None, minimum=0)
    """Chunk KV in the RAM tier of each shard, in GiB."""
    ssd_gib: float | None = setting(None, minimum=0)
    """Chunk KV in the SSD tiers and the bucket of each shard, in GiB; 0: chunks are never written there."""
    together: bool = False
    """All namespaces that match the pattern share these limits; if false, each has its own."""


NO_LIMITS = NamespaceLimits()


def bytes_of(gib: float | None) -> float:
    """Convert a limit from GiB to bytes; infinity if it is unset."""
    return float("inf") if gib is None else gib * GIB


@dataclass(frozen=True)
class PrivacyExpert(Settings):
    """Settings that hide which chunks other callers of the same namespace stored, and that exclude its
    prompts from measurements."""

    accounting: bool = True
    """Answers report what was found in the cache. If false, they report it only to callers with the
    permission to read reports, and chunks cannot be named by key."""
    ttft_step_ms: float = setting(0.0, minimum=0, maximum=600_000)
    """The first token is sent at a multiple of this time in milliseconds, plus `ttft_step_us_per_token` for
    each token of the prompt. If both are 0, it is sent when it is ready."""
    ttft_step_us_per_token: float = setting(0.0, minimum=0, maximum=1_000_000)
    """Part of the time step that grows with the prompt, in microseconds per token."""
    chunk_tokens_multiple: int = setting(1, minimum=1, maximum=4096)
    """Lengths of chunks are multiples of this number of tokens; the rest of a text is computed with the
    prompt."""
    learn: bool = True
    """Engines measure on prompts of the namespace how much quality blends lose. If false, its prompts are not
    measured, and are blended only on evidence from a file or from four other namespaces."""


@dataclass(frozen=True)
class NamespacePrivacy(Settings):
    """What answers reveal to a caller about chunks that other callers of the same namespace stored."""

    shared: str = setting("", maxLength=128)
    """A namespace whose chunks requests may use besides their own; empty: none."""
    discover: bool | None = setting(None)
    """Whether passages that recur in prompts are stored automatically. All callers of the namespace can then
    find out that such a passage was sent. Unset: only if `shared` is set, as in a namespace of one user."""
    expert: PrivacyExpert = field(default_factory=PrivacyExpert)

    @property
    def discovers(self) -> bool:
        """Whether chunks are discovered in the namespace's prompts."""
        return bool(self.shared) if self.discover is None else self.discover

    @property
    def pads(self) -> bool:
        """Whether first tokens are delayed."""
        return self.expert.ttft_step_ms > 0 or self.expert.ttft_step_us_per_token > 0

    def at_least(self, outer: NamespacePrivacy) -> NamespacePrivacy:
        """Return the stricter of this privacy and ``outer``, that of the enclosing namespace, field by
        field."""
        own, theirs = self.expert, outer.expert
        stricter = PrivacyExpert(
            accounting=own.accounting and theirs.accounting,
            ttft_step_ms=max(own.ttft_step_ms, theirs.ttft_step_ms),
            ttft_step_us_per_token=max(own.ttft_step_us_per_token, theirs.ttft_step_us_per_token),
            chunk_tokens_multiple=max(own.chunk_tokens_multiple, theirs.chunk_tokens_multiple),
            learn=own.learn and theirs.learn,
        )
        discover = False if outer.discover is False else self.discover
        return replace(self, discover=discover, expert=stricter)

    def step_s(self, prompt_tokens: int) -> float:
        """The time step of a prompt."""
        return self.expert.ttft_step_ms / 1e3 + self.expert.ttft_step_us_per_token * prompt_tokens / 1e6


NO_PRIVACY = NamespacePrivacy()


@dataclass(frozen=True)
class NamespaceRules(Settings):
    """Limits and privacy by pattern. The constructor checks all rules and raises `InvalidField`."""

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
        """Return the limits of a namespace; None if no pattern matches it."""
        return find_rule(self.limits, without_digest(namespace))[1]

    def account_of(self, namespace: str) -> str:
        """Return the name under which the namespace's use is counted.

        That is the pattern, if its namespaces share limits; the base, for a tenant's part without limits of
        its own; otherwise the namespace. Sessions, cache keys and salts have no account of their own, so a
        caller gains nothing from many of them.
        """
        counted = without_digest(namespace)
        pattern, limits = find_rule(self.limits, counted)
        if limits is not None and limits.together:
            return pattern
        return counted if _is_about_part(pattern, counted) else base_of(counted)

    def privacy_of(self, namespace: str) -> NamespacePrivacy:
        """Return the namespace's privacy. That of a part is at least as strict as that of each enclosing
        namespace."""
        *around, own = (find_rule(self.privacy, name)[1] or NO_PRIVACY for name in enclosing(namespace))
        for outer in around:
            own = own.at_least(outer)
        return own

    @property
    def discovering(self) -> list[str]:
        """Patterns of namespaces in which chunks are discovered."""
        return sorted(pattern for pattern, privacy in self.privacy.items() if privacy.discovers)

    def overridden_by(self, other: NamespaceRules) -> NamespaceRules:
        """Return both rules together. The other's take precedence for a pattern that both have."""
        if not (other.limits or other.privacy):
            return self
        merged = {name: {**getattr(self, name), **getattr(other, name)} for name in ("limits", "privacy")}
        return replace(self, **merged)


NO_RULES = NamespaceRules()


def find_rule(rules: Mapping[str, T], namespace: str) -> tuple[str, T | None]:
    """Return the pattern that matches most of the namespace's name, and its rule; empty and None if no
    pattern matches. A part without a rule of its own has the rule of the enclosing namespace."""
    base, *parts = enclosing(namespace)
    for part in reversed(parts):
        pattern, rule = _find_longest(rules, part)
        if _is_about_part(pattern, part):
            return pattern, rule
    return _find_longest(rules, base)


def _is_about_part(pattern: str, namespace: str) -> bool:
    """Whether a pattern that matches a part begins with the part's base, so that it is a rule for parts."""
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


class NamespaceSums(dict[str, int]):
    """Nonzero amounts by namespace. Not thread-safe.

    Their sums by account are kept, because one account may have any number of namespaces. They are recomputed
    when the rules have changed."""

    def __init__(self, amounts: Iterable[tuple[str, int]] = ()) -> None:
        super().__init__(amounts)
        self._sum(NO_RULES)

    def _sum(self, rules: NamespaceRules) -> None:
        self._rules = rules
        self._by_account: Counter[str] = Counter()
        for name, amount in self.items():
            self._by_account[rules.account_of(name)] += amount

    def add(self, namespace: str, amount: int) -> None:
        """Add an amount; a negative amount is subtracted."""
        account = self._rules.account_of(namespace)
        for sums, name in ((self, namespace), (self._by_account, account)):
            sums[name] = sums.get(name, 0) + amount
            if not sums[name]:
                del sums[name]

    def of_account(self, namespace: str, rules: NamespaceRules) -> int:
        """Return the sum of all namespaces whose use is counted with that of ``namespace``."""
        if rules is not self._rules:
            self._sum(rules)
        return self._by_account[rules.account_of(namespace)]


def check_namespace_pattern(pattern: str, where: str = "namespaces") -> str:
    """Return the pattern. Raises `InvalidField`."""
    stem = pattern.removesuffix("*")
    try:
        # A prefix need not be a valid namespace.
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
