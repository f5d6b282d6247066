"""What becomes of a question to the store: answered, late, broken, or not asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kintsugi.core.spaces import TokenIds

pytest.importorskip("vllm")

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.errors import InvalidField, NotBlendable, PermissionDenied, Unavailable
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span
from kintsugi.engine.scheduler.lookups import LOOKUP_THREADS, Lookup, Lookups
from kintsugi.engine.scheduler.matching import Match, match_spans
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.breaker import FAILURES_MAX, OPEN_S, CircuitBreaker
from kintsugi.store.protocol.interface import Found

SPACE = ChunkSpace(ModelFingerprint.of({"model": "toy"}), "acme")
SPANS = (Span(0, 2, ChunkKey.of(SPACE, [1, 2])),)


class StubStore(RamStore):
    """Answers once it may, as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.lookups = 0
        self.asked = threading.Semaphore(0)

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        self.lookups += 1
        self.asked.release()
        assert self.may_answer.wait(10)
        if self.error is not None:
            raise self.error
        return super().find(namespace, keys)


@pytest.fixture
def store() -> StubStore:
    return StubStore()


@pytest.fixture
def lookups(store: StubStore) -> Iterator[Lookups]:
    made = Lookups(store, 10_000.0, lambda: None)
    yield made
    store.may_answer.set()
    made.close()


def asked(lookups: Lookups) -> Lookup:
    return lookups.start(match_spans, SPACE, SPANS)


def answered(lookups: Lookups) -> Match:
    lookup = asked(lookups)
    lookup.future.exception(10)
    match = lookups.result(lookup, lambda: False)
    assert match is not None
    assert match is lookup.answer
    return match


def given_up(lookups: Lookups) -> str:
    lookup = asked(lookups)
    lookup.future.exception(10)
    with pytest.raises(NotBlendable) as caught:
        lookups.result(lookup, lambda: False)
    assert lookup.answer is None
    return str(caught.value)


def polled(lookups: Lookups, lookup: Lookup) -> Match:
    while True:
        match = lookups.result(lookup, lambda: True)
        if match is not None:
            return match


def test_an_answer_is_there_or_not_yet(store: StubStore, lookups: Lookups) -> None:
    assert answered(lookups).spans == SPANS
    store.may_answer.clear()
    lookup = asked(lookups)
    for is_alone in (lambda: False, lambda: True):
        assert lookups.result(lookup, is_alone) is None
        assert lookup.answer is None
    store.may_answer.set()
    lookup.future.result(10)
    assert lookups.result(lookup, lambda: False) is not None


def test_who_takes_too_long_is_not_waited_for(store: StubStore) -> None:
    hurried = Lookups(store, 0.0, lambda: None)
    store.may_answer.clear()
    lookup = asked(hurried)
    with pytest.raises(NotBlendable, match="store_timeout: the lookup took too long"):
        polled(hurried, lookup)
    store.may_answer.set()
    hurried.close()


@pytest.mark.parametrize(("error", "counts"), [(Unavailable("down"), True), (InvalidField("a", "b"), False)])
def test_a_store_that_fails_is_left_alone(
    store: StubStore, lookups: Lookups, error: Exception, counts: bool
) -> None:
    store.error = error
    lookups.check_store(SPACE, TokenIds.of([1]))
    assert given_up(lookups) == f"store_unavailable: {type(error).__name__}: {error}"
    if not counts:
        lookups.check_store(SPACE, TokenIds.of([1]))
        return
    until(lambda: store.lookups == 2, lookups)
    for _ in range(FAILURES_MAX):
        with pytest.raises(NotBlendable, match="the store failed recently"):
            lookups.check_store(SPACE, TokenIds.of([1]))
    assert store.lookups == 2, "a prompt asked, and a thread whether the store was only late"


def test_one_prompt_waits_for_a_store_that_hangs(store: StubStore, lookups: Lookups) -> None:
    store.may_answer.clear()
    first, second = asked(lookups), asked(lookups)
    assert lookups.result(second, lambda: False) is None
    first.answered_by_s = 0.0
    with pytest.raises(NotBlendable, match="store_timeout"):
        lookups.result(first, lambda: False)
    with pytest.raises(NotBlendable, match="store_unavailable: the store failed recently"):
        lookups.result(second, lambda: False)
    with pytest.raises(NotBlendable, match="store_unavailable: the store failed recently"):
        lookups.check_store(SPACE, TokenIds.of([1]))


def test_a_store_that_was_only_late_is_used_as_soon_as_it_answers(store: StubStore, lookups: Lookups) -> None:
    now_s = 0.0
    lookups._breaker = CircuitBreaker(lambda: now_s, failures_max=1)
    store.may_answer.clear()
    lookup = asked(lookups)
    lookup.answered_by_s = 0.0
    with pytest.raises(NotBlendable, match="store_timeout"):
        lookups.result(lookup, lambda: False)
    store.may_answer.set()
    until(lambda: lookups._breaker.is_closed, lookups)
    answered(lookups)


