"""References to chunks by document."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.precompute.documents import DocumentRef


def test_a_reference_names_a_document_and_counts_from_zero() -> None:
    assert DocumentRef("tea", 0).version is None
    for bad, field in ((("", 0), "document_id"), (("x" * 1025, 0), "document_id"), (("tea", -1), "index")):
        with pytest.raises(InvalidField, match=field):
            DocumentRef(*bad)
