"""Limits of each namespace's use of a gateway, and the fair queue for the engines.

The queue is start-time fair queueing (Goyal et al. 1996): a request costs its tokens divided by its
namespace's weight, and the request with the earliest start in virtual time is next. A namespace within its
share waits only until one request ends, however many requests of others are queued. Requests beyond a limit
are refused at once, with the time after which to try again.

The module does no I/O, and its clock is injected. Without rules and places, every method returns at once and
remembers nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.namespaces import NO_LIMITS, NO_RULES, NamespaceLimits, NamespaceRules

BURST_S = 2.0
"""An idle namespace saves up its allowance for at most this many seconds."""
ACCOUNTS_MAX = 4096
"""Number of namespaces beyond which idle ones are forgotten."""
QUEUED_MAX = 4096
"""Maximum number of waiting requests. Beyond it, the newest request of the namespace with the longest queue
for its weight is refused."""
STALL_S = 5.0
"""Seconds after which a caller that reads nothing of its answer loses its place."""
RETRY_S_MIN = 1.0
RETRY_S_MAX = 60.0
SERVICE_WEIGHT = 0.1
"""Weight of the newest request in the moving average of the time that a request holds its place."""


class Bucket:
    """A token bucket. One amount may exceed the burst; later ones wait until the level is positive again."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self.per_s = per_s
        self._burst = max(1.0, per_s * BURST_S)
        self._level = self._burst
        self._now_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the time until the amount may be taken; 0: now."""
        self._level = min(self._burst, self._level + self.per_s * max(0.0, now_s - self._now_s))
        self._now_s = now_s
        return max(0.0, (min(amount, self._burst) - self._level) / self.per_s)

    def take(self, amount: float) -> None:
        """Take an amount; a negative one is given back."""
        self._level = min(self._burst, self._level - amount)


@dataclass(eq=False)
class Account:
    """The use of one namespace, or of all namespaces that share their limits."""

    name: str
    limits: NamespaceLimits
    is_limited: bool
    """Whether a rule applies to it; metrics show only such accounts."""
    requests: Bucket | None = None
    tokens: Bucket | None = None
    in_flight: int = 0
    """Number of requests that are being served or wait."""
    waiting: list[_Waiter] = field(default_factory=list)
    """Requests that wait for a place, the newest last."""
    finish: float = 0.0
    """Virtual time at which all its requests have been served."""
    requests_total: int = 0
    tokens_charged: int = 0
    tokens_unused: int = 0
    """Part of `tokens_charged` that answers did not need."""
    refused_total: dict[str, int] = field(default_factory=dict)
    """Number of refused requests, by the limit that they exceeded."""

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight or self.waiting)

    @property
    def relative_queue(self) -> float:
        return len(self.waiting) / self.limits.weight

    def refuse(self, limit: str, text: str, retry_after_s: float) -> ResourceExhausted:
        """Count a refusal and return the error to raise."""
        self.refused_total[limit] = self.refused_total.get(limit, 0) + 1
        retry_after_s = min(RETRY_S_MAX, max(RETRY_S_MIN, retry_after_s))
        return ResourceExhausted(
            f"namespace {self.name!r} {text}; try again in {retry_after_s:.0f} s", retry_after_s
        )


@dataclass(eq=False)
class _Waiter:
    account: Account
    begins: float
    """Start in virtual time."""
    cost: float
    """Virtual time that it adds to its account's `finish`."""
    place: asyncio.Future[None]


class EnginePlace:
    """A place at the engines. A caller that does not read its answer loses it, because the engine has
    finished the answer and others wait."""

    def __init__(self, release: Callable[[], None] | None) -> None:
        self._release = release

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Release the place if the block, in which the caller reads, takes longer than `STALL_S`."""
        if self._release is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(STALL_S, self.release)
        try:
            yield
        finally:
            timer.cancel()

    def release(self) -> None:
        """Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


NO_PLACE = EnginePlace(None)