@pytest.mark.parametrize(
    "reason",
    [
        "DeadlineExceeded: layer 3",
        "load_timeout: layer 3",
        "Unavailable: down",
        "stream_ended: before layer 3 was complete",
        "shard_silent: no shard answers",
        "chunk_lost: absent; shard_silent: no shard answers",
    ],
)
def test_a_load_that_the_store_did_not_answer_suspends_it(
    store: StubStore, lookups: Lookups, reason: str
) -> None:
    lookup = asked(lookups)
    lookup.future.result(10)
    store.may_answer.clear()
    lookups.record_outcome(lookup, Accounting(Outcome.FAILED, reason=reason))
    with pytest.raises(NotBlendable, match="the store failed recently"):
        lookups.check_store(SPACE, TokenIds.of([1]))
    store.may_answer.set()
    until(lambda: lookups._breaker.is_closed, lookups)
    lookups.check_store(SPACE, TokenIds.of([1]))


@pytest.mark.parametrize(
    "accounting",
    [
        Accounting(Outcome.BLENDED, reason="DeadlineExceeded: one chunk, which was computed"),
        Accounting(Outcome.FAILED, reason="corrupted: a chunk"),
        Accounting(Outcome.FAILED, reason="chunk_lost: a chunk at layer 0, absent"),
        Accounting(Outcome.FAILED, reason="chunk_lost: a chunk at layer 0, digest mismatch"),
        Accounting(Outcome.FAILED),
    ],
)
def test_a_load_that_failed_otherwise_says_nothing_about_the_store(
    store: StubStore, lookups: Lookups, accounting: Accounting
) -> None:
    lookup = asked(lookups)
    lookup.future.result(10)
    lookups.record_outcome(lookup, accounting)
    lookups.check_store(SPACE, TokenIds.of([1]))
    assert store.lookups == 1


@pytest.mark.parametrize(
    ("error", "is_closed"), [(PermissionDenied("no"), True), (Unavailable("down"), False)]
)
def test_a_refusal_of_a_probe_is_an_answer(
    store: StubStore, lookups: Lookups, error: Exception, is_closed: bool
) -> None:
    """Otherwise a caller who may not read could keep the store suspended for all others."""
    lookup = asked(lookups)
    lookup.future.result(10)
    store.error = error
    lookups.record_outcome(lookup, Accounting(Outcome.FAILED, reason="load_timeout: layer 3"))
    lookups._prober.submit(int).result(10)
    assert lookups._breaker.is_closed is is_closed


def test_a_probe_has_a_thread_of_its_own(store: StubStore, lookups: Lookups) -> None:
    """Lookups that hang do not keep it waiting."""
    store.may_answer.clear()
    hanging = [asked(lookups) for _ in range(LOOKUP_THREADS)]
    for _ in hanging:
        assert store.asked.acquire(timeout=10)
    hanging[0].answered_by_s = 0.0
    with pytest.raises(NotBlendable, match="store_timeout"):
        lookups.result(hanging[0], lambda: False)
    assert store.asked.acquire(timeout=5), "while the lookups hang, which they do for 10 s"


def test_one_probe_at_a_time_is_under_way(store: StubStore, lookups: Lookups) -> None:
    now_s = 0.0
    lookups._breaker = CircuitBreaker(lambda: now_s, failures_max=1)
    lookup = asked(lookups)
    lookup.future.result(10)
    store.may_answer.clear()
    lookups.record_outcome(lookup, Accounting(Outcome.FAILED, reason="load_timeout: layer 3"))
    for _ in range(3):
        now_s += 2 * OPEN_S
        with pytest.raises(NotBlendable, match="the store failed recently"):
            lookups.check_store(SPACE, TokenIds.of([1]))
    store.may_answer.set()
    lookups._prober.submit(int).result(10)
    assert store.lookups == 2, "the prompt's, and one probe"
    lookups.check_store(SPACE, TokenIds.of([1]))


def until(condition: Callable[[], bool], lookups: Lookups) -> None:
    for _ in range(100_000):
        if condition():
            return
        lookups._prober.submit(int).result(10)
    raise AssertionError("it does not come true")


def test_a_defect_is_logged(store: StubStore, lookups: Lookups, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(
        "kintsugi.engine.scheduler.lookups.logger.exception", lambda *_, **values: logged.append(values)
    )
    store.error = ZeroDivisionError("by the test")
    assert given_up(lookups) == "store_unavailable: ZeroDivisionError: by the test"
    assert logged == [{"exc_info": store.error}]


def test_it_is_found_out_beside_the_prompts_whether_a_store_is_back(
    store: StubStore, lookups: Lookups
) -> None:
    now_s = 0.0
    lookups._breaker = CircuitBreaker(lambda: now_s, failures_max=1)
    store.error = Unavailable("down")
    given_up(lookups)
    until(lambda: lookups._breaker._failures == 2, lookups)
    for error in (store.error, None):
        store.error, store.lookups = error, 0
        now_s += OPEN_S
        with pytest.raises(NotBlendable):
            lookups.check_store(SPACE, TokenIds.of([1]))
        heard_back(lookups, store)
        assert lookups._breaker.is_closed is (error is None)
    lookups.check_store(SPACE, TokenIds.of([1]))
    answered(lookups)


def heard_back(lookups: Lookups, store: StubStore) -> None:
    for _ in range(10_000):
        lookups._prober.submit(int).result(10)
        if store.lookups and lookups._breaker._probe_s is None:
            return
    raise AssertionError("the store was not asked, or its answer forgotten")
