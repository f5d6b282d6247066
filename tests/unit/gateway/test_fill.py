from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kintsugi.core.held import ITEM_BYTES, NAMESPACE_BYTES
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.fill import Address, FillConfig, FillQueue, MissDecision

TOKENS = TokenIds.of([1, 2])


def room_for(items: int) -> int:
    """Memory of which one namespace may hold this many items."""
    return 2 * (NAMESPACE_BYTES + len("tenant") + items * ITEM_BYTES)


def address(number: int, namespace: str = "tenant") -> Address:
    return namespace, ChunkKey(number.to_bytes(32, "little"))


def queued(queue: FillQueue, number: int, namespace: str = "tenant", now_s: float = 0.0) -> MissDecision:
    queue.record_miss(address(number, namespace), TokenIds(), now_s)
    return queue.record_miss(address(number, namespace), TokenIds(), now_s)


def test_the_second_miss_is_worth_a_fill() -> None:
    queue = FillQueue()
    assert queue.record_miss(address(1), TOKENS, 0.0) is MissDecision.COUNTED
    assert queue.record_miss(address(1), TOKENS, 0.0) is MissDecision.QUEUED
    assert queue.record_miss(address(1), TOKENS, 0.0) is MissDecision.DUPLICATE
    assert [(one, miss.tokens) for one, miss in queue.take()] == [(address(1), TOKENS)]
    assert queue.record_miss(address(1), TOKENS, 0.0) is MissDecision.DUPLICATE, "it is being filled"
    queue.complete_chunk(address(1), saved=True)
    assert queue.record_miss(address(1), TOKENS, 0.0) is MissDecision.COUNTED, "evicted since, it starts anew"


def test_a_chunk_that_failed_counts_towards_the_bound_of_what_is_remembered() -> None:
    queue = FillQueue(FillConfig(sights=1, sighted_bytes_max=room_for(2)))
    queue.record_miss(address(1), TokenIds(), 0.0)
    ((taken, _),) = queue.take()
    for number in (2, 3):
        queue.record_miss(address(number), TokenIds(), 0.0)
    queue.complete_chunk(taken, saved=False)
    assert set(queue.sighted) == {address(3), address(1)}


def test_the_first_is_where_that_is_wanted() -> None:
    assert FillQueue(FillConfig(sights=1)).record_miss(address(1), TokenIds(), 0.0) is MissDecision.QUEUED


def test_a_full_queue_drops_and_takes_up_again() -> None:
    queue = FillQueue(FillConfig(queue_max=2, batch=1))
    assert [queued(queue, number) for number in range(3)] == [
        MissDecision.QUEUED,
        MissDecision.QUEUED,
        MissDecision.FULL,
    ]
    queue.take()
    assert queue.record_miss(address(2), TokenIds(), 0.0) is MissDecision.QUEUED


def test_a_queue_is_full_by_tokens_too() -> None:
    queue = FillQueue(FillConfig(sights=1, queue_tokens_max=3))
    assert queue.record_miss(address(1), TokenIds(bytes(8)), 0.0) is MissDecision.QUEUED
    assert queue.record_miss(address(2), TokenIds(bytes(8)), 0.0) is MissDecision.FULL
    assert queue.record_miss(address(3), TokenIds(bytes(4)), 0.0) is MissDecision.QUEUED
    queue.forget(address(1))
    assert queue.record_miss(address(2), TokenIds(bytes(8)), 0.0) is MissDecision.QUEUED
    assert len(queue.take()) == 2
    assert queue.record_miss(address(4), TokenIds(bytes(12)), 0.0) is MissDecision.QUEUED


def test_it_waits_for_an_idle_moment_but_not_for_ever() -> None:
    queue = FillQueue(FillConfig(patience_s=30.0))
    assert queue.due_in_s(idle=True, now_s=0.0) is None
    queued(queue, 1, now_s=100.0)
    queued(queue, 2, now_s=120.0)
    assert queue.due_in_s(idle=True, now_s=100.0) == 0.0
    assert queue.due_in_s(idle=False, now_s=110.0) == 20.0
    assert queue.due_in_s(idle=False, now_s=131.0) == 0.0


