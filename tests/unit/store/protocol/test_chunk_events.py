"""The log of what happened to chunks, and cursors into those of many shards."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.namespaces import MARK
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol import chunk_events
from kintsugi.store.protocol.chunk_events import (
    FOLLOWED_S,
    ChunkEvent,
    ChunkEventType,
    EventLog,
    EventPage,
    StoreCursor,
)


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32)


def store(log: EventLog, *numbers: int, namespace: str = "docs") -> None:
    for number in numbers:
        log.add(ChunkEventType.STORED, namespace, key(number), 10 * number)


def numbers(page: EventPage) -> list[int]:
    return [event.key.digest[0] for event in page.events]


def start(log: EventLog, namespace: str = "docs") -> str:
    page = log.read(namespace, "", 10)
    assert page.is_empty, "from now on"
    return page.cursor


def test_events_are_read_once_and_in_order() -> None:
    log = EventLog(clock=lambda: 7.0)
    store(log, 1)
    cursor = start(log)
    store(log, 2, 3, 4)
    store(log, 9, namespace="other")
    log.add(ChunkEventType.REMOVED, "docs", key(2), 20)
    first = log.read("docs", cursor, 2)
    rest = log.read("docs", first.cursor, 2)
    assert numbers(first) + numbers(rest) == [2, 3, 4, 2]
    assert rest.events[-1] == ChunkEvent(ChunkEventType.REMOVED, key(2), 20, 7.0)
    assert log.read("docs", rest.cursor, 2) == EventPage([], rest.cursor, False)


def test_nothing_of_another_namespace_shows_not_even_a_count() -> None:
    log = EventLog()
    cursors = {name: start(log, name) for name in ("docs", f"docs{MARK}acme", "docs2")}
    store(log, 1, namespace="docs2")
    store(log, 2, namespace=f"docs{MARK}acme")
    assert log.read("docs", cursors["docs"], 10) == EventPage([], cursors["docs"], False)
    assert numbers(log.read("docs2", cursors["docs2"], 10)) == [1]


def test_who_reads_too_late_is_told_so_and_nobody_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_events, "EVENTS_MAX", 3)
    log = EventLog()
    cursor, other = start(log), start(log, "other")
    store(log, *range(5))
    late = log.read("docs", cursor, 10)
    assert (late.lost, numbers(late)) == (True, [2, 3, 4])
    assert log.read("docs", late.cursor, 10).is_empty
    assert log.read("other", other, 10).is_empty
    store(log, 5)
    assert numbers(log.read("docs", late.cursor, 10)) == [5]


def test_a_cursor_of_another_process_says_that_events_were_lost() -> None:
    before, after = EventLog(), EventLog()
    cursor, _ = start(before), start(after)
    store(after, 1)
    page = after.read("docs", cursor, 10)
    assert (page.events, page.lost) == ((), True)
    store(after, 2)
    assert numbers(after.read("docs", page.cursor, 10)) == [2]
    epoch, _ = page.cursor.split("-")
    assert after.read("docs", f"{epoch}-99", 10).lost, "it is ahead of the log"


@pytest.mark.parametrize("names", [[f"docs{MARK}.{i}" for i in range(4)], [f"n{i}" for i in range(4)]])
def test_logs_are_bounded_and_who_reads_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """One tenant's parts have a bound, and all namespaces together."""
    monkeypatch.setattr(chunk_events, "FOLLOWED_OF_TENANT_MAX", 2)
    monkeypatch.setattr(chunk_events, "FOLLOWED_MAX", 3)
    now_s = [0.0]
    log = EventLog(since_start=lambda: now_s[0])
    bystander = start(log, "bystander")
    cursors = {name: start(log, name) for name in names[:2]}
    with pytest.raises(ResourceExhausted, match="read those of fewer"):
        log.read(names[2], "", 10)
    now_s[0] = FOLLOWED_S
    assert log.read(names[0], cursors[names[0]], 10).is_empty
    assert log.read("bystander", bystander, 10).is_empty
    cursors[names[2]] = start(log, names[2])
    with pytest.raises(ResourceExhausted):
        log.read(names[1], cursors[names[1]], 10)  # it gave up its log, and the others are read
    now_s[0] += FOLLOWED_S
    assert log.read("bystander", bystander, 10).is_empty
    assert log.read(names[1], cursors[names[1]], 10).lost


@pytest.mark.parametrize("cursor", ["x", "-1", "abc-", "abc-x", "abc--1", "abc-" + "9" * 30])
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidField, match="send the last page's"):
        EventLog().read("docs", cursor, 10)


def event(number: int, at_s: float) -> ChunkEvent:
    return ChunkEvent(ChunkEventType.STORED, key(number), 1, at_s)


def page(cursor: str, *events: ChunkEvent, lost: bool = False) -> EventPage:
    return EventPage(events, cursor, lost)


def test_pages_of_shards_are_merged_by_time() -> None:
    begin = StoreCursor.parse("").merge({"a": page("aa-0"), "b": page("bb-7")})
    assert begin.is_empty
    cursor = StoreCursor.parse(begin.cursor)
    assert (cursor.of("a"), cursor.of("b"), cursor.of("c")) == ("aa-0", "bb-7", "")
    events = {"a": page("aa-2", event(1, 1.0), event(3, 9.0)), "b": page("bb-8", event(2, 3.0))}
    merged = cursor.merge(events)
    assert (numbers(merged), merged.lost) == ([1, 2, 3], False)
    after = StoreCursor.parse(merged.cursor)
    assert (after.of("a"), after.of("b")) == ("aa-2", "bb-8")


def test_a_clock_that_steps_back_reorders_no_events_of_its_shard() -> None:
    cursor = StoreCursor.parse("").merge({"a": page("aa-0"), "b": page("bb-0")}).cursor
    pages = {"a": page("aa-2", event(1, 100.0), event(2, 90.0)), "b": page("bb-1", event(3, 95.0))}
    merged = numbers(StoreCursor.parse(cursor).merge(pages))
    assert merged.index(1) < merged.index(2)


def test_events_are_lost_where_shards_change() -> None:
    both = StoreCursor.parse("").merge({"a": page("aa-0"), "b": page("bb-0")}).cursor

    def lost(cursor: str, **pages: EventPage | None) -> bool:
        return StoreCursor.parse(cursor).merge(pages).lost

    assert not lost(both, a=page("aa-0"), b=page("bb-0"))
    assert lost(both, a=page("aa-0")), "one left"
    assert lost(both, a=page("aa-0"), b=page("bb-0"), c=page("cc-0")), "one joined"
    assert lost(both, a=page("aa-0"), b=page("bc-0", lost=True)), "one restarted"
    silent = StoreCursor.parse(both).merge({"a": page("aa-0"), "b": None})
    assert not silent.lost, "it tells its events later"
    assert StoreCursor.parse(silent.cursor).of("b") == "bb-0"
    unknown = StoreCursor.parse("").merge({"a": page("aa-0"), "b": None}).cursor
    assert lost(unknown, a=page("aa-0"), b=page("bb-0")), "nobody knows what it told meanwhile"


@pytest.mark.parametrize("cursor", ["x", "_", ".", "t.abc-1_", ".abc-1", "é"])
def test_what_is_no_cursor_of_a_store_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidField, match="send the last page's"):
        StoreCursor.parse(cursor)
