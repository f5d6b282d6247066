"""Callers, the verbs and namespaces that they are granted, and the tokens file, which identifies them.

The file is JSON, and is read again when it changes:

    {"tokens": [{"name": "search", "sha256": "<64 hexadecimal digits>", "namespaces": ["search", "docs/*"],
                 "verbs": ["generate", "list"], "expires": "2027-01-31T12:00:00Z"}],
     "certificates": [{"name": "corpus", "subject": "CN=corpus-worker", "namespaces": ["docs/*"],
                       "verbs": ["put", "generate"]}]}

`verbs`, `expires`, `revoked` and `certificates` may be left out. `limits` and `privacy` beside `tokens` hold
rules for namespaces by pattern (`core.namespaces`). Tokens are 256 random bits made by
`gateway.access.new_token`, never chosen by a person: a plain SHA-256 of one cannot be inverted by guessing,
so a slow password hash would only cost every request milliseconds. The token itself is shown only when it is
made, and is never stored."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, PermissionDenied, Unauthenticated
from kintsugi.core.namespaces import (
    AUTHORIZATION,
    EVERY_NAMESPACE,
    NO_RULES,
    NamespaceLimits,
    NamespacePrivacy,
    NamespaceRules,
    check_namespace_pattern,
    check_sent_once,
    matches,
)
from kintsugi.core.schema import STRICT, load, parse_json
from kintsugi.core.spaces import check_namespace
from kintsugi.store.protocol.files import check_private
from kintsugi.store.protocol.watched_files import WatchedFiles

SUBJECT_KINDS = ("CN=", "DNS:", "URI:")
"""Prefixes of a certificate's identities: the subject's common name, and its alternative names."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Verb(StrEnum):
    """A permission of a caller."""

    GENERATE = "generate"
    """Request answers, and read the KV of chunks."""
    PUT = "put"
    """Store chunks."""
    DELETE = "delete"
    """Delete chunks by key."""
    LIST = "list"
    """See which chunks are stored: listings, the accounting of answers, `explain`."""
    ADMIN = "admin"
    """Operate the service: read metrics; on a shard, drain it and clear a namespace."""
    REPORT = "report"
    """Write calibration reports, which decide whether a model is blended for every tenant."""


TENANT_VERBS = frozenset({Verb.GENERATE, Verb.PUT, Verb.DELETE, Verb.LIST})
"""The verbs of an entry without `verbs`."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    name: str
    namespaces: tuple[str, ...]
    verbs: frozenset[Verb] = TENANT_VERBS

    def may(self, verb: Verb) -> bool:
        return verb in self.verbs

    def may_use(self, namespace: str) -> bool:
        """Return whether the caller may use a namespace."""
        return any(matches(pattern, namespace) for pattern in self.namespaces)

    def pattern_of(self, namespace: str) -> str:
        """Return the longest of the caller's patterns that includes a namespace, which the caller may use."""
        return max((pattern for pattern in self.namespaces if matches(pattern, namespace)), key=len)

    def authorize(self, namespace: str, verb: Verb | None = None) -> str:
        """Check that the caller may use a namespace and has a verb, and return the namespace. `verb` None:
        any verb.

        Raises `InvalidField` for an invalid namespace, and `PermissionDenied`.
        """
        check_namespace(namespace)
        if not self.may_use(namespace):
            raise PermissionDenied(
                f"{self.name!r} may not use namespace {namespace!r}; it is bound to "
                f"{', '.join(self.namespaces)}"
            )
        if verb is not None:
            self.require(verb)
        return namespace

    def require(self, verb: Verb) -> None:
        """Raise `PermissionDenied` if the caller lacks the verb."""
        if verb not in self.verbs:
            raise PermissionDenied(
                f"{self.name!r} lacks the verb {verb.value!r}; it has "
                f"{', '.join(sorted(self.verbs))}: add the verb to its entry in the tokens file"
            )

    def require_everywhere(self, verb: Verb) -> None:
        """Raise `PermissionDenied` unless the caller has the verb on every namespace."""
        self.require(verb)
        if not self.is_unrestricted:
            raise PermissionDenied(
                f"{self.name!r} is bound to {', '.join(self.namespaces)}, and this concerns every namespace; "
                f"bind it to {EVERY_NAMESPACE!r}"
            )

    @property
    def is_unrestricted(self) -> bool:
        return EVERY_NAMESPACE in self.namespaces


