"""The report: what passes by which evidence, how writers share it, and which documents are refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

import pytest

from kintsugi.core.documents import DOCUMENT_BYTES_MAX, seal_document
from kintsugi.core.errors import Corrupted, VersionMismatch
from kintsugi.core.evidence import EMPTY, Quality
from kintsugi.core.plan import Selection
from kintsugi.core.report import (
    CLOSED_TOGETHER,
    CLOSINGS_MAX,
    ERROR,
    FILE,
    LADDER,
    NAMESPACES_MIN,
    PARTS_MAX,
    PROBATION_PAIRS,
    Allowance,
    Binding,
    Cell,
    Closing,
    Report,
    ServedBlend,
    describe_selection,
    share_of_slot,
    source_of,
)
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ModelFingerprint
from tests.fakes.reports import (
    AT,
    BINDING,
    CELL,
    ENOUGH_PAIRS,
    FINGERPRINT,
    SAFEST,
    SOURCE,
    VERSIONS,
    entry_of,
    open_report,
    part_of,
    report_of,
    tally_of,
)

BALANCED = Quality.BALANCED
TENANTS = [source_of(f"tenant {number}") for number in range(8)]
FOREIGN = source_of("foreign")


def allowance(report: Report, source: str = SOURCE, versions: str = VERSIONS) -> Allowance | None:
    return report.allowance(CELL, source, BALANCED, versions)


def closing(source: str = "", number: int = 1) -> Closing:
    return Closing("wrong answers", f"2026-01-02T00:00:{number:02}+00:00", source)


def full_report() -> Report:
    """A report with a value in every field."""
    part = dataclasses.replace(
        part_of(entry_of(tally=tally_of(9, 0.5, answers=((0, 8), (1, 1)))), closings=[closing(SOURCE)]),
        latest=(ServedBlend(SOURCE, (0.25, 0.0, 0.0), (0.125, 0.02, 0.02)),),
        served=1,
        folded=("earlier",),
    )
    return report_of(part, part_of(entry_of(FOREIGN, slot=2), writer="other"))


# --- Documents


def test_a_report_survives_the_way_to_a_store_and_back() -> None:
    assert Report.from_bytes(full_report().to_bytes()) == full_report()
    assert Report.from_bytes(report_of().to_bytes()) == report_of()


@pytest.mark.parametrize(
    "edit",
    [
        lambda values: values["parts"][0]["entries"][0]["tally"]["losses"].clear(),
        lambda values: values["parts"][0]["closings"].clear(),
        lambda values: values["binding"].update(fingerprint="00" * 32),
        lambda values: values["ladder"].pop(0),
        lambda values: values.update(created="2027-01-01"),
        lambda values: values.pop("digest"),
        lambda values: values.update(extra=1),
    ],
)
def test_an_edited_report_is_refused_by_its_digest(edit: Callable[[dict[str, object]], object]) -> None:
    values = json.loads(full_report().to_bytes())
    edit(values)
    with pytest.raises(Corrupted, match="does not match its digest"):
        Report.from_bytes(json.dumps(values).encode())


@pytest.mark.parametrize(
    "edit",
    [
        lambda values: values["parts"][0]["entries"][0].update(slot=0),
        lambda values: values["parts"][0]["entries"][0].update(source=""),
        lambda values: values["parts"][0]["entries"][0].update(epoch=-1),
        lambda values: values["parts"][0]["entries"][0]["cell"].update(band=5),
        lambda values: values["parts"][0].update(closings=values["parts"][0]["closings"] * CLOSINGS_MAX * 2),
        lambda values: values["parts"][0]["entries"][0]["tally"].update(answers=[[2, 1]]),
        lambda values: values["parts"][0]["entries"][0]["tally"].update(losses=[[1, 0]]),
        lambda values: values["parts"][0]["entries"][0]["tally"].update(sizes=[[33, 1]]),
        lambda values: values["parts"][0]["entries"][0]["tally"].update(kl=-1.0),
        lambda values: values["parts"][0]["entries"][0]["tally"].update(losses=[[999, 1]]),
        lambda values: values["parts"][0]["entries"][0]["cell"].update(kind="guessed"),
        lambda values: values["parts"][0].update(writer=""),
        lambda values: values.update(parts=values["parts"] * PARTS_MAX),
        lambda values: values.update(ladder=[]),
        lambda values: values.update(extra=1),
        lambda values: values.pop("binding"),
    ],
)
def test_impossible_content_is_refused_with_a_right_digest_too(
    edit: Callable[[dict[str, object]], object],
) -> None:
    values = json.loads(full_report().to_bytes())
    del values["digest"]
    edit(values)
    with pytest.raises(Corrupted, match="the report is invalid: "):
        Report.from_bytes(seal_document(values))


def test_what_is_too_large_is_not_parsed() -> None:
    with pytest.raises(Corrupted, match="at most 1048576 are read"):
        Report.from_bytes(b" " * (DOCUMENT_BYTES_MAX + 1))


@pytest.mark.parametrize("version", [2, 4, None])
def test_another_format_is_told_apart(version: int | None) -> None:
    document = seal_document({"version": version, "created": AT})
    with pytest.raises(VersionMismatch, match=f"a report of format {version}; this build reads 3"):
        Report.from_bytes(document)


def test_a_binding_names_its_report_and_what_differs() -> None:
    others = {
        "fingerprint": Binding.of(ModelFingerprint.of({"weights": "other"}), (0,), "raw"),
        "prefix": Binding.of(FINGERPRINT, (0, 1), "raw"),
        "codec": Binding.of(FINGERPRINT, (0,), "int8"),
        "context": Binding.of(FINGERPRINT, (0,), "raw", (4, 5)),
        "algorithm": dataclasses.replace(BINDING, algorithm=BINDING.algorithm + 1),
        "selector": Binding.of(FINGERPRINT, (0,), "raw", selector="stride"),
    }
    for name, other in others.items():
        difference = BINDING.difference(other)
        assert difference is not None
        assert difference.startswith(f"{name} is ")
        assert (other.model, other.report_name) != (BINDING.model, BINDING.report_name)
    assert BINDING.difference(others["context"]) == f"context is {others['context'].context[:16]}, not none"
    assert BINDING.difference(BINDING) is None
    longest = Binding.of(FINGERPRINT, (0,), "raw", (4, 5), "s" * 200)
    assert len(longest.report_name) <= 128


def test_another_selector_takes_the_place_of_query_in_the_ladder() -> None:
    assert BINDING.ladder == LADDER
    other = Binding.of(FINGERPRINT, (0,), "raw", selector=SelectorName.HYBRID).ladder
    assert [one.ratio for one in other] == [one.ratio for one in LADDER]
    assert {one.selector for one in other} == {SelectorName.HYBRID}
    assert BINDING.model == FINGERPRINT


def test_layers_are_described_as_a_range() -> None:
    hkvd = SelectorName.HKVD
    described = [
        describe_selection(Selection(0.1, hkvd, 1, layers)) for layers in ((), (0, 1, 2), (1, 3), (4,))
    ]
    assert described == ["hkvd r=0.1 @1", "hkvd r=0.1 @1 q=0-2", "hkvd r=0.1 @1 q=1,3", "hkvd r=0.1 @1 q=4"]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell.of(False, 1), "prompts of 1 to 512 tokens with declared chunks"),
        (Cell.of(False, 512), "prompts of 1 to 512 tokens with declared chunks"),
        (Cell.of(True, 513), "prompts of 513 to 2048 tokens with discovered chunks"),
        (Cell.of(False, 32_769), "prompts of 32769 or more tokens with declared chunks"),
    ],
)
def test_a_cell_is_named_by_what_its_prompts_have_in_common(cell: Cell, text: str) -> None:
    assert str(cell) == text


# --- The error probability


def test_slots_and_epochs_share_an_error_probability_that_sums_to_one() -> None:
    slots = [share_of_slot(slot) for slot in range(1, 10_001)]
    assert slots == sorted(slots, reverse=True)
    assert 0.9999 < sum(slots) <= 1


def needed_pairs(slot: int = 1, epoch: int = 0) -> int:
    """Fewest pairs without a loss that pass in this slot, after so many closings."""
    closings = [closing(SOURCE, number) for number in range(epoch)]
    return next(
        pairs
        for pairs in range(1, 500)
        if report_of(part_of(entry_of(pairs=pairs, slot=slot, epoch=epoch), closings=closings))
        .standing(CELL, SOURCE, BALANCED)
        .passed
    )


def test_later_slots_and_epochs_need_more() -> None:
    by_slot = [needed_pairs(slot) for slot in range(1, 6)]
    by_epoch = [needed_pairs(epoch=epoch) for epoch in range(5)]
    assert by_slot == sorted(set(by_slot))
    assert by_epoch == sorted(set(by_epoch))
    assert by_slot[0] == by_epoch[0]
    spent = tally_of(by_slot[0]).log_wealth(BALANCED)
    assert math.log(1 / ERROR) < spent < math.log(2 / ERROR), "the first slot gets most of the error"


def test_two_writers_that_take_one_slot_at_the_same_time_get_different_ones() -> None:
    one, other, third = sorted(TENANTS[:3])
    report = report_of(
        part_of(entry_of(one, pairs=1)),
        part_of(entry_of(other, pairs=1), entry_of(third, pairs=1, slot=2), writer="other"),
    )
    assert [report.slot(CELL, source) for source in (one, other, third, FOREIGN)] == [1, 2, 3, 4]


def test_a_slot_never_moves_to_a_larger_share() -> None:
    known = part_of(entry_of(FOREIGN, pairs=1), entry_of(pairs=1, slot=2))
    restarted = part_of(entry_of(pairs=1, slot=1), writer="restarted")
    assert report_of(known, restarted).slot(CELL, SOURCE) == 2
    assert report_of(known, restarted).slot(CELL, FOREIGN) == 1


# --- What passes


def test_configurations_pass_in_the_order_of_the_ladder_alone() -> None:
    first, second, third = (entry_of(selection=one) for one in LADDER[:3])
    standing = report_of(part_of(second, third)).standing(CELL, SOURCE, BALANCED)
    assert (standing.passed, standing.next, standing.tally.pairs) == ((), LADDER[0], 0)
    standing = report_of(part_of(first, third)).standing(CELL, SOURCE, BALANCED)
    assert (standing.passed, standing.next) == (LADDER[:1], LADDER[1])
    everything = open_report(rungs=len(LADDER)).standing(CELL, SOURCE, BALANCED)
    assert (everything.passed, everything.next, everything.missing) == (LADDER, None, 0)


def test_a_cell_says_nothing_about_another() -> None:
    report = open_report()
    assert allowance(report) is not None
    for cell in (Cell("discovered", 1), Cell("declared", 2)):
        assert report.allowance(cell, SOURCE, BALANCED, VERSIONS) is None


def test_strict_needs_more_than_balanced() -> None:
    report = report_of(part_of(entry_of(pairs=ENOUGH_PAIRS)))
    assert report.standing(CELL, SOURCE, BALANCED).passed
    assert not report.standing(CELL, SOURCE, Quality.STRICT).passed
    many = report_of(part_of(entry_of(pairs=4 * ENOUGH_PAIRS)))
    assert many.standing(CELL, SOURCE, Quality.STRICT).passed


def test_given_answers_must_pass_too() -> None:
    def passes(*answers: tuple[int, int], pairs: int = ENOUGH_PAIRS) -> bool:
        report = report_of(part_of(entry_of(FILE, tally=tally_of(pairs, answers=answers))))
        return bool(report.standing(CELL, FILE, BALANCED).passed)

    assert passes()
    assert not passes((0, ENOUGH_PAIRS)), "too few answers show a loss below three points"
    assert passes((0, 400), pairs=400)
    assert not passes((0, 360), (1, 40), pairs=400)


def test_the_missing_pairs_bring_it_to_pass() -> None:
    few = report_of(part_of(entry_of(pairs=20))).standing(CELL, SOURCE, BALANCED)
    assert few.missing is not None
    more = report_of(part_of(entry_of(pairs=20 + few.missing))).standing(CELL, SOURCE, BALANCED)
    assert more.missing is not None
    assert more.missing <= 3
    lost = report_of(part_of(entry_of(loss=0.3))).standing(CELL, SOURCE, BALANCED)
    assert lost.missing is None


def test_the_missing_pairs_include_those_for_answers() -> None:
    def missing(*answers: tuple[int, int]) -> int | None:
        entry = entry_of(FILE, tally=tally_of(ENOUGH_PAIRS, answers=answers))
        return report_of(part_of(entry)).standing(CELL, FILE, BALANCED).missing

    every, half = missing((0, 80)), missing((0, 40))
    assert every is not None
    assert half is not None
    assert 60 < every < 120
    assert half > 1.5 * every, "only every second pair has an answer"
    assert missing((0, 60), (1, 20)) is None


# --- Who may use it


def test_evidence_of_one_namespace_opens_for_it_alone() -> None:
    report = open_report()
    assert allowance(report) is not None
    assert allowance(report, FOREIGN) is None


def test_evidence_of_a_file_opens_for_all() -> None:
    report = report_of(part_of(entry_of(FILE)))
    for source in (SOURCE, FOREIGN):
        found = allowance(report, source)
        assert found is not None
        assert (found.selections, found.tally.pairs) == (LADDER[:1], ENOUGH_PAIRS)


def test_the_furthest_evidence_decides() -> None:
    own = [entry_of(selection=one) for one in LADDER[:2]]
    found = allowance(report_of(part_of(entry_of(FILE, slot=2), *own)))
    assert found is not None
    assert found.cheapest == LADDER[1]


def tenants_report(*pairs: int, loss: float = 0.0) -> Report:
    """The evidence of tenants, each with this many pairs."""
    entries = [
        entry_of(source, some, loss, slot=slot)
        for slot, (source, some) in enumerate(zip(TENANTS, pairs, strict=False), 1)
    ]
    return report_of(part_of(*entries))


def test_four_namespaces_open_for_a_fifth() -> None:
    found = allowance(tenants_report(*[ENOUGH_PAIRS] * NAMESPACES_MIN), FOREIGN)
    assert found is not None
    assert found.selections == LADDER[:1]
    assert found.tally.pairs == NAMESPACES_MIN * ENOUGH_PAIRS


def test_four_namespaces_open_for_others_before_one_of_them_opens_for_itself() -> None:
    few = next(pairs for pairs in range(1, 99) if allowance(tenants_report(*[pairs] * 4), FOREIGN))
    assert few < needed_pairs()


def test_three_namespaces_never_open_for_others_whatever_their_wealth() -> None:
    assert allowance(tenants_report(*[100_000] * (NAMESPACES_MIN - 1)), FOREIGN) is None


def test_good_prompts_of_some_do_not_outweigh_the_losses_of_another() -> None:
    report = tenants_report(*[100_000] * NAMESPACES_MIN)
    victim = part_of(entry_of(FOREIGN, loss=0.5, slot=5), writer="other")
    assert allowance(report.with_part(victim, AT), FOREIGN) is None


# --- Closing


def closed(report: Report, *closings: Closing) -> Report:
    return report.with_part(part_of(writer="watcher", closings=closings), AT)


def test_a_closing_starts_the_evidence_anew_and_then_more_is_needed() -> None:
    report = closed(open_report(), closing(SOURCE))
    assert allowance(report) is None
    assert report.standing(CELL, SOURCE, BALANCED).tally == EMPTY
    assert needed_pairs(epoch=1) > needed_pairs()
    again = entry_of(pairs=needed_pairs(epoch=1), epoch=1)
    assert allowance(report.with_part(part_of(again, writer="later"), AT)) is not None


def test_a_closed_namespace_needs_evidence_of_its_own() -> None:
    report = tenants_report(*[ENOUGH_PAIRS] * 5)
    report = report.with_part(part_of(entry_of(FILE, slot=6), writer="file"), AT)
    report = closed(report, closing(FOREIGN))
    assert allowance(report, FOREIGN) is None
    assert allowance(report, SOURCE) is not None
    own = entry_of(FOREIGN, pairs=200, slot=7, epoch=1)
    assert allowance(report.with_part(part_of(own, writer="own"), AT), FOREIGN) is not None


def test_a_namespace_closes_for_itself_alone_and_two_close_for_all() -> None:
    report = report_of(part_of(entry_of(FILE), entry_of(slot=2)))
    one = closed(report, closing(TENANTS[0]), closing(TENANTS[0], 2))
    assert one.epoch(TENANTS[0]) == 2
    assert one.epoch(SOURCE) == one.epoch(FILE) == 0
    assert allowance(one) is not None
    assert CLOSED_TOGETHER == 2
    two = closed(report, closing(TENANTS[0]), closing(TENANTS[1]))
    assert two.epoch(SOURCE) == two.epoch(FILE) == two.epoch(TENANTS[0]) == 1
    assert allowance(two) is None


def test_a_closing_for_all_closes_for_all() -> None:
    report = closed(report_of(part_of(entry_of(FILE), entry_of(slot=2))), closing())
    assert report.epoch(FILE) == report.epoch(SOURCE) == report.epoch(FOREIGN) == 1
    assert allowance(report) is None


# --- Probation, and chunks that were not measured


def test_other_versions_are_on_probation_until_they_measured_enough() -> None:
    report = open_report()
    found = allowance(report)
    assert found is not None
    assert not found.on_probation
    upgraded = allowance(report, versions="kintsugi 2")
    assert upgraded is not None
    assert upgraded.on_probation
    for pairs, on_probation in ((PROBATION_PAIRS - 1, True), (PROBATION_PAIRS, False)):
        own = part_of(entry_of(FOREIGN, pairs, slot=2), writer="new", versions="kintsugi 2")
        assert report.with_part(own, AT).on_probation("kintsugi 2") is on_probation


@pytest.mark.parametrize(
    ("chunk_tokens", "lacking"),
    [
        ([200] * 5, None),
        ([100] * 4, None),
        ([400] * 2, None),
        ([511], None),
        ([63] * 5, "chunks of about 63 tokens were hardly measured yet"),
        ([512] * 5, "chunks of about 512 tokens were hardly measured yet"),
        ([200] * 8, None),
        ([200] * 16, "prompts with 16 chunks were hardly measured yet"),
        ([200] * 1, None),
    ],
)
def test_chunks_unlike_those_that_were_measured_are_refused(
    chunk_tokens: list[int], lacking: str | None
) -> None:
    assert Allowance(LADDER[:1], tally_of(40)).lacks(chunk_tokens) == lacking


def test_some_pairs_of_a_size_are_too_few() -> None:
    few = tally_of(7, chunk_tokens=2000) + tally_of(40)
    assert Allowance(LADDER[:1], few).lacks([2000] * 4) is not None
    assert Allowance(LADDER[:1], few + tally_of(1, chunk_tokens=2000)).lacks([2000] * 4) is None


# --- Parts


def test_parts_of_two_writers_add() -> None:
    half = entry_of(pairs=needed_pairs() // 2 + 1)
    report = report_of(part_of(half))
    assert allowance(report) is None
    report = report.with_part(part_of(half, writer="other"), AT)
    assert report.tally(CELL, SOURCE, SAFEST).pairs == 2 * half.tally.pairs
    assert allowance(report) is not None


def test_a_writers_newer_part_replaces_its_older_one() -> None:
    report = report_of(part_of(entry_of(pairs=5)), part_of(entry_of(pairs=7), writer="other"))
    report = report.with_part(part_of(entry_of(pairs=6)), "2026-01-03")
    assert report.tally(CELL, SOURCE, SAFEST).pairs == 13
    assert report.created == "2026-01-03"


def many_parts(number: int) -> Report:
    report = report_of()
    for index in range(number):
        one = part_of(
            entry_of(pairs=3),
            entry_of(TENANTS[index % 8], pairs=index + 1, slot=2 + index % 8),
            writer=f"writer {index}",
            at=f"2026-01-01T00:{index:02}:00",
            closings=[closing(TENANTS[0], index)] if index % 10 == 9 else (),
        )
        report = report.with_part(one, AT)
    return report


def test_folding_old_parts_loses_nothing() -> None:
    number = PARTS_MAX + 24
    report = many_parts(number)
    assert len(report.parts) == PARTS_MAX
    assert report.tally(CELL, SOURCE, SAFEST).pairs == 3 * number
    assert len(report.closings) == report.epoch(TENANTS[0]) == number // 10
    for index, tenant in enumerate(TENANTS[1:], 1):
        pairs = sum(one + 1 for one in range(index, number, 8))
        assert report.tally(CELL, tenant, SAFEST).pairs == pairs
    assert Report.from_bytes(report.to_bytes()) == report


@pytest.mark.parametrize("writer", ["writer 0", "writer 3", "writer 4"])
def test_a_folded_writer_is_not_counted_twice_and_replaces_nothing(writer: str) -> None:
    report = many_parts(PARTS_MAX + 4)
    assert writer in report.parts[0].folded
    late = part_of(entry_of(pairs=4), writer=writer, at="2026-01-02")
    after = report.with_part(late, "2026-01-02")
    assert after.tally(CELL, SOURCE, SAFEST) == report.tally(CELL, SOURCE, SAFEST)


def test_folded_evidence_of_other_versions_confirms_none() -> None:
    report = report_of()
    for index in range(PARTS_MAX + 1):
        versions = VERSIONS if index else "kintsugi 0"
        one = part_of(entry_of(pairs=1), writer=str(index), versions=versions, at=f"2026-01-01T00:{index:02}")
        report = report.with_part(one, AT)
    counted = sum(part.entries[0].tally.pairs for part in report.parts if part.versions == VERSIONS)
    assert counted == PARTS_MAX - 1
    assert report.tally(CELL, SOURCE, SAFEST).pairs == PARTS_MAX + 1
