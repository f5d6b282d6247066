"""What engines tell each other of what they shadowed, through a document that anybody may have broken."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta

import pytest

from kintsugi.core.baseline import Deviation
from kintsugi.core.errors import Corrupted, Unavailable
from kintsugi.core.report import REPORT_BYTES_MAX, seal_document
from kintsugi.core.spaces import ModelFingerprint
from kintsugi.quality.evidence import (
    DEVIATIONS_MAX,
    ENGINES_MAX,
    EngineEvidence,
    Evidence,
    EvidencePool,
    evidence_name,
)
from kintsugi.store.client.ram import RamStore
from kintsugi.store.shard.reports import NAME_CHARS_MAX
from tests.unit.core.test_report import BINDING

ADDRESS = BINDING.model, evidence_name(BINDING)
START = datetime(2026, 1, 1, tzinfo=UTC)


def deviations(*kl: float) -> list[Deviation]:
    return [Deviation(one, 0.0) for one in kl]


def part(engine: str, count: int = 1) -> EngineEvidence:
    return EngineEvidence(engine, count, ((0.1, 0.0, 1),) * min(count, DEVIATIONS_MAX))


def test_every_engine_hears_once_what_the_others_saw() -> None:
    store = RamStore()
    one, two, three = (EvidencePool(store, BINDING, name) for name in "abc")
    assert one.exchange("c1", deviations(1, 2)) == []
    assert two.exchange("c1", deviations(3)) == deviations(1, 2)
    assert one.exchange("c1", []) == deviations(3)
    assert one.exchange("c1", deviations(4)) == []
    assert two.exchange("c1", []) == deviations(4)
    assert sorted(found.kl for found in three.exchange("c1", [])) == [1, 2, 3, 4], "one that started late"


def test_a_new_calibration_starts_without_evidence() -> None:
    store = RamStore()
    one, two = (EvidencePool(store, BINDING, name) for name in "ab")
    one.exchange("c1", deviations(1))
    assert two.exchange("c2", deviations(2)) == []
    assert one.exchange("c2", deviations(3)) == deviations(2)
    assert two.exchange("c2", []) == deviations(3)


def test_what_a_dead_engine_saw_is_still_known_and_counts_once() -> None:
    store = RamStore()
    EvidencePool(store, BINDING, "dead").exchange("c1", deviations(1))
    alive = EvidencePool(store, BINDING, "alive")
    assert alive.exchange("c1", []) == deviations(1)
    assert alive.exchange("c1", deviations(2)) == []


def test_of_two_that_write_at_once_none_is_lost_for_good() -> None:
    class Overtaken(RamStore):
        """Another engine writes between this one's reading and writing."""

        def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
            super().put_report(fingerprint, name, document)
            super().put_report(fingerprint, name, other)

    far = (START + timedelta(days=100)).isoformat(timespec="milliseconds")
    other = Evidence("c1", far, (part("other"),)).to_bytes()
    overtaken = Overtaken()
    one = EvidencePool(overtaken, BINDING, "one", now=lambda: START)
    one.exchange("c1", deviations(1))
    store = RamStore()
    store.put_report(*ADDRESS, other)
    one._store = store
    assert one.exchange("c1", []) == [Deviation(0.1, 0.0)], "its clock is behind, and its part is written"
    found = Evidence.from_bytes(store.get_report(*ADDRESS) or b"")
    assert {engine.engine for engine in found.engines} == {"one", "other"}


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xff\x00garbage",
        b"[1]",
        b'{"calibration": "c1"}',
        seal_document({"calibration": "c1", "created": "now", "engines": [], "more": 1}),
        seal_document({"calibration": "c1", "created": "now", "engines": [{"engine": "x"}]}),
        seal_document(
            {
                "calibration": "c1",
                "created": "now",
                "engines": [{"engine": "x", "count": 1, "latest": [[-1.0, 0.0, 1]]}],
            }
        ),
        seal_document(
            {
                "calibration": "c1",
                "created": "now",
                "engines": [{"engine": "x", "count": 0, "latest": [[1.0, 0.0, 1]]}],
            }
        ),
        *(
            seal_document(
                {
                    "calibration": "c1",
                    "created": "now",
                    "engines": [{"engine": "x", "count": 1, "latest": [deviation]}],
                }
            )
            for deviation in ([1e200, 0.0, 1], [1.0, 0.0, 10**400])
        ),
    ],
)
def test_garbage_is_replaced_and_named(document: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Corrupted):
        Evidence.from_bytes(document)
    store = RamStore()
    store.put_report(*ADDRESS, document)
    with caplog.at_level(logging.WARNING):
        assert EvidencePool(store, BINDING, "a").exchange("c1", deviations(1)) == []
    assert "it is replaced" in caplog.text
    assert EvidencePool(store, BINDING, "b").exchange("c1", []) == deviations(1)


def test_an_edited_document_is_garbage() -> None:
    fields = json.loads(Evidence("c1", "now", (part("a"),)).to_bytes())
    fields["engines"][0]["count"] = 7
    with pytest.raises(Corrupted, match="digest"):
        Evidence.from_bytes(json.dumps(fields).encode())


def test_without_a_store_every_engine_goes_on_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Away(RamStore):
        def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
            raise Unavailable("no shard answers")

    with caplog.at_level(logging.WARNING):
        assert EvidencePool(Away(), BINDING, "a").exchange("c1", deviations(1)) == []
    assert "no shard answers" in caplog.text


def test_what_was_read_counts_although_writing_failed() -> None:
    class Full(RamStore):
        def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
            raise Unavailable("no shard took the report")

    store = Full()
    RamStore.put_report(store, *ADDRESS, Evidence("c1", "now", (part("other"),)).to_bytes())
    assert EvidencePool(store, BINDING, "a").exchange("c1", []) == [Deviation(0.1, 0.0)]


def test_the_document_is_bounded() -> None:
    store = RamStore()
    pool = EvidencePool(store, BINDING, "a")
    pool.exchange("c1", [Deviation(12.345678, 0.123456, 32)] * 10_000)
    full = tuple(part(f"{number:064}", 10_000) for number in range(ENGINES_MAX))
    found = Evidence.from_bytes(store.get_report(*ADDRESS) or b"")
    assert len(found.engines[0].latest) == DEVIATIONS_MAX
    assert found.engines[0].count == 10_000
    crowded = RamStore()
    crowded.put_report(*ADDRESS, Evidence("c1", "now", full).to_bytes())
    pool._store = crowded
    pool.exchange("c1", [])
    merged = Evidence.from_bytes(crowded.get_report(*ADDRESS) or b"")
    assert len(merged.engines) == ENGINES_MAX
    assert merged.engines[-1] == found.engines[0]
    assert full[0] not in merged.engines, "the one that was silent longest"
    assert full[1] in merged.engines
    assert len(merged.to_bytes()) < REPORT_BYTES_MAX // 4
    assert len(evidence_name(BINDING)) < NAME_CHARS_MAX


def test_an_engine_that_counts_backwards_adds_nothing() -> None:
    assert part("a", count=3).since(5) == []
    assert len(part("a", count=300).since(5)) == DEVIATIONS_MAX
    assert len(part("a", count=300).since(298)) == 2
