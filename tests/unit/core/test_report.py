"""The calibration report: what follows from measurements, and which documents are refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from datetime import UTC, datetime

import pytest

from kintsugi.core.errors import Corrupted, InvalidField, VersionMismatch
from kintsugi.core.plan import Selection
from kintsugi.core.prompt import Domain, LengthRange
from kintsugi.core.report import (
    Binding,
    CalibrationReport,
    Choice,
    LossBound,
    Noise,
    Quantity,
    ReportEntry,
    Search,
    Thresholds,
    _digest,
    choose,
    describe_selection,
    entitlements,
    passing,
    replaces,
    shortfalls,
    supersedes,
)
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ModelFingerprint
from kintsugi.models.bundled import bundled_report

FINGERPRINT = ModelFingerprint.of({"weights": "report"})
BINDING = Binding.of(FINGERPRINT, (0,), "raw", "0.32.0", "0.1.0")
QUIET = Noise(0.0, 0.0, 1.0)
BARS = Thresholds(prompts_min=10)
HKVD, RANDOM = SelectorName.HKVD, SelectorName.RANDOM


DOMAIN = Domain("plain", LengthRange(100, 400), LengthRange(2, 4), LengthRange(20, 100), LengthRange(1, 8))
SEARCH = Search(40, 2, 1.5)


def entry(
    ratio: float = 0.15,
    selector: SelectorName = HKVD,
    check_layer: int = 1,
    place: int | None = 0,
    error: float = 1e-4,
    **changes: float | int | None,
) -> ReportEntry:
    """One that was confirmed and passes, but for the changes. Its bounds are its values."""
    values: dict[str, float | int | None] = {
        "cost": ratio,
        "kl_mean": 0.01,
        "kl_p99": 0.5,
        "top1_agreement": 0.99,
        "num_prompts": 50,
        "num_positions": 50,
        **changes,
    }
    losses = {Quantity.KL: values["kl_mean"], Quantity.DISAGREEMENT: 1 - (values["top1_agreement"] or 0)}
    bounds = [LossBound(quantity, "", loss or 0.0, loss or 0.0, 50) for quantity, loss in losses.items()]
    selection = Selection(ratio, selector, check_layer)
    confirmed = {} if place is None else {"place": place, "error": error, "bounds": bounds}
    return ReportEntry(selection, **values, **confirmed)  # type: ignore[arg-type]


def bounded(*bounds: LossBound, place: int = 0) -> ReportEntry:
    return dataclasses.replace(entry(), place=place, bounds=list(bounds))


def report(*entries: ReportEntry) -> CalibrationReport:
    return CalibrationReport.of(
        BINDING, "2026-01-02T03:04:05Z", "test", 7, QUIET, BARS, DOMAIN, SEARCH, entries
    )


@pytest.mark.parametrize(
    ("bound", "missing"),
    [
        (LossBound(Quantity.KL, "", 0.02, 0.1, 99), None),
        (LossBound(Quantity.KL, "", 0.02, 0.11, 99), "KL: 0.020 in 99 prompts, so up to 0.110"),
        (LossBound(Quantity.DISAGREEMENT, "", 0.0, 0.06, 40), "top-1 disagreement: 0.000 in 40"),
        (LossBound(Quantity.EXACT_MATCH, "", -0.01, 0.03, 99), None),
        (LossBound(Quantity.EXACT_MATCH, "", 0.0, 0.031, 99), "loss of exact match"),
        (LossBound(Quantity.F1, "", 0.0, 0.031, 99), "loss of F1"),
        (LossBound(Quantity.F1, "task chain", 0.01, 0.06, 60), None),
        (LossBound(Quantity.F1, "task chain", 0.01, 0.07, 60), "loss of F1 of task chain: 0.010 in 60"),
    ],
)
def test_a_bound_decides_not_the_mean(bound: LossBound, missing: str | None) -> None:
    found = shortfalls(bounded(bound), QUIET, BARS)
    assert [text.startswith(missing or "?") for text in found] == [True] * (missing is not None)


def test_nobody_is_asked_for_more_than_full_prefill_gives_against_itself() -> None:
    loud = Noise(kl_mean=0.2, kl_p99=4.0, top1_agreement=0.9)
    noisy = entry(kl_mean=0.3, top1_agreement=0.91)
    assert len(shortfalls(noisy, QUIET, BARS)) == 2
    assert shortfalls(noisy, loud, BARS) == []
    deaf = Noise(kl_mean=3.0, kl_p99=9.0, top1_agreement=0.0)
    assert BARS.highest(Quantity.KL, "", deaf) == BARS.highest(Quantity.DISAGREEMENT, "task", deaf) == 0.5


def test_the_cheapest_passing_configuration_is_chosen() -> None:
    entries = [entry(0.3), entry(0.15), entry(0.05, kl_mean=1.0), entry(0.2, RANDOM, kl_mean=1.0)]
    choice = choose(entries, QUIET, BARS)
    assert choice.selection == Selection(0.15, HKVD)
    assert {name: limit.ratio for name, limit in choice.limits.items()} == {"hkvd": 0.15}
    assert choice.why == "cheapest of 2 that pass, of 4 confirmed: cost 0.150"


def test_more_ratio_is_not_taken_to_be_better() -> None:
    """A larger ratio that fails says nothing about a smaller one with evidence of its own, nor the
    reverse."""
    entries = [entry(0.05), entry(0.1, kl_mean=1.0), entry(0.2)]
    assert choose(entries, QUIET, BARS).selection == Selection(0.05, HKVD)
    assert choose(entries[1:2], QUIET, BARS).limits == {}


def test_what_was_only_screened_neither_passes_nor_fails() -> None:
    screened = [entry(0.05, place=None), entry(0.15), entry(0.3, place=None, kl_mean=9.0)]
    assert choose(screened, QUIET, BARS).selection == Selection(0.15, HKVD)
    nothing = choose(screened[:1], QUIET, BARS)
    assert nothing == Choice(None, "none of 1 looked good enough to confirm")


def test_the_chance_of_error_is_shared_and_handed_on() -> None:
    whole = 1 - BARS.confidence
    assert entitlements([], 1, BARS) == [pytest.approx(whole)]
    assert entitlements([True, True, True], 4, BARS) == pytest.approx(
        [whole / 2, whole * 2 / 3, whole * 5 / 6, whole]
    )
    assert entitlements([False, True, False], 4, BARS) == pytest.approx(
        [whole / 2, whole / 6, whole / 3, whole / 6]
    )


def test_bounds_that_used_more_error_than_they_were_entitled_to_do_not_pass() -> None:
    whole = 1 - BARS.confidence
    first, second = entry(0.3, place=0, error=whole / 2), entry(0.2, place=1, error=whole)
    assert passing([second, first], QUIET, BARS) == [first, second]
    failing = entry(0.3, place=0, error=whole / 2, kl_mean=1.0)
    assert passing([failing, second], QUIET, BARS) == []
    assert passing([failing, dataclasses.replace(second, error=whole / 2)], QUIET, BARS) != []


def test_what_costs_a_full_prefill_is_no_choice() -> None:
    choice = choose([entry(1.0, cost=1.0)], QUIET, BARS)
    assert choice.selection is None
    assert "cost 1.000" in choice.why


def test_an_undecided_configuration_says_how_much_more_it_takes() -> None:
    undecided = dataclasses.replace(entry(kl_mean=0.2), prompts_missing=120)
    assert "undecided: about 120 more prompts" in choose([undecided], QUIET, BARS).why


def test_ties_are_broken_by_quality_then_name() -> None:
    first = choose([entry(0.15), entry(0.15, RANDOM, kl_mean=0.001)], QUIET, BARS)
    assert first.selection == Selection(0.15, RANDOM)
    entries = [entry(0.15), entry(0.15, RANDOM)]
    assert choose(entries, QUIET, BARS) == choose(entries[::-1], QUIET, BARS)


def test_every_small_set_of_measurements_is_decided_as_stated() -> None:
    """All 3^6 outcomes of two selectors at three ratios: screened, failing, passing."""
    points = [(selector, ratio) for selector in (HKVD, RANDOM) for ratio in (0.05, 0.15, 0.3)]
    for outcome in itertools.product((None, False, True), repeat=len(points)):
        entries = [
            entry(ratio, selector, place=None if passes is None else 0, kl_mean=0.01 if passes else 1.0)
            for (selector, ratio), passes in zip(points, outcome, strict=True)
        ]
        choice = choose(entries, QUIET, BARS)
        passed = [point for point, passes in zip(points, outcome, strict=True) if passes]
        least = {selector.value: min(r for s, r in passed if s is selector) for selector, _ in passed}
        assert {name: limit.ratio for name, limit in choice.limits.items()} == least
        if passed:
            assert choice.selection is not None
            assert choice.selection.ratio == min(least.values())
        else:
            assert choice == Choice(None, choice.why)


def test_layers_are_described_as_a_range() -> None:
    described = {
        layers: describe_selection(Selection(0.1, HKVD, 1, layers)) for layers in ((0, 1, 2), (1, 3), (4,))
    }
    assert list(described.values()) == ["hkvd r=0.1 @1 q=0-2", "hkvd r=0.1 @1 q=1,3", "hkvd r=0.1 @1 q=4"]


def test_a_report_survives_the_way_to_a_store_and_back() -> None:
    first = report(entry(), entry(0.3, exact_match=0.9, exact_match_full=0.91))
    again = CalibrationReport.from_bytes(first.to_bytes())
    assert again == first
    assert again.digest == first.digest
    tripped = CalibrationReport.from_bytes(first.as_tripped("KL rose", "2026-02-03").to_bytes())
    assert tripped.tripped is not None
    assert tripped.digest != first.digest


@pytest.mark.parametrize(
    "edit",
    [
        lambda values: values["thresholds"].update(kl_mean_max=99.0),
        lambda values: values["entries"][0].update(kl_mean=0.0),
        lambda values: values["entries"][0]["bounds"][0].update(upper=0.0),
        lambda values: values["domain"]["prompt_tokens"].update(high=9000),
        lambda values: values["binding"].update(fingerprint="00" * 32),
        lambda values: values["choice"]["selection"].update(ratio=0.01),
        lambda values: values.update(tripped={"reason": "", "at": ""}),
        lambda values: values.pop("digest"),
        lambda values: values.pop("noise"),
        lambda values: values.update(extra=1),
        lambda values: values["entries"][0].update(cost=float("nan")),
    ],
)
def test_an_edited_report_is_refused(edit: object) -> None:
    values = json.loads(report(entry()).to_bytes())
    edit(values)  # type: ignore[operator]
    with pytest.raises(Corrupted, match="calibrate again"):
        CalibrationReport.from_bytes(json.dumps(values).encode())


def test_a_choice_that_does_not_follow_is_refused_with_a_digest_too() -> None:
    honest = report(entry(0.3), entry(0.1, kl_mean=3.0))
    forged = dataclasses.replace(honest, choice=Choice(Selection(0.1, HKVD), "because"))
    with pytest.raises(Corrupted, match="does not follow"):
        CalibrationReport.from_bytes(forged.to_bytes())


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_what_is_no_report_is_refused(document: bytes) -> None:
    with pytest.raises(Corrupted):
        CalibrationReport.from_bytes(document)


def made(created: str, tripped: str | None = None, **fields: object) -> bytes:
    """A report, with fields that only later builds know."""
    one = dataclasses.replace(report(entry()), created=created)
    values = dataclasses.asdict(one if tripped is None else one.as_tripped(tripped, "now"))
    values |= fields
    return json.dumps({**values, "digest": _digest(values)}).encode()


EDITED = made("2027-01-01").replace(b'"seed": 7', b'"seed": 8')
IN_ORDER = [
    [b"", b"[" * 100_000, b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", b"\xff", b" " * (2 << 20), EDITED],
    [made("now"), made("9999-12-31T23:59:59+00:00"), made("0001-01-01T00:00:00+14:00"), made("", seed=8)],
    [made("now", "KL"), made("9999-12-31T23:59:59Z", "top-1")],
    [made("2026-01-01T00:00:00"), made("2026-01-01T00:00:00Z"), made("2026-01-01T02:00:00+02:00")],
    [made("2026-01-01T00:00:00Z", "KL"), made("2026-01-01T00:00:00Z", "top-1")],
    [made("2026-01-01T00:30:00Z")],
    [made("2026-01-01T00:00:00-01:00"), made("2026-01-01T01:00:00Z", version=3, later_field=1)],
    [made("2026-01-01T01:00:00Z", "KL")],
]
"""Documents by created and tripped, lowest first; within a group the digest decides, if there is one."""


def test_which_of_two_reports_counts() -> None:
    for low, high in itertools.combinations(range(len(IN_ORDER)), 2):
        for one, other in itertools.product(IN_ORDER[low], IN_ORDER[high]):
            assert supersedes(other, one)
            assert not supersedes(one, other)
    for unsound, other in itertools.product(IN_ORDER[0], repeat=2):
        assert not supersedes(unsound, other), "the last one written"
    for group in IN_ORDER[1:]:
        for one, other in itertools.combinations(group, 2):
            assert supersedes(one, other) != supersedes(other, one), "everybody keeps the same one"
    assert all(supersedes(document, None) for group in IN_ORDER for document in group)


def test_a_new_calibration_is_above_whatever_is_stored() -> None:
    for stored in itertools.chain(*IN_ORDER):
        for created in ("2026-01-01T00:00:00Z", "2025-01-01T00:00:00Z", "no time"):
            behind = dataclasses.replace(report(entry()), created=created)
            assert supersedes(behind.created_after(stored).to_bytes(), stored)
    ahead = report(entry())
    assert ahead.created_after(IN_ORDER[-1][0]) == ahead, "its own time where that is later"


def test_the_bundled_report_opens() -> None:
    """Bytes as a store holds them: a field more or less and they would be refused."""
    document = bundled_report().read_bytes()
    assert CalibrationReport.from_bytes(document).to_bytes() == document


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_told_apart(version: int) -> None:
    values = json.loads(report(entry()).to_bytes())
    values["version"] = version
    with pytest.raises(VersionMismatch, match=f"format {version}; this build reads 2: calibrate again"):
        CalibrationReport.from_bytes(json.dumps(values).encode())


def test_a_binding_names_its_report_and_what_differs() -> None:
    others = [
        Binding.of(ModelFingerprint.of({"weights": "other"}), (0,), "raw", "0.32.0", "0.1.0"),
        Binding.of(FINGERPRINT, (0, 1), "raw", "0.32.0", "0.1.0"),
        Binding.of(FINGERPRINT, (0,), "int8", "0.32.0", "0.1.0"),
        Binding.of(FINGERPRINT, (0,), "raw", "0.33.0", "0.1.0"),
        Binding.of(FINGERPRINT, (0,), "raw", "0.32.0", "0.2.0"),
    ]
    for name, other in zip(("fingerprint", "prefix", "codec", "vllm", "kintsugi"), others, strict=True):
        difference = BINDING.difference(other)
        assert difference is not None
        assert difference.startswith(name)
        assert (other.model, other.report_name) != (BINDING.model, BINDING.report_name)
    assert BINDING.difference(BINDING) is None
    assert len(BINDING.report_name) <= 128
    assert BINDING.model == FINGERPRINT


@pytest.mark.parametrize(
    "build",
    [
        lambda: Selection(1.1, HKVD),
        lambda: Selection(0.1, HKVD, -1),
        lambda: Thresholds(top1_agreement_min=1.1),
        lambda: Thresholds(kl_mean_max=0.0),
        lambda: Thresholds(prompts_min=0),
        lambda: Thresholds(exact_match_loss_max=0.0),
        lambda: Thresholds(confidence=1.0),
        lambda: Thresholds(stratum_factor=0.5),
        lambda: LengthRange(5, 4),
        lambda: bounded(),
        lambda: entry(num_prompts=0),
        lambda: entry(kl_p99=float("inf")),
    ],
)
def test_impossible_values_are_refused(build: object) -> None:
    with pytest.raises(InvalidField):
        build()  # type: ignore[operator]


def test_a_context_is_part_of_the_binding_and_of_the_reports_name() -> None:
    with_context = Binding.of(FINGERPRINT, (0,), "raw", "0.32.0", "0.1.0", (4, 5))
    other = Binding.of(FINGERPRINT, (0,), "raw", "0.32.0", "0.1.0", (4, 6))
    names = {BINDING.report_name, with_context.report_name, other.report_name}
    assert len(names) == 3
    assert BINDING.difference(with_context) == f"context is {with_context.context[:16]}, not none"
    assert with_context.difference(BINDING) == f"context is none, not {with_context.context[:16]}"
    document = dataclasses.replace(report(entry()), binding=with_context).to_bytes()
    assert CalibrationReport.from_bytes(document).binding == with_context


def test_without_a_context_name_and_document_are_as_before() -> None:
    assert BINDING.report_name == "calibration/raw/03f79bf01f1b022ca63c907c5e471678/76d4e78c7ec55c4f"
    assert "context" not in json.loads(report(entry()).to_bytes())["binding"]


NOW = datetime(2026, 6, 1, tzinfo=UTC)


def test_a_report_from_the_future_never_keeps_a_later_calibration_out() -> None:
    today, tomorrow = made("2026-06-01"), made("2026-06-01T23:00:00+00:00")
    assert replaces(tomorrow, today, NOW)
    assert not replaces(today, tomorrow, NOW)
    future = "2026-06-02T00:00:01+00:00"
    with pytest.raises(InvalidField, match=r"created: 2026-06-02T00:00:01.*set the clock that is wrong"):
        replaces(made(future), None, NOW)
    assert replaces(made(future, "KL"), today, NOW), "nothing keeps blending from being turned off"
    for held in (made(future), made(future, "KL"), made("9999-01-01")):
        assert replaces(today, held, NOW)
    assert replaces(b"no report", None, NOW)
    assert not replaces(b"no report", today, NOW)
