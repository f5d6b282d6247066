"""Questions that are asked without a pause while something breaks, and the chunks that must survive it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kintsugi.core.errors import KintsugiError
from kintsugi.sdk.client import Client, ClientOptions
from kintsugi.sdk.types import Answer

NAMESPACE = "bed"
QUESTION = "\nQuestion: what is said here?\nAnswer:"
ANSWER_TOKENS = 8
ASK_TIMEOUT_S = 60.0
PUT_TIMEOUT_S = 30.0
SLOW_S = 5.0
"""A question that takes longer counts as disturbed."""
PAUSE_S = 0.5
WORDS = (
    "river stone winter garden letter copper harbour window engine candle forest bridge silver market "
    "teacher meadow thunder kitchen valley needle orchard lantern saddle pepper canvas anchor violin"
)


def make_text(number: int) -> str:
    """Return a passage of some 80 words, another one for each number."""
    draw, words = random.Random(number), WORDS.split()
    return f"Passage {number}: " + " ".join(draw.choice(words) for _ in range(80)) + "."


@dataclass(frozen=True)
class Asked:
    """A question and how it ended, in seconds of the monotonic clock."""

    began_s: float
    ended_s: float
    error: str
    """Empty for an answer."""
    is_wrong: bool
    is_declined: bool = False
    """Whether the prompt was prefilled in full."""

    @property
    def is_disturbed(self) -> bool:
        return bool(self.error) or self.ended_s - self.began_s > SLOW_S


def failover_s(asked: Sequence[Asked], lost_s: float) -> float | None:
    """Return the time from a loss until questions are answered again: until the last disturbed question has
    ended, and at least until the first good answer to a later question. None without a good answer after
    it."""
    after = [one for one in asked if one.ended_s > lost_s]
    calm_s = max((one.ended_s for one in after if one.is_disturbed), default=lost_s)
    good = [one.ended_s for one in after if not one.error and one.began_s >= lost_s and one.ended_s >= calm_s]
    if not good:
        return None
    return (min(good) if calm_s == lost_s else calm_s) - lost_s


def first_good_s(asked: Sequence[Asked], lost_s: float) -> float | None:
    """Return the time from a loss to the first answer to a later question."""
    good = [one.ended_s for one in asked if one.began_s >= lost_s and not one.error]
    return min(good) - lost_s if good else None


@dataclass
class Book:
    """The chunks that the store acknowledged, by key, and the answers of full prefills."""

    texts: dict[str, str] = field(default_factory=dict)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Token ids by text."""
    refused: list[str] = field(default_factory=list)
    """Why puts failed that said so."""
    _number: int = 0

    def put(self, client: Client, count: int) -> None:
        """Put new chunks. Those that are acknowledged must survive everything that follows."""
        texts = [make_text(self._number + number) for number in range(count)]
        self._number += count
        try:
            results = client.put_chunks(texts, timeout_s=PUT_TIMEOUT_S)
        except KintsugiError as error:
            self.refused += [str(error)] * count
            return
        for text, result in zip(texts, results, strict=True):
            if result.state in ("stored", "present"):
                self.texts[result.key] = text
            else:
                self.refused.append(f"{result.state} {result.reason}")

    def learn(self, client: Client) -> None:
        """Ask for the answers that are not known yet, by full prefill."""
        for text in self.texts.values():
            if text not in self.answers:
                self.answers[text] = ask(client, text, no_blend=True).token_ids

    def find_lost(self, client: Client) -> list[str]:
        """Return the acknowledged chunks that the store does not have, asked twice: a busy shard may answer
        too late."""
        for _ in range(2):
            lost = [key for key in self.texts if client.get_chunk(key) is None]
            if not lost:
                return []
            time.sleep(1.0)
        return lost


def ask(client: Client, text: str, no_blend: bool = False) -> Answer:
    return client.generate(
        [text], QUESTION, max_tokens=ANSWER_TOKENS, no_blend=no_blend, timeout_s=ASK_TIMEOUT_S
    )


@contextmanager
def connect(address: str) -> Iterator[Client]:
    with Client(f"{address}:7500", NAMESPACE, options=ClientOptions(timeout_s=ASK_TIMEOUT_S)) as client:
        yield client


class Traffic:
    """Two threads for each gateway that ask about known chunks, until `stop`."""

    def __init__(self, addresses: Sequence[str], book: Book) -> None:
        self._answers = dict(book.answers)
        self._asked: list[Asked] = []
        self._outcomes: dict[str, int] = {}
        self._running: dict[int, float] = {}
        """Begin of each thread's question that has no answer yet."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(address, seed), daemon=True)
            for address in addresses
            for seed in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, address: str, seed: int) -> None:
        draw, texts = random.Random(f"{address} {seed}"), sorted(self._answers)
        with connect(address) as client:
            while not self._stopped.wait(PAUSE_S):
                self._ask(client, draw.choice(texts))

    def _ask(self, client: Client, text: str) -> None:
        began_s, error, is_wrong, outcome = time.monotonic(), "", False, "error"
        with self._lock:
            self._running[threading.get_ident()] = began_s
        try:
            answer = ask(client, text)
            is_wrong = answer.token_ids != self._answers[text]
            outcome = f"{answer.outcome} {answer.reason}".strip()
        except KintsugiError as failure:
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            del self._running[threading.get_ident()]
            self._asked.append(
                Asked(began_s, time.monotonic(), error, is_wrong, outcome.startswith("declined"))
            )
            self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    @property
    def asked(self) -> list[Asked]:
        with self._lock:
            return list(self._asked)

    @property
    def outcomes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._outcomes)

    def wait_calm(self, since_s: float, least_s: float, timeout_s: float) -> bool:
        """Wait until ``least_s`` have passed since a moment, and everything asked in the last `SLOW_S` was
        answered. Returns whether it was."""
        deadline_s = time.monotonic() + timeout_s
        while (now_s := time.monotonic()) < deadline_s:
            with self._lock:
                hangs = any(now_s - began_s > SLOW_S for began_s in self._running.values())
            last = [one for one in self.asked if one.ended_s > now_s - SLOW_S]
            is_calm = bool(last) and not hangs and not any(one.is_disturbed for one in last)
            if now_s - since_s >= least_s and is_calm:
                return True
            time.sleep(0.2)
        return False

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(ASK_TIMEOUT_S + SLOW_S)