ANYONE = Caller("anyone", (EVERY_NAMESPACE,), frozenset(Verb))


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """An entry of a tokens file."""

    __pydantic_config__ = STRICT

    name: str
    """The caller's name in logs and messages."""
    namespaces: tuple[str, ...]
    """Namespaces that the caller may use; `*` at the end of a name matches any rest."""
    verbs: tuple[Verb, ...] | None = None
    """None: generate, put, delete and list."""

    @property
    def caller(self) -> Caller:
        verbs = TENANT_VERBS if self.verbs is None else frozenset(self.verbs)
        return Caller(self.name, self.namespaces, verbs)

    def _check(self, kind: str) -> None:
        if not self.name:
            raise InvalidField("name", f"is required: name the {kind}'s owner")
        if not self.name.isprintable():  # half of a surrogate pair, or a line end, which logs would break at
            raise InvalidField("name", f"of {kind} {self.name!r} must hold printable characters only")
        if not self.namespaces:
            raise InvalidField(
                "namespaces", f"of {kind} {self.name!r} is empty: name the namespaces that it may use"
            )
        for pattern in self.namespaces:
            check_namespace_pattern(pattern)
        if self.verbs is not None and not self.verbs:
            raise InvalidField(
                "verbs", f"of {kind} {self.name!r} is empty: name some of {', '.join(Verb)}, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class Grant(_Entry):
    """The entry of one token."""

    sha256: str
    """SHA-256 of the token, hexadecimal."""
    expires: str | None = None
    """When the token expires, in RFC 3339 with an offset; None: never."""
    revoked: bool = False
    """Refuse the token. The entry stays, so that the name in the audit log keeps its meaning."""

    def __post_init__(self) -> None:
        self._check("token")
        if not _SHA256.fullmatch(self.sha256):
            raise InvalidField("sha256", f"of token {self.name!r} is not 64 lower-case hexadecimal digits")
        if self.expires is not None:
            parse_time_s("expires", self.expires)

    def why_refused(self, now_s: float) -> str:
        """Return why the token is refused at `now_s` (Unix seconds); empty: it is accepted."""
        if self.revoked:
            return "this token was revoked; ask for another (kintsugi token)"
        if self.expires is not None and now_s >= parse_time_s("expires", self.expires):
            return f"this token expired at {self.expires}; ask for another (kintsugi token)"
        return ""


@dataclass(frozen=True, kw_only=True)
class CertificateGrant(_Entry):
    """The entry of one client certificate."""

    subject: str
    """`CN=` and the subject's common name, or `DNS:` or `URI:` and one of its alternative names."""

    def __post_init__(self) -> None:
        self._check("certificate")
        if not any(self.subject.startswith(kind) and self.subject != kind for kind in SUBJECT_KINDS):
            raise InvalidField(
                "subject",
                f"{self.subject!r} of certificate {self.name!r} must be CN=NAME, DNS:NAME or URI:NAME",
            )


@dataclass(frozen=True)
class AccessDocument:
    """Contents of a tokens file."""

    __pydantic_config__ = STRICT

    tokens: tuple[Grant, ...]
    certificates: tuple[CertificateGrant, ...] = ()
    limits: Mapping[str, NamespaceLimits] = field(default_factory=dict)
    privacy: Mapping[str, NamespacePrivacy] = field(default_factory=dict)

    @cached_property
    def rules(self) -> NamespaceRules:
        """Raises `InvalidField`."""
        return NamespaceRules(self.limits, self.privacy)

    @property
    def names_verbs(self) -> bool:
        """Whether any entry has `verbs`."""
        entries: list[_Entry] = [*self.tokens, *self.certificates]
        return any(entry.verbs is not None for entry in entries)

    def find_certificate(self, identities: Collection[str]) -> CertificateGrant | None:
        """Return the first entry for one of a certificate's identities."""
        return next((entry for entry in self.certificates if entry.subject in identities), None)


def parse_time_s(field: str, text: str) -> float:
    """Return the Unix seconds of a time in RFC 3339. Raises `InvalidField`, also for a time without an
    offset, which would depend on the machine's time zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidField(field, f"{text!r} must be a time such as 2027-01-31T12:00:00Z")
    return time.timestamp()


def parse_bearer(header: str | None) -> str | None:
    """Return the token in `Bearer TOKEN`; None for anything else."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def read_token(headers: Iterable[tuple[str, Any]]) -> str | None:
    """Return the token in a request's HTTP headers or gRPC metadata, whose names are in lower case. Raises
    `InvalidField` if a header that selects the caller or the namespace is repeated."""
    headers = list(headers)
    check_sent_once(name for name, _ in headers)
    return parse_bearer(next((value for name, value in headers if name == AUTHORIZATION), None))


ENTRIES_MAX = 1_000
"""Maximum number of tokens, and of certificates. Each request is compared with every token, which takes 0.06
ms."""
FILE_BYTES_MAX = 8 << 20


class Access:
    """Identifies the sender of a request. Thread-safe. This class accepts every caller: on loopback, or with
    `insecure`."""

    has_tokens = False

    @property
    def names_verbs(self) -> bool:
        """Whether any entry names verbs."""
        return False

    @property
    def has_certificates(self) -> bool:
        """Whether client certificates identify callers."""
        return False

    def caller(self, token: str | None, identities: Collection[str] = ()) -> Caller:
        """Return the caller. `identities` are those of the verified client certificate, such as `CN=worker`.

        A token takes precedence over a certificate. Raises `Unauthenticated`."""
        return ANYONE

    def rules(self) -> NamespaceRules:
        """Return the rules for namespaces in the tokens file."""
        return NO_RULES

    def sees_all(self, caller: Caller) -> bool:
        """Return whether a caller may see data of every namespace, such as metrics. If any entry has `verbs`,
        this needs the verb `admin` on every namespace."""
        return not self.names_verbs or (caller.may(Verb.ADMIN) and caller.is_unrestricted)

    def check_sees_all(self, caller: Caller) -> None:
        """Raise `PermissionDenied` if `sees_all` is False."""
        if not self.sees_all(caller):
            caller.require_everywhere(Verb.ADMIN)


class TokenFile(Access):
    """Accepts the tokens and certificates of a file."""

    has_tokens = True

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns Unix seconds. Raises `InvalidField` for a file that cannot be read or parsed, or
        that other users may read."""
        self._clock = clock
        self._file = WatchedFiles("tokens file", (path,), partial(_read_private, path))

    @property
    def names_verbs(self) -> bool:
        return self._file.current().names_verbs

    @property
    def has_certificates(self) -> bool:
        return bool(self._file.current().certificates)

    def caller(self, token: str | None, identities: Collection[str] = ()) -> Caller:
        if token:
            return self._find_token(token)
        entry = self._file.current().find_certificate(identities)
        if entry is None:
            shown = f"; no entry is for the certificate {', '.join(identities)}" if identities else ""
            raise Unauthenticated(
                f"no token; send the metadata or header `authorization: Bearer <token>`{shown}; an operator "
                "makes tokens with kintsugi token"
            )
        return entry.caller

    def rules(self) -> NamespaceRules:
        return self._file.current().rules

    def _find_token(self, token: str) -> Caller:
        presented = token_digest(token)
        # Every grant is compared, so that the response time reveals nothing.
        found = [
            grant for grant in self._file.current().tokens if hmac.compare_digest(presented, grant.sha256)
        ]
        if not found:
            raise Unauthenticated("this token is unknown or was revoked; ask for another (kintsugi token)")
        for grant in found:
            if problem := grant.why_refused(self._clock()):
                raise Unauthenticated(problem)
        return found[-1].caller


def open_access(tokens_file: str | Path | None) -> Access:
    """Return an `Access` for the entries of a file; without a file, one that accepts every caller. Raises
    `InvalidField`."""
    return TokenFile(Path(tokens_file)) if tokens_file else Access()


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def read_document(path: Path) -> AccessDocument:
    """Return the file's entries. Raises `InvalidField`."""
    return parse_document(read_values(path), path)


def _read_private(path: Path) -> AccessDocument:
    check_private("tokens_file", path)
    return read_document(path)


def read_values(path: Path) -> Any:
    """Return the file's JSON. Raises `InvalidField`."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidField("tokens_file", f"{path} cannot be read ({error.strerror})") from error
    if len(text) > FILE_BYTES_MAX:
        raise InvalidField("tokens_file", f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(
            "tokens_file", f"{path} is not JSON ({error}); make a tokens file with kintsugi token"
        ) from None


def parse_document(values: Any, path: Path) -> AccessDocument:
    """Convert the JSON of the tokens file at `path` to its entries. Raises `InvalidField`."""
    document = load(AccessDocument, values, where=str(path))
    for name, entries in (("tokens", document.tokens), ("certificates", document.certificates)):
        if len(entries) > ENTRIES_MAX:
            raise InvalidField(
                "tokens_file", f"{path} has {len(entries)} {name}; at most {ENTRIES_MAX} are read"
            )
    _ = document.rules  # checks them
    return document


def identify_call(access: Access, context: Any) -> Caller:
    """Return the caller of a gRPC call, by its token or its client certificate. Raises `Unauthenticated`, and
    as `read_token`."""
    identities = identities_of_call(context) if access.has_certificates else ()
    return access.caller(read_token(context.invocation_metadata() or ()), identities)


def identities_of_call(context: Any) -> tuple[str, ...]:
    """Return the identities in the client certificate of a gRPC call; empty without mutual TLS."""
    names = context.auth_context()
    kinds = (("CN=", "x509_common_name"), ("DNS:", "peer_dns"), ("URI:", "peer_uri"))
    return tuple(kind + name.decode(errors="replace") for kind, key in kinds for name in names.get(key, ()))


def identities_of_certificate(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the identities in the result of `ssl.SSLObject.getpeercert`, which is None without a
    certificate."""
    return tuple(_identities(certificate or {}))


def _identities(certificate: Mapping[str, Any]) -> Iterator[str]:
    for names in certificate.get("subject", ()):
        yield from (f"CN={value}" for kind, value in names if kind == "commonName")
    for kind, value in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "URI"):
            yield f"{kind}:{value}"
