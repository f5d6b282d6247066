"""The log of what happened to chunks."""

from __future__ import annotations

import asyncio

import pytest

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.observed import chunk_events
from kintsugi.gateway.observed.chunk_events import ChunkEvent, ChunkEvents, EventPage


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32)


def test_events_are_read_once_and_in_order() -> None:
    async def body() -> None:
        events = ChunkEvents()
        events.stored("docs", key(1), 10)
        start = events.read("docs", "", 10)
        assert (start.events, start.lost) == ((), False), "from now on"
        for number in (2, 3, 4):
            events.stored("docs", key(number), number)
        events.stored("other", key(9), 1)
        first = events.read("docs", start.cursor, 2)
        rest = events.read("docs", first.cursor, 2)
        assert [one.key for one in (*first.events, *rest.events)] == [key(2), key(3), key(4)]
        assert events.read("docs", rest.cursor, 2).events == []

    asyncio.run(body())


def test_a_namespace_that_is_deleted_is_told_to_its_parts_and_nothing_else_is() -> None:
    async def body() -> None:
        events = ChunkEvents()
        cursor = events.read("docs", "", 10).cursor
        events.stored("docs", key(1), 10)
        events.deleted("docs", [key(1)])
        events.deleted("docs", None)
        events.stored("docs/-/acme", key(2), 10)
        seen = {
            name: [(one.type.value, one.key) for one in events.read(name, cursor, 10).events]
            for name in ("docs", "docs/-/acme", "docs/-/beta", "docs2")
        }
        whole = ("chunk_deleted", None)
        assert seen["docs"] == [("chunk_stored", key(1)), ("chunk_deleted", key(1)), whole]
        assert seen["docs/-/acme"] == [whole, ("chunk_stored", key(2))]
        assert (seen["docs/-/beta"], seen["docs2"]) == ([whole], [])

    asyncio.run(body())


def test_who_reads_too_late_is_told_so() -> None:
    async def body() -> None:
        events = ChunkEvents(events_max=3)
        cursor = events.read("docs", "", 10).cursor
        for number in range(5):
            events.stored("docs", key(number), 1)
        late = events.read("docs", cursor, 10)
        assert (late.lost, [one.key for one in late.events]) == (True, [key(2), key(3), key(4)])
        assert not events.read("docs", late.cursor, 10).lost
        assert ChunkEvents().read("docs", late.cursor, 10).lost, "another gateway, or after a restart"

    asyncio.run(body())


def test_a_reader_waits_for_the_next_event_of_its_namespace() -> None:
    async def body() -> None:
        events = ChunkEvents()
        cursor = events.read("docs", "", 10).cursor
        reading = asyncio.create_task(events.wait("router", "docs", cursor, 10, 5.0))
        await asyncio.sleep(0)
        events.stored("other", key(1), 1)
        await asyncio.sleep(0)
        assert not reading.done()
        events.stored("docs", key(2), 1)
        assert [one.key for one in (await reading).events] == [key(2)]

    asyncio.run(body())


def test_who_waits_in_vain_gets_an_empty_page_and_a_cursor() -> None:
    async def body() -> None:
        events = ChunkEvents()
        events.stored("docs", key(1), 1)
        cursor = events.read("docs", "", 10).cursor
        page = await events.wait("router", "docs", cursor, 10, 0.01)
        assert (page.is_empty, page.cursor) == (True, cursor)

    asyncio.run(body())


def test_a_caller_has_few_readers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_events, "WAITING_MAX", 2)

    async def body() -> None:
        events = ChunkEvents()
        cursor = events.read("docs", "", 10).cursor

        def wait(caller: str) -> asyncio.Task[EventPage]:
            return asyncio.create_task(events.wait(caller, "docs", cursor, 10, 5.0))

        waiting = [wait("one"), wait("one"), wait("two")]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match="wait_s=0"):
            await wait("one")
        events.stored("docs", key(1), 1)
        assert [len((await one).events) for one in waiting] == [1, 1, 1]
        again = wait("one")
        assert len((await again).events) == 1

    asyncio.run(body())


def test_a_reader_looks_only_at_what_came_after_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    events = ChunkEvents()
    for _ in range(5000):
        events.stored("other", key(1), 1)
    cursor = events.read("docs", "", 10).cursor
    looked: list[int] = []
    concerns = ChunkEvent.concerns
    monkeypatch.setattr(
        ChunkEvent, "concerns", lambda self, name: (looked.append(self.number), concerns(self, name))[1]
    )
    events.stored("other", key(1), 1)
    events.stored("docs", key(2), 1)
    assert [one.key for one in events.read("docs", cursor, 10).events] == [key(2)]
    assert looked == [5001, 5002]


@pytest.mark.parametrize("cursor", ["x", "abc-", "abc-x", "abc--1", "abc-" + "9" * 30])
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidField):
        ChunkEvents().read("docs", cursor, 10)
