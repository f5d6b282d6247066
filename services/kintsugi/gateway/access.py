"""Decides which caller may use which namespace, by bearer tokens whose hashes are in a file. Changes of the
file take effect.

The file is JSON:

    {"tokens": [{"name": "search", "sha256": "<64 hexadecimal digits>", "namespaces": ["search", "docs/*"]}]}

`limits` and `privacy` beside `tokens` hold rules for namespaces by pattern (`core.namespaces`).

A namespace pattern is a namespace, a prefix that ends in `*`, or `*` alone. Tokens are 256 random bits made
by `new_token`, never chosen by a person: a plain SHA-256 of one cannot be inverted by guessing, so a slow
password hash would only cost every request milliseconds. The token itself is shown once and stored nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from kintsugi.core.errors import InvalidField, PermissionDenied, Unauthenticated
from kintsugi.core.namespaces.limits import NamespaceLimits
from kintsugi.core.namespaces.privacy import NamespacePrivacy
from kintsugi.core.namespaces.rules import NO_RULES, NamespaceRules, check_namespace_pattern
from kintsugi.core.schema import STRICT, load
from kintsugi.core.settings import non_default_fields
from kintsugi.core.spaces import check_namespace
from kintsugi.store.protocol.tls import is_loopback

log = logging.getLogger(__name__)

TOKEN_PREFIX = "kg_"
"""Lets scanners for leaked secrets recognise a token."""
TOKENS_MAX = 1_000
"""Each request is compared with every token: measured as 0.06 ms."""
FILE_BYTES_MAX = 8 << 20
FILE_CHECK_S = 1.0
EVERY_NAMESPACE = "*"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Grant:
    """One entry of the tokens file."""

    __pydantic_config__ = STRICT

    name: str
    """Names the token in logs and messages."""
    sha256: str
    namespaces: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidField("name", "is mandatory: name the token's owner")
        if not _SHA256.fullmatch(self.sha256):
            raise InvalidField("sha256", f"of token {self.name!r} is not 64 lower-case hexadecimal digits")
        if not self.namespaces:
            raise InvalidField("namespaces", f"of token {self.name!r} is empty: name what it may use")
        for pattern in self.namespaces:
            check_namespace_pattern(pattern)


@dataclass(frozen=True)
class _File:
    __pydantic_config__ = STRICT

    tokens: tuple[Grant, ...]
    limits: Mapping[str, NamespaceLimits] = field(default_factory=dict)
    privacy: Mapping[str, NamespacePrivacy] = field(default_factory=dict)

    @cached_property
    def rules(self) -> NamespaceRules:
        """Raises `InvalidField`."""
        return NamespaceRules(self.limits, self.privacy)


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    name: str
    namespaces: tuple[str, ...]

    def may_use(self, namespace: str) -> bool:
        return any(
            namespace.startswith(pattern[:-1]) if pattern.endswith("*") else namespace == pattern
            for pattern in self.namespaces
        )

    def authorize(self, namespace: str) -> str:
        """Returns the namespace. Raises `InvalidField` for an invalid one, and `PermissionDenied`."""
        check_namespace(namespace)
        if not self.may_use(namespace):
            raise PermissionDenied(
                f"token {self.name!r} may not use namespace {namespace!r}; it is bound to "
                f"{', '.join(self.namespaces)}"
            )
        return namespace

    @property
    def is_unrestricted(self) -> bool:
        return EVERY_NAMESPACE in self.namespaces


ANYONE = Caller("anyone", (EVERY_NAMESPACE,))


def may_see_accounting(caller: Caller) -> bool:
    """Whether a caller may know what was found in the cache where a namespace's privacy hides it."""
    return caller.is_unrestricted


class Access:
    """Finds out who sent a request. Thread-safe. Accepts everyone: on loopback, or with `insecure`."""

    has_tokens = False

    def caller(self, token: str | None) -> Caller:
        """Raises `Unauthenticated`."""
        return ANYONE

    def rules(self) -> NamespaceRules:
        """Rules for namespaces that come with the tokens."""
        return NO_RULES