def test_a_batch_is_of_one_namespace_and_bounded() -> None:
    queue = FillQueue(FillConfig(batch=2))
    for number, namespace in enumerate(["a", "b", "a", "a"]):
        queued(queue, number, namespace)
    assert [one for one, _ in queue.take()] == [address(0, "a"), address(2, "a")]
    assert [one for one, _ in queue.take()] == [address(1, "b")]
    assert [one for one, _ in queue.take()] == [address(3, "a")]
    assert queue.take() == []


def test_what_keeps_failing_is_given_up() -> None:
    queue = FillQueue(FillConfig(failures_max=2))
    for _ in range(2):
        assert queued(queue, 1) is MissDecision.QUEUED
        queue.complete_chunk(queue.take()[0][0], saved=False)
    assert queued(queue, 1) is MissDecision.GIVEN_UP
    queue.forget(address(1))
    assert queued(queue, 1) is MissDecision.QUEUED


def test_what_found_no_room_has_not_failed() -> None:
    queue = FillQueue(FillConfig(failures_max=1))
    for _ in range(3):
        queued(queue, 1)
        assert len(queue.take()) == 1
        queue.drop_chunk(address(1))
    assert queue.record_miss(address(1), TokenIds(), 0.0) is MissDecision.QUEUED, "its next miss is enough"


def test_the_oldest_counts_are_forgotten_first() -> None:
    queue = FillQueue(FillConfig(sighted_bytes_max=room_for(2)))
    for number in range(3):
        queue.record_miss(address(number), TokenIds(), 0.0)
    assert queue.record_miss(address(0), TokenIds(), 0.0) is MissDecision.COUNTED


class Filling(RuleBasedStateMachine):
    """Whatever happens, nothing is filled twice at a time and every bound holds."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FillQueue(
            FillConfig(sights=2, queue_max=3, sighted_bytes_max=room_for(5), batch=2, failures_max=2)
        )
        self.running: list[Address] = []
        self.misses: dict[Address, int] = {}

    @rule(number=st.integers(0, 8))
    def miss(self, number: int) -> None:
        one = address(number, "ab"[number % 2])
        verdict = self.queue.record_miss(one, TokenIds(), 0.0)
        self.misses[one] = self.misses.get(one, 0) + 1
        if verdict is MissDecision.QUEUED:
            assert self.misses[one] >= 2
            assert one not in self.running
        if one in self.running:
            assert verdict is MissDecision.DUPLICATE

    @rule()
    def take(self) -> None:
        taken = [one for one, _ in self.queue.take()]
        assert len({namespace for namespace, _ in taken}) <= 1
        assert not set(taken) & set(self.running)
        self.running += taken

    @rule(saved=st.booleans())
    def finish(self, saved: bool) -> None:
        if self.running:
            one = self.running.pop()
            self.misses[one] = 0
            self.queue.complete_chunk(one, saved)

    @rule(number=st.integers(0, 8))
    def forget(self, number: int) -> None:
        self.queue.forget(address(number, "ab"[number % 2]))

    @invariant()
    def bounded(self) -> None:
        assert len(self.queue) <= 2 * 3, "three of each namespace"
        assert self.queue.sighted.num_bytes <= room_for(5)
        assert (self.queue.due_in_s(True, 0.0) is None) == (len(self.queue) == 0)


TestFilling = Filling.TestCase
TestFilling.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_chunk_is_filled_for_as_long_as_some_request_that_missed_it_allows() -> None:
    queue = FillQueue()
    for number, (first, second) in enumerate(
        [(60.0, 5.0), (5.0, 60.0), (60.0, None), (None, 60.0), (9.0, 9.0)]
    ):
        queue.record_miss(address(number), TOKENS, 0.0, first)
        queue.record_miss(address(number), TOKENS, 0.0, second)
    batches = []
    while len(queue):
        batch = queue.take()
        (ttl_s,) = {miss.ttl_s for _, miss in batch}
        batches.append((ttl_s, [one for one, _ in batch]))
    assert batches == [
        (60.0, [address(0), address(1)]),
        (None, [address(2), address(3)]),
        (9.0, [address(4)]),
    ]
