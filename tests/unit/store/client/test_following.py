"""Which shards a client follows, and that it misses no erasure when they leave."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.store.client.erasures import FOLLOWED_SHARDS, follow, read_cursor
from kintsugi.store.protocol.interface import Erasure, ErasureRange


class Store:
    """Shards that recorded the same erasures, each under its own numbers, in pages of two."""

    def __init__(self, shards: int) -> None:
        self.logs: dict[str, list[Erasure]] = {f"{index:036}": [] for index in range(shards)}
        self.silent: set[str] = set()
        self.calls = 0

    def erase(self, number: int) -> None:
        for log in self.logs.values():
            log.append(Erasure(f"n{number}", None, float(number), "*"))

    def ask(self, after: Mapping[str, int | None]) -> list[ErasureRange]:
        self.calls += len(after)
        pages = []
        for name, number in after.items():
            if name in self.silent:
                continue
            log = self.logs[name]
            told = [] if number is None else log[number : number + 2]
            pages.append(ErasureRange(told, len(log) if number is None else number + len(told), {}, name))
        return pages

    def follow(self, cursor: str) -> tuple[set[str], str]:
        """Read to the end, as gateways and engines do."""
        found: set[str] = set()
        while True:
            page = follow(cursor, list(self.logs), self.ask)
            found |= {erasure.namespace for erasure in page.erasures}
            if page.cursor == cursor or not page.erasures:
                return found, page.cursor
            cursor = page.cursor


def test_a_client_asks_two_of_a_thousand_shards() -> None:
    store = Store(1000)
    store.erase(0)
    found, cursor = store.follow("")
    assert not found, "only what comes later is listed"
    store.erase(1)
    before = store.calls
    assert store.follow(cursor)[0] == {"n1"}
    assert store.calls - before == 2 * FOLLOWED_SHARDS
    assert len(cursor) < 200, "a cursor does not grow with the store"


@pytest.mark.parametrize("seed", range(20))
def test_no_erasure_is_missed_when_followed_shards_leave_or_are_silent(seed: int) -> None:
    chance, store = random.Random(seed), Store(9)
    random.seed(seed)
    _, cursor = store.follow("")
    asked: set[str] = set()
    found: set[str] = set()
    for number in range(60):
        match chance.randrange(4):
            case 0:
                store.erase(number)
                asked.add(f"n{number}")
            case 1:  # one of those that are followed
                gone = chance.choice(list(read_cursor(cursor)))
                log = store.logs.pop(gone, [])
                store.logs[f"{number:036}"] = list(log)  # it caught up before it joined
                random.shuffle(store.logs[f"{number:036}"])
            case 2:
                store.silent = {chance.choice(list(store.logs))}
            case _:
                store.silent = set()
        page = follow(cursor, list(store.logs), store.ask)
        found |= {erasure.namespace for erasure in page.erasures}
        cursor = page.cursor
    store.silent = set()
    assert found | store.follow(cursor)[0] >= asked


def test_if_all_followed_shards_are_gone_others_tell_from_their_first_erasure_on() -> None:
    store = Store(4)
    store.erase(0)
    _, cursor = store.follow("")
    for one in read_cursor(cursor):
        del store.logs[one]
    store.erase(1)
    assert store.follow(cursor)[0] == {"n0", "n1"}


def test_a_store_in_which_nobody_answers_is_unavailable() -> None:
    store = Store(3)
    store.silent = set(store.logs)
    for cursor in ("", '{"x": 1}'):
        with pytest.raises(Unavailable, match="no shard answers"):
            follow(cursor, list(store.logs), store.ask)
