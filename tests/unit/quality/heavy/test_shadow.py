"""Shadowing: who is sampled, what is compared, what trips, who hears of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.gate import decide
from kintsugi.core.plan import Selection
from kintsugi.core.report import CalibrationReport, Thresholds
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, ModelFingerprint, Span
from kintsugi.engine.local import Prompt
from kintsugi.quality import shadow as shadowing
from kintsugi.quality.evidence import evidence_name
from kintsugi.quality.reports import fetch_report, publish, trip
from kintsugi.quality.shadow import EXCHANGE_S, Shadow, ShadowConfig, compare_generations, count_positions
from kintsugi.store.client.ram import RamStore
from tests.unit.core.test_report import BINDING, DOMAIN, QUIET, SEARCH, entry
from tests.unit.quality.fakes import FakeEngine, answer, baseline_of, good_report, put_chunk

EVERYTHING = ShadowConfig(share=1.0)
BLENDED = {"outcome": "blended"}


@pytest.fixture
def store() -> RamStore:
    store = RamStore()
    publish(store, good_report())
    return store


def prompt(number: int) -> Prompt:
    return Prompt([0, 1, 2, number], KintsugiParams("acme"), max_tokens=3)


def serve(shadow: Shadow, engine: FakeEngine, numbers: range) -> None:
    """As a serving layer does: mark, answer, hand in, shadow when there is time."""
    for number in numbers:
        marked = shadow.prepare_prompt(f"request-{number}", prompt(number))
        (generation,) = engine.generate([marked])
        shadow.take(marked, generation)
        shadow.run_pending()


def test_only_sampled_blends_ask_for_logprobs() -> None:
    shadow = Shadow(FakeEngine(), RamStore(), BINDING, EVERYTHING)
    assert shadow.prepare_prompt("a", prompt(1)).top_logprobs == 20
    assert shadow.prepare_prompt("a", Prompt([1])).top_logprobs == 0
    nobody = Shadow(FakeEngine(), RamStore(), BINDING, ShadowConfig(share=0.0))
    assert nobody.prepare_prompt("a", prompt(1)) == prompt(1)


def test_answers_that_were_not_blended_are_not_shadowed() -> None:
    shadow = Shadow(FakeEngine(), RamStore(), BINDING, EVERYTHING)
    marked = shadow.prepare_prompt("a", prompt(1))
    assert shadow.take(marked, answer(5, 0.9, BLENDED))
    assert not shadow.take(marked, answer(5, 0.9, {"outcome": "declined"}))
    assert not shadow.take(marked, answer(5, 0.9, None))
    assert not shadow.take(prompt(1), answer(5, 0.9, BLENDED)), "it was not sampled"


def test_one_tenant_does_not_decide_what_is_compared() -> None:
    shadow = Shadow(FakeEngine(), RamStore(), BINDING, ShadowConfig(share=0.1))
    taken: Counter[str] = Counter()
    for number in range(5000):
        namespace = "small" if number % 10 == 0 else "large"
        marked = shadow.prepare_prompt(f"r{number}", Prompt([0, 1, number], KintsugiParams(namespace)))
        taken[namespace] += shadow.take(marked, answer(5, 0.9, BLENDED))
    assert 400 < taken.total() < 600
    assert 0.7 < taken["large"] / taken["small"] < 1.4


def test_a_comparison_by_hand() -> None:
    same = compare_generations(answer(5, 0.9, None), answer(5, 0.9, None))
    assert (same.kl, same.disagreement) == (0.0, 0.0)
    other = compare_generations(answer(5, 0.9, None), answer(4, 0.9, None))
    assert other.kl > 3
    assert other.disagreement == 1.0


def test_what_stands_behind_different_tokens_is_not_compared() -> None:
    three = Prompt([0], max_tokens=3)
    blend, full = answer(5, 0.9, BLENDED, three), answer(5, 0.9, None, three)
    assert compare_generations(full, blend).positions == 3
    assert compare_generations(dataclasses.replace(full, token_ids=[5, 4, 5]), blend).positions == 2
    assert compare_generations(dataclasses.replace(full, token_ids=[4, 5, 5]), blend).positions == 1


def test_the_shadow_is_a_full_prefill_along_the_answer() -> None:
    engine = FakeEngine()
    shadow = Shadow(engine, RamStore(), BINDING, ShadowConfig(share=1.0, positions=2))
    shadow.take(shadow.prepare_prompt("a", prompt(1)), answer(5, 0.9, BLENDED, prompt(1)))
    assert shadow.run_pending() == 1
    (full,) = engine.submitted
    assert full.cache_salt == "acme"
    assert (full.params, full.forced, full.max_tokens) == (None, (5, 5), 2)
    assert shadow.run_pending() == 0


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowing, "PENDING_MAX", 2)
    shadow = Shadow(FakeEngine(), RamStore(), BINDING, EVERYTHING)
    for number in range(5):
        shadow.take(shadow.prepare_prompt(f"r{number}", prompt(number)), answer(5, 0.9, BLENDED))
    assert shadow.counts.dropped == 3
    assert shadow.run_pending(10) == 2


def test_good_blends_never_trip(store: RamStore) -> None:
    engine = FakeEngine()
    shadow = Shadow(engine, store, BINDING, EVERYTHING)
    serve(shadow, engine, range(300))
    assert (shadow.counts.compared, shadow.counts.trips, shadow.counts.disagreed) == (300, 0, 0)


def test_a_drift_trips_blending_off_for_all_and_a_new_calibration_ends_it(store: RamStore) -> None:
    engine = FakeEngine()
    registry = CollectorRegistry()
    shadow = Shadow(engine, store, BINDING, EVERYTHING, now=lambda: "2026-01-01", registry=registry)
    engine.plan_with(Selection(0.01))
    engine.right_from = lambda selection, index: False
    serve(shadow, engine, range(20))
    assert shadow.counts.trips == 1
    assert registry.get_sample_value("kintsugi_shadow_trips_total") == 1
    assert registry.get_sample_value("kintsugi_shadow_disagreed_total") == shadow.counts.disagreed
    report = fetch_report(store, BINDING)
    assert report is not None
    assert report.tripped is not None
    document = store.get_report(BINDING.model, BINDING.report_name)
    state = decide(document, BINDING)
    assert state.reason == "drift"
    assert "KL" in state.detail
    publish(store, good_report())
    assert decide(store.get_report(BINDING.model, BINDING.report_name), BINDING).is_open
    serve(shadow, engine, range(100, 120))
    assert shadow.counts.trips == 2, "the watch starts anew with the new report"


def test_without_a_report_nothing_is_judged() -> None:
    engine = FakeEngine()
    engine.right_from = lambda selection, index: False
    shadow = Shadow(engine, RamStore(), BINDING, EVERYTHING)
    serve(shadow, engine, range(30))
    assert (shadow.counts.compared, shadow.counts.trips) == (30, 0)


def test_only_the_report_that_was_judged_is_tripped(store: RamStore) -> None:
    judged = fetch_report(store, BINDING)
    assert judged is not None
    newer = CalibrationReport.of(
        BINDING, "2026-01-02T00:00:00+00:00", "test", 2, QUIET, Thresholds(), DOMAIN, SEARCH, [entry()]
    )
    publish(store, newer)
    assert not trip(store, judged, "KL", "now")
    assert fetch_report(store, BINDING) == newer
    assert trip(store, newer, "KL", "now")
    assert trip(store, newer, "again", "later"), "off is off"
    tripped = fetch_report(store, BINDING)
    assert tripped is not None
    assert tripped.tripped is not None
    assert tripped.tripped.reason == "KL"


def test_a_calibration_counts_although_its_clock_is_behind(store: RamStore) -> None:
    judged = good_report()
    assert trip(store, judged, "KL", "now")
    behind = dataclasses.replace(judged, created="2025-12-31T23:59:59+00:00")
    publish(store, behind)
    assert fetch_report(store, BINDING) == dataclasses.replace(judged, created="2026-01-01T00:00:01+00:00")


def test_a_calibration_follows_one_that_a_wrong_clock_dated_ahead() -> None:
    store, ahead = RamStore(), dataclasses.replace(good_report(), created="9998-01-01T00:00:00+00:00")
    assert trip(store, ahead, "drift", "2026-01-01")
    publish(store, good_report())
    assert fetch_report(store, good_report().binding) == good_report()
    with pytest.raises(InvalidField, match="more than a day ahead"):
        publish(store, ahead)
    assert fetch_report(store, good_report().binding) == good_report()


def test_a_calibration_made_between_judging_and_tripping_stays(store: RamStore) -> None:
    """The store decides: reading first would leave a moment in which the new calibration is overwritten."""

    class Overtaken(RamStore):
        def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
            super().put_report(fingerprint, name, newer.to_bytes())
            super().put_report(fingerprint, name, document)

    newer = dataclasses.replace(good_report(), created="2026-01-02T00:00:00+00:00")
    overtaken = Overtaken()
    assert not trip(overtaken, good_report(), "KL", "now")
    assert fetch_report(overtaken, BINDING) == newer


def test_a_report_that_is_away_is_tripped_all_the_same() -> None:
    """The shards that hold it do not answer just now."""
    left = RamStore()
    assert trip(left, good_report(), "KL", "now")
    found = fetch_report(left, BINDING)
    assert found is not None
    assert found.tripped is not None


@pytest.mark.parametrize("values", [{"share": 1.1}, {"share": -0.1}, {"positions": 0}, {"per_minute": -1.0}])
def test_impossible_settings_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InvalidField):
        ShadowConfig(**values)  # type: ignore[arg-type]


def test_as_many_positions_are_compared_as_calibration_measured(store: RamStore) -> None:
    """The answer has five tokens, and the last one ends it."""
    engine, answered = FakeEngine(), Prompt([0, 1, 2, 3], KintsugiParams("acme"), max_tokens=5)
    ended = dataclasses.replace(answer(5, 0.9, BLENDED, answered), finish_reason="stop")
    for measured, forced in ((2, 2), (32, 4), (1, None)):
        publish(store, with_baseline(measured))
        shadow = Shadow(engine, store, BINDING, EVERYTHING)
        shadow.take(shadow.prepare_prompt("a", answered), ended)
        assert shadow.run_pending() == 1
        full = engine.submitted[-1]
        assert full.forced == (None if forced is None else (5,) * forced)
        assert full.max_tokens == (forced or 1)


def test_the_end_of_an_answer_counts_only_where_it_is_all_there_is() -> None:
    whole = answer(5, 0.9, BLENDED, Prompt([0], max_tokens=3))
    ended = dataclasses.replace(whole, finish_reason="stop")
    only = dataclasses.replace(answer(5, 0.9, BLENDED), finish_reason="stop")
    assert [count_positions(one, 32) for one in (whole, ended, only)] == [3, 2, 1]
    assert count_positions(whole, 2) == 2


AUDITED = [(number, number) for number in range(10, 16)]
"""Chunks of two tokens."""


def shadow_chunks(shadow: Shadow, chunks: Sequence[tuple[int, ...]]) -> None:
    """Shadow a blend of these chunks."""
    token_ids = [0, *(token for chunk in chunks for token in chunk), 7]
    spans = tuple(Span(1 + 2 * n, 3 + 2 * n) for n in range(len(chunks)))
    marked = shadow.prepare_prompt("a", Prompt(token_ids, KintsugiParams("acme", spans=spans)))
    assert shadow.take(marked, answer(5, 0.99, BLENDED))
    assert shadow.run_pending() == 1


@pytest.fixture
def engine(store: RamStore) -> FakeEngine:
    engine = FakeEngine()
    for chunk in AUDITED:
        put_chunk(store, engine.space("acme"), chunk)
    return engine


def test_one_chunk_of_each_shadowed_request_is_audited(store: RamStore, engine: FakeEngine) -> None:
    registry = CollectorRegistry()
    shadow = Shadow(engine, store, BINDING, EVERYTHING, registry=registry)
    for _ in range(40):
        shadow_chunks(shadow, AUDITED)
    assert (shadow.counts.audited, shadow.counts.damaged, shadow.counts.trips) == (40, 0, 0)
    assert registry.get_sample_value("kintsugi_shadow_audited_total") == 40
    assert registry.get_sample_value("kintsugi_shadow_damaged_total") == 0
    audited = Counter(tuple(one.token_ids[1:-1]) for one in engine.audited)
    assert set(audited) == set(AUDITED), "each of them some time"
    assert all(one.params is not None and one.params.namespace == "acme" for one in engine.audited)


def test_a_damaged_chunk_is_dropped_and_a_second_one_trips_the_report(
    store: RamStore, engine: FakeEngine
) -> None:
    damaged = AUDITED[:2]
    engine.error_of = lambda token_ids: float(token_ids in damaged)
    registry = CollectorRegistry()
    shadow = Shadow(engine, store, BINDING, EVERYTHING, registry=registry)
    keys = [ChunkKey.of(engine.space("acme"), chunk) for chunk in AUDITED]
    shadow_chunks(shadow, AUDITED[:1])
    assert [manifest is None for manifest in store.lookup("acme", keys)] == [True] + 5 * [False]
    shadow_chunks(shadow, AUDITED[:1])
    assert (shadow.counts.audited, shadow.counts.trips) == (1, 0), "it is a miss now"
    shadow_chunks(shadow, AUDITED[2:3])
    shadow_chunks(shadow, AUDITED[1:2])
    assert (shadow.counts.audited, shadow.counts.damaged, shadow.counts.trips) == (3, 2, 1)
    assert registry.get_sample_value("kintsugi_shadow_damaged_total") == 2
    report = fetch_report(store, BINDING)
    assert report is not None
    assert report.tripped is not None
    assert "2 of the latest 3 audited chunks differ from what this model computes" in report.tripped.reason
    assert "the values of layer 1 are off by 100%" in report.tripped.reason


def test_after_a_trip_no_chunk_is_dropped_any_more(store: RamStore, engine: FakeEngine) -> None:
    """To an engine that computes wrongly, every chunk is damaged."""
    engine.error_of = lambda token_ids: 1.0
    shadow = Shadow(engine, store, BINDING, EVERYTHING)
    for chunk in AUDITED:
        shadow_chunks(shadow, [chunk])
    assert (shadow.counts.damaged, store.stats().chunks) == (2, len(AUDITED) - 2)
    publish(store, good_report())
    shadow_chunks(shadow, AUDITED[4:5])
    assert (shadow.counts.damaged, shadow.counts.trips) == (3, 1), "a new report, and a new count"


def test_one_damaged_chunk_that_comes_back_is_no_trip(store: RamStore, engine: FakeEngine) -> None:
    engine.error_of = lambda token_ids: 1.0
    shadow = Shadow(engine, store, BINDING, EVERYTHING)
    for _ in range(5):
        put_chunk(store, engine.space("acme"), AUDITED[0])
        shadow_chunks(shadow, AUDITED[:1])
    assert (shadow.counts.damaged, shadow.counts.trips) == (5, 0)


def test_an_audit_that_fails_costs_no_comparison(
    store: RamStore, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(RamStore):
        def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
            raise Unavailable("a shard is away")

    def never(token_ids: tuple[int, ...]) -> float:
        raise Unavailable("the engine is busy")

    stubborn = Stubborn()
    publish(stubborn, good_report())
    for chunk in AUDITED:
        put_chunk(stubborn, engine.space("acme"), chunk)
    shadow = Shadow(engine, stubborn, BINDING, EVERYTHING)
    engine.error_of = never
    shadow_chunks(shadow, AUDITED[:1])
    assert (shadow.counts.compared, shadow.counts.audited) == (1, 0)
    engine.error_of = lambda token_ids: 1.0
    for chunk in AUDITED[:2]:
        shadow_chunks(shadow, [chunk])
    assert (shadow.counts.compared, shadow.counts.damaged, shadow.counts.trips) == (3, 2, 1)
    assert "may still be stored" in caplog.text


def test_chunks_of_other_namespaces_are_not_audited(store: RamStore, engine: FakeEngine) -> None:
    put_chunk(store, engine.space("other"), (30, 30))
    shadow = Shadow(engine, store, BINDING, EVERYTHING)
    shadow_chunks(shadow, [(30, 30)])
    assert (shadow.counts.compared, shadow.counts.audited, engine.audited) == (1, 0, [])


def test_without_a_report_no_chunk_is_audited(engine: FakeEngine, store: RamStore) -> None:
    unjudged = RamStore()
    put_chunk(unjudged, engine.space("acme"), AUDITED[0])
    shadow = Shadow(engine, unjudged, BINDING, EVERYTHING)
    shadow_chunks(shadow, AUDITED[:1])
    assert (shadow.counts.compared, engine.audited) == (1, [])


def with_baseline(positions: int, created: str = "2026-01-03T00:00:00+00:00") -> CalibrationReport:
    return dataclasses.replace(good_report(), baseline=baseline_of(positions), created=created)


def test_engines_trip_on_what_they_saw_together() -> None:
    """None saw enough alone. One answer in three is wrong."""
    needed: dict[int, int] = {}
    for count in (1, 4):
        store = RamStore()
        publish(store, with_baseline(1))
        seconds = itertools.count(step=EXCHANGE_S)  # every look at the clock is an interval later
        engines = [FakeEngine() for _ in range(count)]
        shadows = [Shadow(engine, store, BINDING, EVERYTHING, clock=seconds.__next__) for engine in engines]
        for engine in engines:
            engine.right_from = lambda selection, index: index % 3 > 0
        while not any(shadow.counts.trips for shadow in shadows):
            number = sum(shadow.counts.compared for shadow in shadows)
            assert number < 100
            serve(shadows[number % count], engines[number % count], range(number, number + 1))
        needed[count] = max(shadow.counts.compared for shadow in shadows)
    assert needed[1] > 8
    assert needed[4] <= needed[1] // 4 + 1


def test_evidence_is_exchanged_at_intervals(store: RamStore) -> None:
    class Counting(RamStore):
        puts = 0

        def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
            self.puts += name == evidence_name(BINDING)
            super().put_report(fingerprint, name, document)

    counting = Counting()
    publish(counting, good_report())
    clock_s, engine = [0.0], FakeEngine()
    shadow = Shadow(engine, counting, BINDING, EVERYTHING, clock=lambda: clock_s[0])
    serve(shadow, engine, range(20))
    assert counting.puts == 1
    clock_s[0] = EXCHANGE_S
    serve(shadow, engine, range(20, 21))
    assert counting.puts == 2


def test_an_engine_that_restarts_knows_what_it_saw_before() -> None:
    store = RamStore()
    publish(store, with_baseline(1))
    trips = 0
    for number in range(30):
        engine = FakeEngine()
        engine.right_from = lambda selection, index: index % 3 > 0
        shadow = Shadow(engine, store, BINDING, EVERYTHING)
        serve(shadow, engine, range(number, number + 1))
        assert shadow.counts.compared == 1
        trips += shadow.counts.trips
    assert trips == 1


def test_the_effect_is_shown_beside_the_calibration(store: RamStore) -> None:
    publish(store, with_baseline(3))
    engine, registry = FakeEngine(), CollectorRegistry()
    shadow = Shadow(engine, store, BINDING, EVERYTHING, registry=registry)

    def value(name: str, which: str) -> float | None:
        return registry.get_sample_value(f"kintsugi_shadow_{name}", {"value": which})

    assert value("agreement", "mean") is None, "nothing is known yet"
    serve(shadow, engine, range(30))
    assert value("agreement", "mean") == value("agreement", "calibrated") == 1.0
    low, kl = value("agreement", "low"), value("kl", "high")
    assert low is not None
    assert 0.8 < low < 1.0
    assert kl is not None
    assert registry.get_sample_value("kintsugi_shadow_window") == 30
