"""Writers of one report: each adds its own part, and nothing that was published is lost or counted twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kintsugi.core.errors import Corrupted, InvalidField, NotFound, Unavailable
from kintsugi.core.evidence import Levels, Quality
from kintsugi.core.gate import decide
from kintsugi.core.report import (
    FILE,
    LADDER,
    LATEST_MAX,
    PARTS_MAX,
    Cell,
    Closing,
    Report,
    ServedBlend,
    source_of,
)
from kintsugi.quality import reports
from kintsugi.quality.reports import EXCHANGE_S, ReportKeeper
from kintsugi.store.client.ram import RamStore
from tests.fakes.reports import (
    AT,
    BINDING,
    CELL,
    SAFEST,
    SOURCE,
    VERSIONS,
    entry_of,
    fetch_report,
    open_report,
    part_of,
    report_of,
    tally_of,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
OTHER = source_of("other")
FIRST = ServedBlend(SOURCE, (0.5, 0.1, 0.0), (0.125, 0.05, 0.05))
SECOND = ServedBlend(SOURCE, (0.25, 0.0, 0.0), (0.125, 0.05, 0.05))
OF_OTHER = ServedBlend.of(OTHER, Levels(1 / 3, 0.0, 0.0), Levels(0.02, 0.02, 0.02))
CLOSING = Closing("wrong answers", AT, SOURCE)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def now(self) -> datetime:
        return START + timedelta(seconds=self.now_s)


class BrokenStore(RamStore):
    """Does not answer while ``is_away``; ``between`` runs once between a read and a write."""

    is_away = False
    between: Callable[[], object] | None = None

    def get_report(self, *names: object) -> bytes | None:
        if self.is_away:
            raise Unavailable("no route")
        return super().get_report(*names)  # type: ignore[arg-type]

    def put_report(self, *values: object) -> None:
        if self.between is not None:
            act, self.between = self.between, None
            act()
            self._reports.clear()  # the later of the two is kept
        super().put_report(*values)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> BrokenStore:
    return BrokenStore()


Make = Callable[[], ReportKeeper]


@pytest.fixture
def make(store: BrokenStore, clock: Clock) -> Make:
    def make() -> ReportKeeper:
        return ReportKeeper(store, BINDING, VERSIONS, Quality.BALANCED, clock.now, clock)

    return make


def record(keeper: ReportKeeper, pairs: int = 1, source: str = SOURCE, cell: Cell = CELL) -> bool:
    """Record pairs without a loss, one by one; return whether one of them opened."""
    return sum(keeper.record(cell, source, SAFEST, tally_of(1)) for _ in range(pairs)) > 0


def stored(store: RamStore) -> Report:
    found = fetch_report(store, BINDING)
    assert found is not None
    return found


def test_two_writers_add(make: Make, store: RamStore) -> None:
    one, other = make(), make()
    record(one, 3)
    record(other, 4)
    one.exchange()
    other.exchange()
    assert stored(store).tally(CELL, SOURCE, SAFEST).pairs == 7
    record(one, 2)
    one.exchange()
    assert stored(store) == one.report
    assert one.report.tally(CELL, SOURCE, SAFEST).pairs == 9


def test_what_passes_by_the_evidence_of_two_opens_once(make: Make, store: RamStore) -> None:
    one, other = make(), make()
    record(one, 30)
    one.exchange()
    other.exchange()
    assert record(other, 30), "it opened on the way"
    assert not record(other, 30), "it was open already"
    (opening,) = other.report.parts[-1].openings
    assert (opening.cell, opening.source, opening.selection) == (CELL, SOURCE, SAFEST)


def test_a_restarted_engine_goes_on_with_what_was_published(make: Make, store: RamStore) -> None:
    first = make()
    record(first, 20)
    first.exchange()
    second = make()
    second.exchange()
    assert second.report.tally(CELL, SOURCE, SAFEST).pairs == 20
    record(second, 1, OTHER)
    assert second.report.slot(CELL, OTHER) == 2


def test_nothing_new_is_not_written(make: Make, store: BrokenStore) -> None:
    keeper = make()
    record(keeper)
    keeper.exchange()
    before = store.get_report(BINDING.model, BINDING.report_name)
    keeper.exchange()
    assert store.get_report(BINDING.model, BINDING.report_name) == before
    idle = make()
    idle.exchange()
    assert store.get_report(BINDING.model, BINDING.report_name) == before


def test_an_exchange_is_due_at_start_and_then_now_and_again(make: Make, clock: Clock) -> None:
    keeper = make()
    assert keeper.is_due
    keeper.exchange()
    assert not keeper.is_due
    clock.now_s = EXCHANGE_S
    assert keeper.is_due


def test_while_the_store_is_away_evidence_waits(make: Make, store: BrokenStore) -> None:
    keeper = make()
    record(keeper, 5)
    store.is_away = True
    assert keeper.exchange() == []
    assert keeper.report.tally(CELL, SOURCE, SAFEST).pairs == 5
    record(keeper, 2)
    store.is_away = False
    keeper.exchange()
    assert stored(store).tally(CELL, SOURCE, SAFEST).pairs == 7


def test_what_another_writer_overwrote_is_published_again(make: Make, store: BrokenStore) -> None:
    one, other = make(), make()
    record(one, 3)
    one.exchange()
    record(one, 2)
    one.close(CLOSING)
    record(other, 4)
    store.between = one.exchange
    other.exchange()
    pairs = [part.entries[0].tally.pairs for part in stored(store).parts]
    assert pairs == [3, 4], "the report of the first was replaced"
    assert stored(store).closings == ()
    one.exchange()
    assert stored(store).closings == (CLOSING,)
    assert [part.entries[0].tally.pairs for part in stored(store).parts] == [4, 5]


def test_a_new_epoch_has_entries_of_its_own(make: Make, store: RamStore) -> None:
    keeper = make()
    record(keeper, 3)
    keeper.close(CLOSING)
    record(keeper, 2)
    assert [(one.epoch, one.tally.pairs) for one in keeper.report.parts[0].entries] == [(0, 3), (1, 2)]
    assert keeper.report.tally(CELL, SOURCE, SAFEST).pairs == 2


def test_cells_and_sources_get_slots_in_the_order_of_their_first_pairs(make: Make) -> None:
    keeper = make()
    longer = Cell.of(False, 3000)
    for source, cell in ((OTHER, CELL), (SOURCE, longer), (SOURCE, CELL), (OTHER, CELL)):
        record(keeper, 1, source, cell)
    slots = [keeper.report.slot(cell, source) for source, cell in ((OTHER, CELL), (SOURCE, longer))]
    assert slots == [1, 2]
    assert keeper.report.slot(CELL, SOURCE) == 3


def test_two_writers_that_took_one_slot_keep_different_ones(make: Make, store: RamStore) -> None:
    one, other = make(), make()
    record(one, 1, SOURCE)
    record(other, 1, OTHER)
    for _ in range(2):
        for keeper, source in ((one, SOURCE), (other, OTHER)):
            keeper.exchange()
            record(keeper, 1, source)
    one.exchange()
    slots = {entry.source: entry.slot for part in stored(store).parts for entry in part.entries}
    assert sorted(slots.values()) == [1, 2]
    assert {source: stored(store).slot(CELL, source) for source in slots} == slots


def test_losses_of_served_blends_reach_the_other_engines_once(make: Make) -> None:
    one, other = make(), make()
    one.record_served(FIRST)
    one.exchange()
    assert other.exchange() == [], "what was served before it started"
    one.record_served(SECOND)
    one.record_served(OF_OTHER)
    assert one.exchange() == []
    assert other.exchange() == [SECOND, OF_OTHER]
    assert other.exchange() == []
    for _ in range(LATEST_MAX + 9):
        one.record_served(FIRST)
    one.exchange()
    assert len(other.exchange()) == LATEST_MAX


def test_a_writer_whose_part_was_folded_goes_on_as_another(make: Make, store: RamStore, clock: Clock) -> None:
    slow = make()
    record(slow, 3)
    slow.exchange()
    for index in range(PARTS_MAX + 1):
        clock.now_s = 60.0 * (index + 1)
        keeper = make()
        record(keeper, 1, OTHER)
        keeper.exchange()
    assert stored(store).parts[0].entries[0].tally.pairs == 3
    slow.close(CLOSING)
    record(slow, 2)
    slow.exchange()
    assert stored(store).tally(CELL, OTHER, SAFEST).pairs == PARTS_MAX + 1
    assert stored(store).closings == (CLOSING,)
    record(slow, 4)
    slow.exchange()
    assert stored(store).tally(CELL, SOURCE, SAFEST).pairs == 4
    old = [
        one for part in stored(store).parts for one in part.entries if (one.source, one.epoch) == (SOURCE, 0)
    ]
    assert sum(one.tally.pairs for one in old) == 3


def test_an_unreadable_report_is_replaced(make: Make, store: RamStore) -> None:
    store.put_report(BINDING.model, BINDING.report_name, b"{}")
    keeper = make()
    record(keeper, 2)
    keeper.exchange()
    assert stored(store).tally(CELL, SOURCE, SAFEST).pairs == 2


def test_without_a_store_the_report_stays_in_memory() -> None:
    keeper = ReportKeeper(None, BINDING, VERSIONS, Quality.BALANCED)
    record(keeper, 2)
    assert keeper.exchange() == []
    assert keeper.report.tally(CELL, SOURCE, SAFEST).pairs == 2


def test_a_published_file_adds_to_the_stores_report(make: Make, store: RamStore) -> None:
    keeper = make()
    record(keeper, 2)
    keeper.exchange()
    file = report_of(part_of(entry_of(FILE), writer="file"))
    for _ in range(2):
        reports.publish(store, file)
    assert stored(store).tally(CELL, SOURCE, SAFEST).pairs == 2
    assert stored(store).tally(CELL, FILE, SAFEST) == file.tally(CELL, FILE, SAFEST)
    keeper.exchange()
    assert keeper.report.allowance(CELL, OTHER, Quality.BALANCED, VERSIONS) is not None


def test_a_report_is_fetched_only_where_it_can_be_read(store: RamStore) -> None:
    assert fetch_report(store, BINDING) is None
    reports.publish(store, open_report(rungs=len(LADDER)))
    assert stored(store).parts == open_report(rungs=len(LADDER)).parts
    broken = RamStore()
    broken.put_report(BINDING.model, BINDING.report_name, b"[]")
    assert fetch_report(broken, BINDING) is None


def test_a_report_survives_the_way_to_a_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for report in (open_report(), open_report(rungs=2)):
        reports.write(path, report)
        assert reports.read(path) == report
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_files_that_are_no_reports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="is not a folder; create it first"):
        reports.write(tmp_path / "none" / "report.json", open_report())
    with pytest.raises(NotFound, match=r"create it with kintsugi calibrate --out"):
        reports.read(tmp_path / "report.json")
    (tmp_path / "large").write_bytes(b" " * (2 << 20))
    with pytest.raises(Corrupted, match="at most"):
        reports.read(tmp_path / "large")


def test_a_new_report_tests_what_its_binding_names() -> None:
    """In the store as in the gate; reports about other selectors stay."""
    store, other = RamStore(), replace(BINDING, selector="hybrid")
    for binding in (BINDING, other):
        keeper = ReportKeeper(store, binding, VERSIONS, Quality.BALANCED)
        keeper.record(CELL, SOURCE, binding.ladder[0], tally_of(1))
        keeper.exchange()
    for binding in (BINDING, other):
        found = fetch_report(store, binding)
        assert found is not None
        assert found.ladder == binding.ladder
        assert found.tally(CELL, SOURCE, binding.ladder[0]).pairs == 1
        state = decide(None, binding, Quality.BALANCED, VERSIONS)
        assert state.report is not None
        assert state.report.ladder == binding.ladder
