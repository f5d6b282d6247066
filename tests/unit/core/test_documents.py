"""Sealed documents: which of two counts, and what a store keeps."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta

import pytest

from kintsugi.core.documents import (
    DOCUMENT_BYTES_MAX,
    Revision,
    next_date,
    open_document,
    replaces,
    seal_document,
    supersedes,
)
from kintsugi.core.errors import Corrupted, InvalidField


def made(created: object, **fields: object) -> bytes:
    return seal_document({"created": created, **fields})


def test_a_sealed_document_opens() -> None:
    fields = {"created": "now", "text": "ä", "rows": [1, 2.5, None], "nested": {"b": 1, "a": True}}
    assert open_document(seal_document(fields)) == fields


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "does not match its digest"),
        (made("2026-01-01", seed=7).replace(b'"seed":7', b'"seed":8'), "does not match its digest"),
        (b" " * (DOCUMENT_BYTES_MAX + 1), "at most 1048576 are read"),
    ],
)
def test_what_is_no_document_is_refused_in_words(document: bytes, problem: str) -> None:
    with pytest.raises(Corrupted, match=problem):
        open_document(document)


def test_order_and_layout_of_the_fields_do_not_matter() -> None:
    fields = open_document(made("now", one=1, two=2))
    digest = json.loads(made("now", one=1, two=2))["digest"]
    spread = json.dumps({"digest": digest, **dict(reversed(fields.items()))}, indent=2).encode()
    assert open_document(spread) == fields


EDITED = made("2027-01-01", seed=7).replace(b'"seed":7', b'"seed":8')
IN_ORDER = [
    [b"", b"[" * 100_000, b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", b"\xff", b" " * (2 << 20), EDITED],
    [made("now"), made("9999-12-31T23:59:59+00:00"), made("0001-01-01T00:00:00+14:00"), made(None), made(7)],
    [made("2026-01-01T00:00:00"), made("2026-01-01T00:00:00Z"), made("2026-01-01T02:00:00+02:00")],
    [made("2026-01-01T00:30:00Z")],
    [made("2026-01-01T00:00:00-01:00"), made("2026-01-01T01:00:00Z", version=9, later_field=1)],
    [made("2026-01-01T01:00:00.001Z")],
]
"""Documents by date, lowest first; within a group the digest decides, if there is one."""


def test_which_of_two_documents_counts() -> None:
    for low, high in itertools.combinations(range(len(IN_ORDER)), 2):
        for one, other in itertools.product(IN_ORDER[low], IN_ORDER[high]):
            assert supersedes(other, one)
            assert not supersedes(one, other)
    for unsound, other in itertools.product(IN_ORDER[0], repeat=2):
        assert not supersedes(unsound, other), "the last one written counts"
    for group in IN_ORDER[1:]:
        for one, other in itertools.combinations(group, 2):
            assert supersedes(one, other) != supersedes(other, one), "everybody keeps the same one"
    assert all(supersedes(document, None) for group in IN_ORDER for document in group)


@pytest.mark.parametrize("now", [datetime(2026, 1, 1, 0, 45, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)])
def test_the_next_date_is_above_whatever_is_stored(now: datetime) -> None:
    for stored in itertools.chain(*IN_ORDER):
        assert supersedes(made(next_date(now, stored)), stored)
    assert next_date(now, None) == next_date(now, b"") == now.isoformat(timespec="milliseconds")


NOW = datetime(2026, 6, 1, tzinfo=UTC)


def test_a_store_keeps_the_later_document() -> None:
    today, tomorrow = made("2026-06-01"), made("2026-06-01T23:00:00+00:00")
    assert replaces(tomorrow, today, NOW)
    assert not replaces(today, tomorrow, NOW)
    assert replaces(today, None, NOW)
    assert replaces(b"no document", None, NOW)
    assert not replaces(b"no document", today, NOW)


def test_a_document_from_the_future_never_keeps_a_later_one_out() -> None:
    future = (NOW + timedelta(days=1, seconds=1)).isoformat()
    with pytest.raises(InvalidField, match=r"created: 2026-06-02T00:00:01.*set the clock that is wrong"):
        replaces(made(future), None, NOW)
    for held in (made(future), made("9999-01-01")):
        assert replaces(made("2026-06-01"), held, NOW)


def test_a_revision_is_the_same_for_every_reader() -> None:
    document = made("2026-01-01T02:00:00+02:00")
    assert Revision.of(document) == Revision.of(bytes(document))
    assert Revision.of(document).created == datetime(2026, 1, 1, tzinfo=UTC)
