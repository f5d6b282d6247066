"""Identifies callers by the entries of a tokens file, which is read again when it changes.

The file is JSON:

    {"tokens": [{"name": "search", "sha256": "<64 hexadecimal digits>", "namespaces": ["search", "docs/*"],
                 "verbs": ["generate", "list"], "expires": "2027-01-31T12:00:00Z"}],
     "certificates": [{"name": "corpus", "subject": "CN=corpus-worker", "namespaces": ["docs/*"],
                       "verbs": ["put", "generate"]}]}

`verbs`, `expires`, `revoked` and `certificates` may be left out (`callers`). `limits` and `privacy` beside
`tokens` hold rules for namespaces by pattern (`core.namespaces`). Tokens are 256 random bits made by
`gateway.access.new_token`, never chosen by a person: a plain SHA-256 of one cannot be inverted by guessing,
so a slow password hash would only cost every request milliseconds. The token itself is shown only when it is
made, and is never stored."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, Unauthenticated
from kintsugi.core.namespaces import NO_RULES, NamespaceRules
from kintsugi.core.schema import load
from kintsugi.store.protocol.callers import ANYONE, AccessDocument, Caller, Verb
from kintsugi.store.protocol.private_files import check_private
from kintsugi.store.protocol.watched_files import WatchedFiles

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
    """Return the access by a file's entries; without a file, access for every caller. Raises
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
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(
            "tokens_file", f"{path} is not JSON ({error}); make a tokens file with kintsugi token"
        ) from None


def parse_document(values: Any, path: Path) -> AccessDocument:
    """Return the entries in the values of the file at `path`. Raises `InvalidField`."""
    document = load(AccessDocument, values, where=str(path))
    for name, entries in (("tokens", document.tokens), ("certificates", document.certificates)):
        if len(entries) > ENTRIES_MAX:
            raise InvalidField(
                "tokens_file", f"{path} has {len(entries)} {name}; at most {ENTRIES_MAX} are read"
            )
    _ = document.rules  # checks them
    return document


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
