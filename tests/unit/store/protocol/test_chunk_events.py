"""The log of what happened to chunks."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.chunk_events import ChunkEvent, ChunkEventType, EventLog, EventPage


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32)


def store(log: EventLog, number: int, namespace: str = "docs") -> None:
    log.add(ChunkEventType.STORED, namespace, key(number), 10 * number)


def keys(page: EventPage) -> list[ChunkKey]:
    return [event.key for event in page.events]


def test_events_are_read_once_and_in_order() -> None:
    log = EventLog(clock=lambda: 7.0)
    store(log, 1)
    start = log.read("docs", "", 10)
    assert (start.events, start.is_empty) == ([], True), "from now on"
    for number in (2, 3, 4):
        store(log, number)
    store(log, 9, "other")
    log.add(ChunkEventType.REMOVED, "docs", key(2), 20)
    first = log.read("docs", start.cursor, 2)
    rest = log.read("docs", first.cursor, 2)
    assert keys(first) + keys(rest) == [key(2), key(3), key(4), key(2)]
    assert rest.events[-1] == ChunkEvent(ChunkEventType.REMOVED, key(2), 20, 7.0)
    assert log.read("docs", rest.cursor, 2).is_empty


def test_a_namespace_is_told_of_its_own_chunks_alone() -> None:
    log = EventLog()
    cursor = log.read("docs", "", 10).cursor
    for number, namespace in enumerate(("docs", "docs/-/acme", "docs2")):
        store(log, number, namespace)
    assert keys(log.read("docs", cursor, 10)) == [key(0)]
    assert keys(log.read("docs/-/acme", cursor, 10)) == [key(1)]


def test_who_reads_too_late_is_told_so() -> None:
    log = EventLog(events_max=3)
    cursor = log.read("docs", "", 10).cursor
    for number in range(5):
        store(log, number)
    late = log.read("docs", cursor, 10)
    assert (late.lost, keys(late)) == (True, [key(2), key(3), key(4)])
    assert log.read("docs", late.cursor, 10).is_empty


def test_a_cursor_of_another_process_says_that_events_were_lost() -> None:
    before, after = EventLog(), EventLog()
    store(before, 1)
    store(after, 1)
    page = after.read("docs", before.read("docs", "", 10).cursor, 10)
    assert (page.events, page.lost) == ([], True)
    store(after, 2)
    assert keys(after.read("docs", page.cursor, 10)) == [key(2)]


def test_a_page_that_is_full_ends_before_the_next_event_of_another_namespace() -> None:
    log = EventLog()
    cursor = log.read("docs", "", 10).cursor
    store(log, 1)
    store(log, 2, "other")
    page = log.read("docs", cursor, 1)
    assert keys(page) == [key(1)]
    assert keys(log.read("other", page.cursor, 1)) == [key(2)], "the cursor passed nothing by"


def test_the_log_is_bounded() -> None:
    log = EventLog(events_max=100)
    cursor = log.read("docs", "", 10).cursor
    for number in range(1000):
        store(log, number % 7)
    page = log.read("docs", cursor, 1000)
    assert (len(page.events), page.lost) == (100, True)


@pytest.mark.parametrize("cursor", ["x", "abc-", "abc-x", "abc--1", "abc-" + "9" * 30])
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidField, match="send the one of the last page"):
        EventLog().read("docs", cursor, 10)
