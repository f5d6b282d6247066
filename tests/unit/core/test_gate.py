"""What a stored report allows an engine's requests, and what is said about it."""

from __future__ import annotations

import dataclasses

import pytest

from kintsugi.core.documents import seal_document
from kintsugi.core.errors import BelowMinimum, NotBlendable
from kintsugi.core.evidence import Quality
from kintsugi.core.gate import (
    CLOSED,
    LEARNING,
    UNMEASURED,
    GateState,
    Permit,
    decide,
    summarize,
    widest,
)
from kintsugi.core.plan import Selection
from kintsugi.core.report import FILE, LADDER, Closing, Opening, Report, source_of
from kintsugi.core.request import BlendOptions, SelectorName
from tests.fakes.reports import (
    AT,
    BINDING,
    CELL,
    ENOUGH_PAIRS,
    SOURCE,
    VERSIONS,
    entry_of,
    open_report,
    part_of,
    report_of,
)

FALLBACK = Selection(0.15, SelectorName.HKVD)
QUERY = SelectorName.QUERY
NOTHING = BlendOptions()
CLOSING = Closing("the mean loss of served blends is above 0.125", "2026-01-02T00:00:00+00:00", SOURCE)


def state_of(report: Report, versions: str = VERSIONS) -> GateState:
    return decide(report.to_bytes(), BINDING, Quality.BALANCED, versions)


def permit(state: GateState, options: BlendOptions = NOTHING, namespace: str = "tenant") -> Permit:
    return state.permit(namespace, False, 1200, FALLBACK, options)


def refusal(state: GateState, namespace: str = "tenant") -> NotBlendable:
    with pytest.raises(NotBlendable) as caught:
        permit(state, namespace=namespace)
    return caught.value


# --- What a request may use


def test_the_cheapest_that_passed_is_used() -> None:
    found = permit(state_of(open_report(rungs=3)))
    assert found.selection == LADDER[2]
    assert found.allowance is not None
    assert found.allowance.selections == LADDER[:3]


def test_a_request_may_choose_what_passed_and_more() -> None:
    state = state_of(open_report(rungs=2))
    assert permit(state, BlendOptions(ratio=0.75)).selection == LADDER[0]
    assert permit(state, BlendOptions(ratio=0.5)).selection == dataclasses.replace(LADDER[1], ratio=0.5)
    assert permit(state, BlendOptions(ratio=0.4, selector=QUERY)).selection == LADDER[1]


def test_less_than_what_passed_is_refused_with_the_minimum_named() -> None:
    state = state_of(open_report(rungs=2))
    with pytest.raises(BelowMinimum, match=r"ratio: 0\.2 is below 0\.4, the lowest that passed for query"):
        permit(state, BlendOptions(ratio=0.2))


def test_a_selector_that_did_not_pass_is_refused_except_for_an_exact_ratio() -> None:
    state = state_of(open_report())
    with pytest.raises(
        NotBlendable, match=r"selector_not_measured: hkvd did not pass at any ratio; passed: query"
    ):
        permit(state, BlendOptions(ratio=0.9, selector=SelectorName.HKVD))
    assert permit(state, BlendOptions(ratio=1.0, selector=SelectorName.HKVD)).selection.ratio == 1.0


def test_where_nothing_is_tested_the_engines_own_configuration_is_used() -> None:
    state = GateState()
    assert permit(state) == Permit(FALLBACK)
    options = BlendOptions(ratio=0.0, selector=SelectorName.RANDOM)
    assert permit(state, options).selection == Selection(0.0, SelectorName.RANDOM)
    permit(state).check_chunks([7, 100_000])


def test_chunks_that_were_not_measured_are_refused() -> None:
    found = permit(state_of(open_report()))
    found.check_chunks([200] * 5)
    with pytest.raises(NotBlendable, match=f"{UNMEASURED}: chunks of about 2000 tokens were hardly measured"):
        found.check_chunks([2000] * 5)


# --- Why not


def test_a_namespace_without_evidence_learns_how_far_it_is() -> None:
    report = report_of(part_of(entry_of(pairs=20)))
    state = state_of(report)
    missing = report.standing(CELL, SOURCE, Quality.BALANCED).missing
    assert missing is not None
    cause = refusal(state)
    assert cause.reason == LEARNING
    expected = f"prompts of 513 to 2048 tokens with declared chunks: 20 of about {20 + missing} prompts"
    assert expected in str(cause)
    assert ": 0 of about " in str(refusal(state, "other"))
    lost = refusal(state_of(report_of(part_of(entry_of(pairs=40, loss=0.5)))))
    assert "40 prompts were measured, and the loss is 0.500: too much to pass" in str(lost)


def test_a_closed_namespace_learns_why_and_how_far_it_is() -> None:
    state = state_of(open_report().with_part(part_of(writer="watcher", closings=[CLOSING]), AT))
    cause = refusal(state)
    assert cause.reason == CLOSED
    assert f"{CLOSING.reason} (at {CLOSING.at}); prompts of 513 to 2048" in str(cause)
    assert refusal(state, "other").reason == LEARNING


