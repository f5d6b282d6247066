"""Limits per namespace and the fair queue before engines. Time is injected; nothing sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.namespaces import NamespaceLimits, NamespaceRules
from kintsugi.gateway import shares as shares_module
from kintsugi.gateway.shares import STALL_S, FairShares


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(places: int | None = None, **limits: NamespaceLimits) -> tuple[FairShares, Clock]:
    clock = Clock()
    rules = NamespaceRules(limits={name.replace("_all", "*"): one for name, one in limits.items()})
    return FairShares(lambda: rules, places, clock), clock


def refused(act: Callable[[], Any]) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as raised:
        act()
    return raised.value


def enter(shares: FairShares, namespace: str) -> None:
    with shares.admit(namespace):
        pass


def test_requests_beyond_the_rate_are_refused_until_the_time_that_is_told() -> None:
    shares, clock = make(a=NamespaceLimits(requests_per_s=0.5))
    enter(shares, "a")
    error = refused(lambda: enter(shares, "a"))
    assert error.retry_after_s == pytest.approx(2.0)
    enter(shares, "b")
    clock.now_s += 1.9
    refused(lambda: enter(shares, "a"))
    clock.now_s += 0.1
    enter(shares, "a")
    (account,) = shares.accounts
    assert account.refused_total == {"requests_per_s": 2}
    assert account.requests_total == 2


def test_concurrent_requests_are_bounded_and_given_back_however_they_end() -> None:
    shares, _ = make(a=NamespaceLimits(concurrent=1))

    def fail() -> None:
        with shares.admit("a"):
            assert "in progress" in str(refused(lambda: enter(shares, "a")))
            raise ValueError("any")

    with pytest.raises(ValueError, match="any"):
        fail()
    enter(shares, "a")


def test_tokens_beyond_the_rate_are_refused_and_unused_ones_given_back() -> None:
    shares, clock = make(a=NamespaceLimits(tokens_per_s=100))
    shares.charge("a", 1000)  # more than a burst, which the next one waits for
    assert refused(lambda: shares.charge("a", 50)).retry_after_s == pytest.approx(8.5)
    shares.settle("a", 900)
    shares.charge("a", 50)
    clock.now_s += 60
    shares.charge("a", 200)
    refused(lambda: shares.charge("a", 200))


def test_namespaces_that_share_their_limits_have_one_account() -> None:
    shares, _ = make(team_all=NamespaceLimits(concurrent=1, together=True))
    with shares.admit("team1"):
        refused(lambda: enter(shares, "team2"))


def test_a_changed_limit_counts_from_the_next_request() -> None:
    rules = [NamespaceRules(limits={"a": NamespaceLimits(concurrent=1)})]
    shares = FairShares(lambda: rules[0], clock=Clock())
    with shares.admit("a"):
        rules[0] = NamespaceRules(limits={"a": NamespaceLimits(concurrent=2)})
        enter(shares, "a")
        rules[0] = NamespaceRules()
        enter(shares, "a")


def test_without_rules_and_places_nothing_is_remembered() -> None:
    shares, _ = make()
    enter(shares, "a")
    shares.charge("a", 10)
    assert not shares._accounts


class Engine:
    """Requests that hold a place until they are told to end, in the order in which they began."""

    def __init__(self, shares: FairShares) -> None:
        self.shares = shares
        self.began: list[str] = []
        self._ends: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, namespace: str, tokens: int = 100) -> asyncio.Task[None]:
        task = asyncio.create_task(self._hold(namespace, tokens))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def _hold(self, namespace: str, tokens: int) -> None:
        async with self.shares.place(namespace, tokens):
            end = asyncio.Event()
            self.began.append(namespace)
            self._ends.append(end)
            await end.wait()

    async def end(self, count: int = 1) -> None:
        for _ in range(count):
            self._ends.pop(0).set()
            for _ in range(4):
                await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def run(test: Callable[[Engine], Awaitable[None]], places: int, **limits: NamespaceLimits) -> Engine:
    async def main() -> Engine:
        engine = Engine(make(places, **limits)[0])
        try:
            await test(engine)
        finally:
            await engine.close()
        return engine

    return asyncio.run(main())


def test_a_flood_delays_another_namespace_by_one_request() -> None:
    async def test(engine: Engine) -> None:
        for _ in range(50):
            await engine.ask("flood")
        await engine.ask("calm")
        await engine.end(2)
        assert engine.began == ["flood", "flood", "calm"] or engine.began == ["flood", "calm", "flood"]

    run(test, places=1)


def test_weights_and_tokens_decide_the_turns() -> None:
    async def test(engine: Engine) -> None:
        await engine.ask("first")
        for _ in range(40):
            await engine.ask("heavy")
            await engine.ask("light")
            await engine.ask("long", tokens=400)
        await engine.end(35)
        counts = {name: engine.began[1:].count(name) for name in ("heavy", "light", "long")}
        assert counts["heavy"] == pytest.approx(3 * counts["light"], abs=3)
        assert counts["light"] == pytest.approx(4 * counts["long"], abs=4)

    run(test, 1, heavy=NamespaceLimits(weight=3.0))


def test_an_idle_namespace_saves_no_turns_up() -> None:
    async def test(engine: Engine) -> None:
        for _ in range(20):
            await engine.ask("busy")
        await engine.end(10)
        for _ in range(10):
            await engine.ask("late")
        engine.began.clear()
        await engine.end(8)
        assert 3 <= engine.began.count("late") <= 5

    run(test, places=1)


def test_a_full_queue_sheds_the_namespace_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "QUEUED_MAX", 4)

    async def test(engine: Engine) -> None:
        flood = [await engine.ask("flood") for _ in range(6)]
        await asyncio.sleep(0)
        assert isinstance(flood[5].exception(), ResourceExhausted)
        calm = await engine.ask("calm")
        await asyncio.sleep(0)
        assert not calm.done()
        assert isinstance(flood[4].exception(), ResourceExhausted)
        for _ in range(20):
            await engine.ask("flood")
        assert len(engine.shares._queue) <= 2 * 4 + 1
        await engine.end(2)
        assert "calm" in engine.began

    run(test, places=1)


def test_a_caller_that_leaves_gives_its_turn_and_its_place_back() -> None:
    async def test(engine: Engine) -> None:
        running = await engine.ask("a")
        waiting = await engine.ask("a")
        third = await engine.ask("a")
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(engine.began) == 2
        assert not third.done()
        assert engine.shares._queued == 0

    run(test, places=1)


def test_a_caller_that_leaves_as_its_turn_comes_passes_it_on() -> None:
    async def test(engine: Engine) -> None:
        await engine.ask("a")
        second, third = await engine.ask("a"), await engine.ask("a")
        engine._ends.pop(0).set()
        await asyncio.sleep(0)  # the first ends, and the second is granted its place
        second.cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        assert second.cancelled()
        assert len(engine.began) == 2
        assert not third.done()

    run(test, places=1)


def test_a_caller_that_reads_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "STALL_S", 0.001)
    assert STALL_S >= 1

    async def main() -> None:
        shares, _ = make(1)
        async with shares.place("slow", 10) as place:
            with place.lend():
                async with asyncio.timeout(5), shares.place("other", 10):
                    pass
        async with asyncio.timeout(5), shares.place("slow", 10):
            pass

    asyncio.run(main())


def test_a_full_queue_whose_newest_caller_is_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "QUEUED_MAX", 2)

    async def test(engine: Engine) -> None:
        flood = [await engine.ask("flood") for _ in range(3)]
        calm = asyncio.create_task(engine._hold("calm", 100))
        engine.tasks.append(calm)
        flood[2].cancel()  # it notices only after the other has asked
        for _ in range(4):
            await asyncio.sleep(0)
        assert not calm.done()
        assert (flood[2].cancelled(), engine.shares._queued) == (True, 2)

    run(test, places=1)
