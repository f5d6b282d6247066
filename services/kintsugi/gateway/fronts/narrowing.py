"""Where a request says which part of its namespace it is narrowed to: headers, metadata, OpenAI's fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces.parts import CACHE_KEY, SALT, SESSION, TENANT, narrow

NARROWING_HEADERS = (TENANT, SESSION)
NARROWING_FIELDS = (CACHE_KEY, SALT)
"""Fields of an OpenAI request's body, or of the query of a request without one."""


def narrow_by_headers(namespace: str, headers: Mapping[str, str]) -> str:
    """``headers``: HTTP's or gRPC metadata. Raises `InvalidField`, also for a header that comes twice."""
    return narrow(namespace, _read_headers(headers))


def narrow_by_request(namespace: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """As `narrow_by_headers`, also by the fields of an OpenAI request's body."""
    fields = {name: body[name] for name in NARROWING_FIELDS if name in body}
    return narrow(namespace, {**_read_headers(headers), **fields})


def find_fields(query: Iterable[tuple[str, str]]) -> dict[str, str]:
    """`NARROWING_FIELDS` in the query of a request that has no body. Raises `InvalidField` for one that comes
    twice."""
    fields = [*query]
    check_sent_once((name for name, _ in fields), NARROWING_FIELDS)
    return {name: value for name, value in fields if name in NARROWING_FIELDS}


def check_sent_once(names: Iterable[str], narrowing: Iterable[str] = NARROWING_HEADERS) -> None:
    """``names``: of all headers, metadata or fields. Raises `InvalidField` for one that narrows and comes
    twice: a proxy that adds its own behind a client's must not leave the choice to chance."""
    sent = Counter(names)
    for name in narrowing:
        if sent[name] > 1:
            raise InvalidField(name, "comes more than once; send it once")


def _read_headers(headers: Mapping[str, str]) -> dict[str, str]:
    check_sent_once(getattr(headers, "keys", list)())
    return {name: headers[name] for name in NARROWING_HEADERS if name in headers}