def test_where_two_closed_together_all_are_closed_for_that_reason() -> None:
    closings = [dataclasses.replace(CLOSING, source=source_of(name)) for name in ("one", "two")]
    state = state_of(open_report().with_part(part_of(writer="watcher", closings=closings), AT))
    assert refusal(state).reason == CLOSED
    assert summarize(state).state == "closed"


# --- Documents


@pytest.mark.parametrize(
    ("document", "detail"),
    [
        (None, ""),
        (b"[]", "the document is not a JSON object"),
        (seal_document({"version": 2}), "a report of format 2; this build reads 3"),
    ],
)
def test_evidence_starts_anew_where_no_report_can_be_read(document: bytes | None, detail: str) -> None:
    state = decide(document, BINDING, Quality.BALANCED, VERSIONS)
    assert refusal(state).reason == LEARNING
    found = summarize(state)
    assert (found.state, found.pairs) == ("learning", 0)
    assert found.detail == "no prompt was measured yet" + (f"; {detail}" if detail else "")


def test_a_report_of_another_model_is_refused() -> None:
    other = dataclasses.replace(BINDING, fingerprint="ff" * 32)
    state = decide(open_report(binding=other).to_bytes(), BINDING, Quality.BALANCED, VERSIONS)
    cause = refusal(state)
    assert cause.reason == "report_of_another"
    assert "the report's fingerprint is ffffffffffffffff, not " in str(cause)
    assert summarize(state).state == "closed"


# --- Progress


def test_progress_of_what_is_open_is_given_in_numbers() -> None:
    report = open_report()
    opened = [Opening(CELL, SOURCE, LADDER[0], at) for at in ("2026-01-05", "2026-01-03")]
    part = dataclasses.replace(report.parts[0], openings=tuple(opened))
    found = summarize(state_of(dataclasses.replace(report, parts=(part,))))
    assert (found.state, found.pairs, found.since) == ("open", ENOUGH_PAIRS, "2026-01-03")
    assert (found.cost, found.loss, found.loss_max) == (0.5, 0.0, 0.25)
    assert (found.kl, found.changed) == (pytest.approx(0.001), 1 / 128)
    assert found.loss_upper is not None
    assert 0 < found.loss_upper < 0.25
    assert found.detail == (
        "prompts of 513 to 2048 tokens with declared chunks: at 50% of a full prefill's work, mean loss "
        "0.000 of at most 0.250; for a ratio of 0.4, 0 of about 32 prompts were measured"
    )
    assert found.pairs_missing is not None, "until the next configuration"
    lossy = entry_of(pairs=30, loss=0.5, selection=LADDER[1])
    found = summarize(state_of(report.with_part(part_of(lossy, writer="other"), AT)))
    assert found.detail.endswith(
        "; for a ratio of 0.4, 30 prompts were measured, and the loss is 0.500: too much to pass"
    )
    assert found.pairs_missing is None
    assert summarize(state_of(open_report(rungs=len(LADDER)))).pairs_missing is None


def test_progress_of_one_namespace_is_its_own() -> None:
    state = state_of(report_of(part_of(entry_of(), entry_of(source_of("slow"), 5, slot=2))))
    assert summarize(state).state == summarize(state, "tenant").state == "open"
    slow = summarize(state, "slow")
    assert (slow.state, slow.pairs) == ("learning", 5)
    assert summarize(state, "new").detail == "no prompt was measured yet"


def test_progress_while_learning_is_that_of_the_nearest() -> None:
    entries = [entry_of(source_of(str(pairs)), pairs, slot=pairs) for pairs in (3, 20, 9)]
    assert summarize(state_of(report_of(part_of(*entries)))).pairs == 20


def test_progress_is_off_where_nothing_is_tested_and_closed_with_a_reason() -> None:
    assert summarize(GateState()).state == "off"
    found = summarize(GateState("save_only", "this engine only saves chunks"))
    assert (found.state, found.detail) == ("closed", "save_only: this engine only saves chunks")


def test_probation_after_an_upgrade_is_said() -> None:
    upgraded = state_of(open_report(), "kintsugi 2")
    assert "of at most 0.250, on probation after an upgrade; for a" in summarize(upgraded).detail
    assert permit(upgraded).selection == LADDER[0], "the old evidence serves meanwhile"


def test_the_widest_is_what_costs_least() -> None:
    report = report_of(
        part_of(
            entry_of(FILE),
            *(entry_of(selection=one, slot=2) for one in LADDER[:2]),
        )
    )
    found = widest(state_of(report))
    assert found is not None
    assert (found[1], found[2].cheapest) == (SOURCE, LADDER[1])
    alone = widest(state_of(report), "other")
    assert alone is not None
    assert alone[2].cheapest == LADDER[0]
    assert widest(state_of(report_of())) is widest(GateState()) is widest(GateState("save_only")) is None