class TokenFile(Access):
    """Accepts the tokens of a file."""

    has_tokens = True

    def __init__(self, path: Path) -> None:
        """Raises `InvalidField` for a file that cannot be read or parsed."""
        self._path = path
        self._lock = threading.Lock()
        self._stamp = _stamp_of(path)
        self._file = _read_file(path)
        self._checked_s = time.monotonic()

    def caller(self, token: str | None) -> Caller:
        if not token:
            raise Unauthenticated("no token; send the metadata or header `authorization: Bearer <token>`")
        presented = token_digest(token)
        found = None
        for grant in self._current().tokens:  # all of them, so that the time tells nothing
            if hmac.compare_digest(presented, grant.sha256):
                found = grant
        if found is None:
            raise Unauthenticated("this token is unknown or was revoked; ask for another")
        return Caller(found.name, found.namespaces)

    def rules(self) -> NamespaceRules:
        return self._current().rules

    def _current(self) -> _File:
        with self._lock:
            if time.monotonic() - self._checked_s >= FILE_CHECK_S:
                self._checked_s = time.monotonic()
                stamp = _stamp_of(self._path)
                if stamp != self._stamp:
                    try:
                        self._file = _read_file(self._path)
                    except InvalidField as error:
                        log.warning("the tokens file is invalid; the previous tokens stay in use: %s", error)
                    self._stamp = stamp
            return self._file


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _stamp_of(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file does; zeros if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def grants_of(path: Path) -> tuple[Grant, ...]:
    """The file's tokens. Raises `InvalidField`."""
    return _read_file(path).tokens


def _read_file(path: Path) -> _File:
    """Raises `InvalidField`."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidField("tokens_file", f"{path} cannot be read ({error.strerror})") from error
    if len(text) > FILE_BYTES_MAX:
        raise InvalidField("tokens_file", f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(
            "tokens_file", f"{path} is no JSON ({error}); make one with kintsugi token"
        ) from None
    read = load(_File, values, where=str(path))
    if len(read.tokens) > TOKENS_MAX:
        raise InvalidField(
            "tokens_file", f"{path} has {len(read.tokens)} tokens; at most {TOKENS_MAX} are read"
        )
    _ = read.rules  # checks them
    return read


def new_token(name: str, namespaces: Sequence[str]) -> tuple[str, Grant]:
    """A new token and its entry for the file. Raises `InvalidField`."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return token, Grant(name, token_digest(token), tuple(namespaces))


def add_grant(path: Path, grant: Grant) -> None:
    """Appends an entry atomically; a missing file is created, readable by its owner alone.

    Raises `InvalidField` for an invalid file, and for one that has a token of that name.
    """
    before = _read_file(path) if path.exists() else _File(())
    if any(other.name == grant.name for other in before.tokens):
        raise InvalidField("name", f"{grant.name!r} has a token in {path}; remove it there first")
    values = {"tokens": [asdict(one) for one in (*before.tokens, grant)]}
    text = json.dumps({**values, **non_default_fields(before.rules)}, indent=2) + "\n"
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # mode 0600
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise InvalidField("file", f"{path} cannot be written ({error.strerror})") from error


def open_access(tokens_file: str) -> Access:
    """The access by a file's tokens; without a file for everyone. Raises `InvalidField`."""
    return TokenFile(Path(tokens_file)) if tokens_file else Access()


def check_exposure(listen: str, has_tokens: bool, has_tls: bool, insecure: bool) -> None:
    """Raises `InvalidField` for an address beyond loopback without tokens and TLS, unless ``insecure``:
    anybody can read a token that travels unencrypted."""
    if insecure or is_loopback(listen) or (has_tokens and has_tls):
        return
    missing = " and ".join(
        name
        for name, has in (("--tokens-file", has_tokens), ("--tls-cert with --tls-key", has_tls))
        if not has
    )
    raise InvalidField(
        "listen", f"{listen} can be reached from other machines: give {missing}, or say --insecure"
    )
