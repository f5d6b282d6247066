"""Readers of the store's events, and those that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kintsugi.core.errors import ResourceExhausted
from kintsugi.gateway import residency
from kintsugi.gateway.residency import EventReaders
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.chunk_events import EventPage
from tests.contracts.store_contract import make_chunk


def run(body: Callable[[RamStore, EventReaders], Awaitable[None]]) -> None:
    async def outer() -> None:
        store = RamStore()
        threaded = ThreadedStore(store)
        await body(store, EventReaders(threaded))
        await threaded.close()

    asyncio.run(outer())


def test_a_reader_waits_for_the_next_event_of_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[float] = []
    sleep = asyncio.sleep

    async def body(store: RamStore, readers: EventReaders) -> None:
        chunk = make_chunk(range(8))

        async def put_meanwhile(seconds: float) -> None:
            polls.append(seconds)
            if len(polls) == 2:
                store.put(*chunk)
            await sleep(0)

        monkeypatch.setattr(asyncio, "sleep", put_meanwhile)
        page = await readers.wait("router", "acme", "", 10, 5.0)
        assert [event.key for event in page.events] == [chunk[0].key]
        assert polls == [residency.POLL_S] * 2

    run(body)


def test_who_waits_in_vain_gets_an_empty_page_and_a_cursor() -> None:
    async def body(store: RamStore, readers: EventReaders) -> None:
        store.put(*make_chunk(range(8)))
        page = await readers.wait("router", "acme", "", 10, 0.01)
        assert (page.is_empty, page.cursor) == (True, (await readers.read("acme", "", 10)).cursor)

    run(body)


def test_a_caller_has_few_readers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "WAITING_MAX", 2)

    async def body(store: RamStore, readers: EventReaders) -> None:
        cursor = (await readers.read("acme", "", 10)).cursor

        def wait(caller: str) -> asyncio.Task[EventPage]:
            return asyncio.create_task(readers.wait(caller, "acme", cursor, 10, 5.0))

        waiting = [wait("one"), wait("one"), wait("two")]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match="wait_s=0"):
            await wait("one")
        store.put(*make_chunk(range(8)))
        assert [len((await one).events) for one in waiting] == [1, 1, 1]
        assert len((await wait("one")).events) == 1, "those that waited have left"

    run(body)