class FairShares:
    """The accounts of all namespaces, and the queue for the engines. For one event loop."""

    def __init__(
        self,
        rules: Callable[[], NamespaceRules] = lambda: NO_RULES,
        places: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``places``: maximum number of concurrent requests to engines; None: no limit and no queue."""
        self._rules = rules
        self._places = places
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._taken = 0
        self._queue: list[tuple[float, int, _Waiter]] = []
        """A heap: by virtual start, then by arrival."""
        self._queued = 0
        self._virtual = 0.0
        self._arrivals = itertools.count()
        self._service_s = RETRY_S_MIN

    @property
    def accounts(self) -> list[Account]:
        """Accounts to which a rule applies."""
        return [account for account in self._accounts.values() if account.is_limited]

    @property
    def has_places(self) -> bool:
        """Whether the number of concurrent requests to engines is limited."""
        return self._places is not None

    @contextmanager
    def admit(self, namespace: str) -> Iterator[None]:
        """Count a request while the block runs. Raises `ResourceExhausted`."""
        account = self._account(namespace)
        if account is None:
            yield
            return
        self._check_request(account)
        account.in_flight += 1
        account.requests_total += 1
        try:
            yield
        finally:
            account.in_flight -= 1

    def _check_request(self, account: Account) -> None:
        limits, bucket = account.limits, account.requests
        if limits.concurrent is not None and account.in_flight >= limits.concurrent:
            text = f"has {account.in_flight} requests in progress, which is its limit"
            raise account.refuse("concurrent", text, self._service_s)
        if bucket is not None:
            wait_s = bucket.wait_s(1, self._clock())
            if wait_s > 0:
                raise account.refuse(
                    "requests_per_s", f"sends more than {bucket.per_s:g} requests a second", wait_s
                )
            bucket.take(1)

    def charge(self, namespace: str, tokens: int) -> None:
        """Take tokens from the namespace's rate. Raises `ResourceExhausted` and then takes none."""
        account = self._account(namespace)
        if account is None:
            return
        bucket = account.tokens
        if bucket is not None:
            wait_s = bucket.wait_s(tokens, self._clock())
            if wait_s > 0:
                raise account.refuse(
                    "tokens_per_s", f"requests more than {bucket.per_s:g} tokens a second", wait_s
                )
            bucket.take(tokens)
        account.tokens_charged += tokens

    def settle(self, namespace: str, unused: int) -> None:
        """Return charged tokens that were not used; if ``unused`` is negative, charge further tokens."""
        account = self._account(namespace)
        if account is not None:
            account.tokens_unused += unused
            if account.tokens is not None:
                account.tokens.take(-unused)

    @asynccontextmanager
    async def place(self, namespace: str, tokens: int) -> AsyncIterator[EnginePlace]:
        """Wait for a place at the engines, and hold it while the block runs. Raises `ResourceExhausted`."""
        if self._places is None:
            yield NO_PLACE
            return
        await self._wait_for_place(namespace, tokens)
        began_s = self._clock()
        place = EnginePlace(self._release_place)
        try:
            yield place
        finally:
            self._service_s += SERVICE_WEIGHT * (self._clock() - began_s - self._service_s)
            place.release()

    async def _wait_for_place(self, namespace: str, tokens: int) -> None:
        assert self._places is not None
        account = self._account(namespace)
        assert account is not None
        begins = max(self._virtual, account.finish)
        cost = max(1, tokens) / account.limits.weight
        if self._taken < self._places and not self._queued:
            account.finish = begins + cost
            self._virtual = begins
            self._taken += 1
            return
        self._check_queue(account)
        account.finish = begins + cost
        waiter = _Waiter(account, begins, cost, asyncio.get_running_loop().create_future())
        account.waiting.append(waiter)
        self._queued += 1
        heapq.heappush(self._queue, (begins, next(self._arrivals), waiter))
        try:
            await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self._release_place()  # the place was granted, but the caller has left
            elif waiter.place.cancelled():
                self._give_up(waiter)
            raise

    def _check_queue(self, account: Account) -> None:
        """Make room in the queue for a request of the account. Raises `ResourceExhausted`."""
        if self._queued < QUEUED_MAX:
            return
        largest = max(self._accounts.values(), key=lambda one: one.relative_queue)
        if largest is account or not largest.waiting:
            raise self._shed(account)
        newest = largest.waiting[-1]
        if newest.place.done():  # its caller has left, and the request is about to leave the queue
            return
        newest.place.set_exception(self._shed(largest))
        self._give_up(newest)
        if len(self._queue) > 2 * QUEUED_MAX:  # most entries belong to requests that gave up
            self._queue = [entry for entry in self._queue if not entry[-1].place.done()]
            heapq.heapify(self._queue)

    def _shed(self, account: Account) -> ResourceExhausted:
        assert self._places is not None
        active = sum(one.limits.weight for one in self._accounts.values() if not one.is_idle)
        share = account.limits.weight / max(active, account.limits.weight)
        retry_s = (len(account.waiting) + 1) * self._service_s / (self._places * share)
        text = f"has {len(account.waiting)} requests waiting for an engine, which is its limit"
        return account.refuse("queue", text, retry_s)

    def _leave_queue(self, waiter: _Waiter) -> None:
        waiter.account.waiting.remove(waiter)
        self._queued -= 1

    def _give_up(self, waiter: _Waiter) -> None:
        """Remove a request from the queue. Its entry in the heap is skipped later."""
        self._leave_queue(waiter)
        waiter.account.finish -= waiter.cost

    def _release_place(self) -> None:
        """Pass the place to the next waiting request."""
        self._taken -= 1
        while self._queue:
            begins, _, waiter = heapq.heappop(self._queue)
            if waiter.place.done():
                continue
            self._leave_queue(waiter)
            self._virtual = max(self._virtual, begins)
            self._taken += 1
            waiter.place.set_result(None)
            return

    def _account(self, namespace: str) -> Account | None:
        """Return the namespace's account; None if nothing has to be counted."""
        rules = self._rules()
        limits = rules.limits_of(namespace)
        if limits is None and self._places is None:
            return None
        name = rules.account_of(namespace)
        account = self._accounts.get(name)
        if account is None:
            self._forget_idle()
            account = Account(name, NO_LIMITS, limits is not None)
            self._accounts[name] = account
        if limits is not None and account.limits != limits:
            now_s = self._clock()
            account.limits, account.is_limited = limits, True
            account.requests = _bucket(account.requests, limits.requests_per_s, now_s)
            account.tokens = _bucket(account.tokens, limits.tokens_per_s, now_s)
        elif limits is None and account.is_limited:
            account.limits, account.is_limited = NO_LIMITS, False
            account.requests = account.tokens = None
        return account

    def _forget_idle(self) -> None:
        if len(self._accounts) >= ACCOUNTS_MAX:
            self._accounts = {name: one for name, one in self._accounts.items() if not one.is_idle}


def _bucket(before: Bucket | None, per_s: float | None, now_s: float) -> Bucket | None:
    """Return the bucket of a rate; the existing one if the rate is the same."""
    if per_s is None:
        return None
    return before if before is not None and before.per_s == per_s else Bucket(per_s, now_s)
