"""An engine blends what its report allows, and says why it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kintsugi.core.layout import Codec
from kintsugi.core.plan import Selection, make_trial
from kintsugi.core.report import Closing, Report, source_of
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import LocalEngine
from kintsugi.engine.scheduler.gate import StoreReports
from kintsugi.store.client.ram import RamStore
from tests.fakes.reports import edited, passing_report
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask,
    chunks_of,
    rag,
    ram_store,
)

pytestmark = pytest.mark.engine

TESTED: dict[str, object] = {"quality": "balanced", "report_poll_ms": 600_000}
"""Polled by hand, so that the tests wait for nothing."""
PASSED = Selection(0.3, SelectorName.HKVD, 2)


def report_of(engine: LocalEngine, **changes: Any) -> Report:
    return passing_report(engine.binding, [PASSED], **changes)


def publish(engine: LocalEngine, store: RamStore, document: bytes) -> None:
    store.put_report(engine.binding.model, engine.binding.report_name, document)
    engine.refresh_gate()


@pytest.fixture
def gated(engine_slot: EngineSlot) -> tuple[LocalEngine, RamStore, Rag]:
    engine = engine_slot.get("tiny-llama", TESTED)
    store = ram_store("tiny-llama")
    store._reports.clear()
    engine._scheduler.gate._read = StoreReports(store).read  # which remembers the reports of the last test
    engine.refresh_gate()
    chunks = chunks_of(120, 140, seed=31)
    for saved in engine.save(PREFIX, chunks, NAMESPACE):
        assert saved.accounting is not None
        assert saved.accounting["outcome"] == "saved", "storing chunks needs no evidence"
    return engine, store, rag(*chunks)


def asked(engine: LocalEngine, prompt: Rag, **changes: Any) -> dict[str, Any]:
    engine.reset_prefix_cache()
    return asked_again(engine, prompt, **changes)


def asked_again(engine: LocalEngine, prompt: Rag, **changes: Any) -> dict[str, Any]:
    params = dataclasses.replace(prompt.params(ratio=None), **changes)
    accounting = ask(engine, prompt.token_ids, params).accounting
    assert accounting is not None
    return accounting


def test_without_evidence_nothing_is_blended_until_there_is_some(
    gated: tuple[LocalEngine, RamStore, Rag],
) -> None:
    engine, store, prompt = gated
    declined = asked(engine, prompt)
    assert declined["outcome"] == "declined"
    assert declined["reason"].startswith("learning: prompts of 1 to 512 tokens with declared chunks: 0 of")
    publish(engine, store, report_of(engine).to_bytes())
    blended = asked(engine, prompt)
    assert (blended["outcome"], blended["ratio"], blended["selector"]) == ("blended", 0.3, "hkvd")
    behind_exact_chunk = len(prompt.token_ids) - prompt.spans[1].start
    full_width = blended["token_layers_computed"] / behind_exact_chunk
    assert full_width > 2, "the report's check layer counts, not the configuration's"


def test_a_trial_blends_whatever_the_report_allows_and_shares_nothing(
    gated: tuple[LocalEngine, RamStore, Rag],
) -> None:
    engine, _, prompt = gated
    trial = make_trial(Selection(0.0))
    blended = asked(engine, prompt, trial=trial)
    assert (blended["outcome"], blended["ratio"]) == ("blended", 0.0)
    assert asked_again(engine, prompt, trial=trial)["outcome"] == "blended", "not even the same trial"
    assert asked_again(engine, prompt)["outcome"] == "declined"


def test_a_ratio_below_the_minimum_is_refused(gated: tuple[LocalEngine, RamStore, Rag]) -> None:
    engine, store, prompt = gated
    publish(engine, store, report_of(engine).to_bytes())
    refused = asked(engine, prompt, ratio=0.2)
    assert refused["outcome"] == "declined"
    assert refused["reason"].startswith("BelowMinimum: ratio: 0.2 is below 0.3")
    assert asked(engine, prompt, ratio=0.31)["outcome"] == "blended"
    unknown = asked(engine, prompt, ratio=0.5, selector=SelectorName.RANDOM)
    assert unknown["reason"].startswith("selector_not_measured: ")


def test_a_closing_turns_blending_off(gated: tuple[LocalEngine, RamStore, Rag]) -> None:
    engine, store, prompt = gated
    report = report_of(engine)
    publish(engine, store, report.to_bytes())
    assert asked(engine, prompt)["outcome"] == "blended"
    (part,) = report.parts
    other = Closing("KL rose", "2026-01-02", source_of("another"))
    elsewhere = dataclasses.replace(part, closings=(other,))
    publish(engine, store, report.with_part(elsewhere, "2026-01-02T00:00:00+00:00").to_bytes())
    assert asked(engine, prompt)["outcome"] == "blended", "another namespace's closing"
    here = dataclasses.replace(part, closings=(Closing("KL rose", "2026-01-02"),))
    publish(engine, store, report.with_part(here, "2026-01-03T00:00:00+00:00").to_bytes())
    assert asked(engine, prompt)["reason"].startswith("drift: KL rose")
    publish(engine, store, report.to_bytes())
    assert asked(engine, prompt)["reason"].startswith("drift: "), "an older copy undoes nothing"


def test_chunks_in_another_codec_are_missed_where_evidence_counts(
    gated: tuple[LocalEngine, RamStore, Rag],
) -> None:
    engine, store, prompt = gated
    publish(engine, store, report_of(engine).to_bytes())
    for address, chunk in list(store._chunks.items()):
        lossy = dataclasses.replace(chunk.manifest, codec=Codec.INT8)
        store._chunks[address] = dataclasses.replace(chunk, manifest=lossy)
    assert asked(engine, prompt)["reason"].startswith("no_chunk_cached")
    store._chunks.clear()


def test_a_prompt_with_unmeasured_chunks_is_prefilled_unless_it_is_exact(
    gated: tuple[LocalEngine, RamStore, Rag],
) -> None:
    engine, store, prompt = gated
    publish(engine, store, report_of(engine, sizes=((10, 400),)).to_bytes())
    refused = asked(engine, prompt)
    assert refused["outcome"] == "declined"
    assert refused["reason"].startswith("unmeasured: chunks of about 130 tokens were hardly measured yet")
    assert refused["chunks_hit"] == 2
    assert asked(engine, prompt, ratio=1.0)["outcome"] == "blended"
    exact = dataclasses.replace(prompt, pieces=[prompt.pieces[0], ("gap", prompt.pieces[1][1])])
    assert asked(engine, exact)["outcome"] == "blended", "a first chunk alone is what full prefill computes"


def test_an_edited_report_counts_as_none(gated: tuple[LocalEngine, RamStore, Rag]) -> None:
    engine, store, prompt = gated
    publish(engine, store, edited(report_of(engine).to_bytes()))
    assert asked(engine, prompt)["reason"].startswith("learning: ")
