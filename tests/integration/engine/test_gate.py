"""An engine blends what its calibration report allows, and says why it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kintsugi.core.layout import Codec
from kintsugi.core.plan import Selection
from kintsugi.core.prompt import Domain, LengthRange
from kintsugi.core.report import (
    CalibrationReport,
    LossBound,
    Noise,
    Quantity,
    ReportEntry,
    Search,
    Thresholds,
)
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import LocalEngine
from kintsugi.engine.scheduler.gate import StoreReports
from kintsugi.quality import reports
from kintsugi.store.client.ram import RamStore
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask_cold,
    chunks_of,
    rag,
    ram_store,
)

pytestmark = pytest.mark.engine

CLOSED: dict[str, object] = {"allow_uncalibrated": False, "report_poll_ms": 600_000}
"""Polled by hand, so that the tests wait for nothing."""


def passing_report(engine: LocalEngine) -> CalibrationReport:
    bounds = [LossBound(Quantity.KL, "", 0.01, 0.05, 40)]
    entry = ReportEntry(
        Selection(0.3, SelectorName.HKVD, 2), 0.6, 0.01, 0.1, 1.0, 40, 40, place=0, error=0.05, bounds=bounds
    )
    lengths = LengthRange(100, 400)
    domain = Domain("plain", lengths, LengthRange(1, 4), lengths, LengthRange(1, 8))
    search = Search(1, 1, 0.1)
    noise = Noise(0.0, 0.0, 1.0)
    return CalibrationReport.of(
        engine.binding, "2026-01-01", "test", 1, noise, Thresholds(), domain, search, [entry]
    )


def publish(engine: LocalEngine, store: RamStore, document: bytes) -> None:
    store.put_report(engine.binding.model, engine.binding.report_name, document)
    engine.refresh_gate()


@pytest.fixture
def gated(engine_slot: EngineSlot) -> tuple[LocalEngine, RamStore, Rag]:
    engine = engine_slot.get("tiny-llama", CLOSED)
    store = ram_store("tiny-llama")
    store._reports.clear()
    engine._scheduler.gate._read = StoreReports(store).read  # which remembers the reports of the last test
    engine.refresh_gate()
    chunks = chunks_of(120, 140, seed=31)
    for saved in engine.save(PREFIX, chunks, NAMESPACE):
        assert saved.accounting is not None
        assert saved.accounting["outcome"] == "saved", "storing chunks needs no calibration"
    return engine, store, rag(*chunks)


def asked(engine: LocalEngine, prompt: Rag, **changes: Any) -> dict[str, Any]:
    accounting = ask_cold(engine, prompt.token_ids, prompt.params(**{"ratio": None, **changes})).accounting
    assert accounting is not None
    return accounting


def test_without_a_report_nothing_is_blended_until_there_is_one(
    gated: tuple[LocalEngine, RamStore, Rag],
) -> None:
    engine, store, prompt = gated
    declined = asked(engine, prompt)
    assert declined["outcome"] == "declined"
    assert declined["reason"].startswith("not_calibrated: ")
    publish(engine, store, passing_report(engine).to_bytes())
    blended = asked(engine, prompt)
    assert (blended["outcome"], blended["ratio"], blended["selector"]) == ("blended", 0.3, "hkvd")
    behind_exact_chunk = len(prompt.token_ids) - prompt.spans[1].start
    full_width = blended["token_layers_computed"] / behind_exact_chunk
    assert full_width > 2, "the report's check layer counts, not the configuration's"


def test_a_ratio_below_the_minimum_is_refused(gated: tuple[LocalEngine, RamStore, Rag]) -> None:
    engine, store, prompt = gated
    publish(engine, store, passing_report(engine).to_bytes())
    refused = asked(engine, prompt, ratio=0.2)
    assert refused["outcome"] == "declined"
    assert refused["reason"].startswith("BelowMinimum: ratio: 0.2 is below 0.3")
    assert asked(engine, prompt, ratio=0.31)["outcome"] == "blended"
    unknown = asked(engine, prompt, ratio=0.5, selector=SelectorName.RANDOM)
    assert unknown["reason"].startswith("selector_not_calibrated: ")


def test_a_drift_trips_blending_off(gated: tuple[LocalEngine, RamStore, Rag]) -> None:
    engine, store, prompt = gated
    report = passing_report(engine)
    publish(engine, store, report.to_bytes())
    assert asked(engine, prompt)["outcome"] == "blended"
    publish(engine, store, report.as_tripped("KL rose", "now").to_bytes())
    assert asked(engine, prompt)["reason"].startswith("drift: KL rose")
    publish(engine, store, report.to_bytes())
    assert asked(engine, prompt)["reason"].startswith("drift: "), "an older copy undoes nothing"
    reports.publish(store, report)
    engine.refresh_gate()
    assert asked(engine, prompt)["outcome"] == "blended", "calibrated again"


def test_chunks_in_another_codec_are_missed_where_a_calibration_counts(
    gated: tuple[LocalEngine, RamStore, Rag],
) -> None:
    engine, store, prompt = gated
    publish(engine, store, passing_report(engine).to_bytes())
    for address, chunk in list(store._chunks.items()):
        lossy = dataclasses.replace(chunk.manifest, codec=Codec.INT8)
        store._chunks[address] = dataclasses.replace(chunk, manifest=lossy)
    assert asked(engine, prompt)["reason"].startswith("no_chunk_cached")
    store._chunks.clear()


def test_a_prompt_unlike_the_calibrated_ones_is_prefilled_unless_it_is_exact(
    gated: tuple[LocalEngine, RamStore, Rag],
) -> None:
    engine, store, prompt = gated
    report = passing_report(engine)
    shorter = dataclasses.replace(report.domain, prompt_tokens=LengthRange(50, 100))
    publish(engine, store, dataclasses.replace(report, domain=shorter).to_bytes())
    refused = asked(engine, prompt)
    assert refused["outcome"] == "declined"
    assert refused["reason"].startswith(
        f"outside_calibration: the prompt has {len(prompt.token_ids)} tokens, calibrated with 50 to 100"
    )
    assert refused["chunks_hit"] == 2
    assert asked(engine, prompt, ratio=1.0)["outcome"] == "blended"
    exact = dataclasses.replace(prompt, pieces=[prompt.pieces[0], ("gap", prompt.pieces[1][1])])
    assert asked(engine, exact)["outcome"] == "blended", "a first chunk alone is what full prefill computes"


def test_an_edited_report_and_another_models_are_refused(
    gated: tuple[LocalEngine, RamStore, Rag],
) -> None:
    engine, store, prompt = gated
    edited = passing_report(engine).to_bytes().replace(b'"ratio": 0.3', b'"ratio": 0.1')
    publish(engine, store, edited)
    assert asked(engine, prompt)["reason"].startswith("calibration_unreadable: ")
