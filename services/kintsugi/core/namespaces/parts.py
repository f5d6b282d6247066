"""Parts of a namespace, which a request selects with a tenant, a session, a cache key or a salt.

A part is a namespace of its own, named below its base:

    docs/-/acme                                      tenant acme
    docs/-/.5f1c2b8e6d0a4f379a1b2c3d4e5f6071         a session, cache key or salt, or several of them
    docs/-/acme/.5f1c2b8e6d0a4f379a1b2c3d4e5f6071    both

A tenant's name appears as it is, so that rules can name it; the other values are arbitrary texts and appear
as one digest. A caller that may use a namespace may use its parts. A part has the rules and the keys of its
base unless it has its own, counts against the limits of its base, and is erased with it. See docs/TENANTS.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import blake3

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import NAMESPACE_BYTES_MAX, check_namespace

MARK = "/-/"
"""Ends the base in a part's name."""
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
NARROWING_FIELDS = (CACHE_KEY, SALT)
"""Fields of an OpenAI request's body, or of the query of a request without one."""


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
            "namespace", f"{namespace!r} ends as parts begin; name one that does not end in '/-'"
        )
    tenant = given.pop(TENANT, None)
    components = [*([tenant] if tenant is not None else []), *([_digest(given)] if given else [])]
    part = f"{namespace}{'/' if MARK in namespace else MARK}{'/'.join(components)}"
    if len(part) > NAMESPACE_BYTES_MAX:
        name = TENANT if tenant is not None else next(iter(given))
        raise InvalidField(
            name,
            f"makes the namespace {part!r}, of more than {NAMESPACE_BYTES_MAX} characters; shorten "
            f"{'the tenant or ' if tenant is not None else ''}the namespace {namespace!r}",
        )
    return part


def check_value(name: str, value: object) -> str:
    """Return a narrowing value. Raises `InvalidField` if it is not valid."""
    if not isinstance(value, str):
        raise InvalidField(name, f"must be a string, not a {type(value).__name__}")
    if name == TENANT and not _TENANT.fullmatch(value):
        raise InvalidField(
            name, "must start with a letter or digit, hold only letters, digits and . _ - and have at most 64"
        )
    if not 0 < len(value) <= VALUE_CHARS_MAX:
        raise InvalidField(name, f"has {len(value)} characters; send 1 to {VALUE_CHARS_MAX}, or leave it out")
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
    """As `narrow_by_headers`, also by the fields of an OpenAI request's body."""
    fields = {name: body[name] for name in NARROWING_FIELDS if name in body}
    return narrow(namespace, {**_read_headers(headers), **fields})


def find_fields(query: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the `NARROWING_FIELDS` in the query of a request without a body. Raises `InvalidField` for a
    repeated field."""
    fields = [*query]
    check_sent_once((name for name, _ in fields), NARROWING_FIELDS)
    return {name: value for name, value in fields if name in NARROWING_FIELDS}


def check_sent_once(names: Iterable[str], narrowing: Iterable[str] = NARROWING_HEADERS) -> None:
    """Raise `InvalidField` if a narrowing name is repeated in ``names``, those of all headers, metadata or
    fields: if a proxy adds its own after a client's, the choice must not be left to chance."""
    sent = Counter(names)
    for name in narrowing:
        if sent[name] > 1:
            raise InvalidField(name, "comes more than once; send it once")


def _read_headers(headers: Mapping[str, str]) -> dict[str, str]:
    check_sent_once(getattr(headers, "keys", list)())
    return {name: headers[name] for name in NARROWING_HEADERS if name in headers}
