"""Small sealed JSON documents, of which a store keeps copies on several shards. Pure.

Several processes write one document. `supersedes` decides which copy counts, and `replaces` whether a store
keeps a new one. A document carries a digest over its canonical JSON, so that a damaged or hand-edited one is
rejected. The digest is not a signature: anyone who can write to the store can write a document.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import blake3

from kintsugi.core.errors import Corrupted, InvalidField

DOCUMENT_BYTES_MAX = 1 << 20
"""Maximum size of a document in a store; a larger one is not even parsed."""
FUTURE_MAX = timedelta(days=1)
"""How far ahead of a store's clock a new document may be dated, because clocks differ."""
TICK = timedelta(milliseconds=1)
"""The resolution of a document's `created`."""
_OLDEST = datetime.min.replace(tzinfo=UTC)
_LATEST = datetime.max.replace(tzinfo=UTC) - timedelta(seconds=1)


@dataclass(frozen=True, order=True)
class Revision:
    """The revision of a stored document. A total order, the same for every reader of the same bytes."""

    created: datetime
    digest: str

    @staticmethod
    def of(document: bytes) -> Revision:
        """Return a document's revision; the lowest for an invalid or edited document. Never raises.

        Checks the digest alone, so that documents with fields of later builds are ordered too, and so that a
        store does not spend time on the content of a hostile one.
        """
        try:
            values = open_document(document)
        except (Corrupted, RecursionError):
            return Revision(_OLDEST, "")
        return Revision(_moment(values.get("created")), _digest(values))


def next_date(now: datetime, document: bytes | None) -> str:
    """Return `created` of a document that follows ``document``: now, or just after it if a clock is slow.
    ISO 8601, UTC."""
    after = now if document is None else max(now, Revision.of(document).created + TICK)
    return after.isoformat(timespec="milliseconds")


def supersedes(document: bytes, other: bytes | None) -> bool:
    """Whether a stored document must be kept instead of another one (None: there is no other one). False in
    both directions for two invalid documents: the one written last replaces the other.
    """
    if other is None:
        return True
    return document != other and Revision.of(document) > Revision.of(other)


def replaces(document: bytes, held: bytes | None, now: datetime) -> bool:
    """Whether a store keeps a document in place of the one that it holds, if any.

    Raises `InvalidField` for a document dated in the future, which would supersede all later ones.
    """
    latest = now + FUTURE_MAX
    revision = Revision.of(document)
    if revision.created > latest:
        raise InvalidField(
            "created",
            f"{revision.created.isoformat()} is more than a day ahead of the store's clock "
            f"({now.isoformat(timespec='seconds')}); set the clock that is wrong, and try again",
        )
    if held is None or Revision.of(held).created > latest:
        return True
    return not supersedes(held, document)


def seal_document(fields: dict[str, Any]) -> bytes:
    """Return the document of these fields, which include `created`."""
    sealed = {**fields, "digest": _digest(fields)}
    return json.dumps(sealed, separators=(",", ":"), allow_nan=False).encode()


def open_document(document: bytes) -> dict[str, Any]:
    """Return the fields of a document from `seal_document`. Raises `Corrupted`."""
    if len(document) > DOCUMENT_BYTES_MAX:
        raise Corrupted(f"a document of {len(document)} bytes; at most {DOCUMENT_BYTES_MAX} are read")
    try:
        fields = json.loads(document)
    except (ValueError, RecursionError):
        raise Corrupted("the document is not JSON") from None
    if not isinstance(fields, dict):
        raise Corrupted("the document is not a JSON object")
    if fields.pop("digest", None) != _digest(fields):
        raise Corrupted("the document does not match its digest")
    return fields


def _moment(created: object) -> datetime:
    """Parse `created`. Returns `_OLDEST` if it is invalid, or so late that no later time can be
    represented."""
    try:
        moment = datetime.fromisoformat(created)  # type: ignore[arg-type]
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return _OLDEST
    return moment if moment <= _LATEST else _OLDEST


def _digest(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return blake3.blake3(b"kintsugi-report\0" + canonical.encode()).hexdigest()
