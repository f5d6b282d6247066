"""Sends the questions of passage sets to one engine and writes each answer into the records."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.support.engines import say
from benchmarks.support.real.corpus import PassageSet
from benchmarks.support.real.records import Records
from benchmarks.support.real.rows import OPEN, Item
from kintsugi.core.accounting import Outcome
from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import PromptChunk, RagPrompt, Selection, make_trial
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from kintsugi.models.context import NONE
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import metrics
from kintsugi.quality.measure import NAMESPACE
from kintsugi.quality.session import PATIENCE_MS
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer

CHUNK_END = "\n\n"
CONTINUATION_TOKENS = 32
TOP_LOGPROBS = 256
"""Tokens of a position that KL is summed over; the others count as one. With 20 it misses two fifths of full
reuse's KL over the whole vocabulary, and with 256 a tenth (14 prompts, by a reference in plain torch)."""
LOGPROB_DIGITS = 5
ANSWER_TOKENS = 8
"""Enough for every answer with known wording."""
BATCH = 4
"""Blends that share the engine's steps: decoding them together takes little longer than decoding one."""
MODEL_TOKENS_MAX = 8192
SHARD_RAM_BYTES = 1 << 30
SHARD_SSD_BYTES = 12 << 30
"""Reserved at once."""

Sets = Mapping[str, Mapping[int, PassageSet]]
"""Passage sets by part and number."""


@dataclass(frozen=True)
class Clock:
    """When to stop."""

    until_s: float
    """By `time.monotonic`."""

    @staticmethod
    def start(minutes: float) -> Clock:
        return Clock(time.monotonic() + 60 * minutes)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until_s


@contextmanager
def chunk_store(folder: Path) -> Iterator[str]:
    """The URL of a shard that keeps its chunks in ``folder``, so that the next part of a run finds them."""
    spec = ShardSpec(SHARD_RAM_BYTES, folder / "data", (SsdSpec(folder / "ssd", SHARD_SSD_BYTES),))
    with ExitStack() as stack:
        shard = open_shard(spec)
        stack.callback(shard.close)
        server = stack.enter_context(ShardServer(shard, "127.0.0.1:0"))
        yield f"grpc://{server.address}"


@contextmanager
def real_engine(model: str, store: str, form: PromptForm, context: Sequence[int]) -> Iterator[LocalEngine]:
    """Prefix caching is on, because full prefill answers many questions about the same passages."""
    extra: dict[str, object] = {
        "store": store,
        "quality": "off",
        "loading_controller": False,
        "lookup_deadline_ms": PATIENCE_MS,
        "layer_deadline_ms": PATIENCE_MS,
        "prefix_token_ids": list(form.head),
    }
    if context:
        extra["context_token_ids"] = list(context)
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": MODEL_TOKENS_MAX,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "max_logprobs": TOP_LOGPROBS,
    }
    with LocalEngine.start(model, extra_config=extra, **arguments) as running:
        yield running


def build_prompt(form: PromptForm, one: PassageSet, question: str | int) -> RagPrompt:
    """The passages, the question in the user's message, and how the answer begins."""
    chunks = [PromptChunk("", form.tokenize(text + CHUNK_END)) for text in one.passages]
    if isinstance(question, str):
        return form.build(chunks, one.open_question)
    asked = one.asked[question]
    prompt = form.build(chunks, asked.user)
    return replace(prompt, question=(*prompt.question, *form.tokenize(asked.opening)))


@dataclass
class RealBench:
    """Measures items on a running engine, chunks prepared after one context."""

    running: LocalEngine
    form: PromptForm
    sets: Sets
    records: Records
    context: str = NONE

    def measure(self, items: Iterable[Item], clock: Clock) -> bool:
        """Add the missing records. Returns whether all are complete."""
        left = [item for item in items if item.key not in self.records]
        full = [item for item in left if item.configuration is None]
        for _, some in groupby(full, key=lambda item: (item.part, item.number)):
            if clock.is_over:
                return False
            self._add_full(list(some))
        blends = [item for item in left if item.configuration is not None]
        blends.sort(key=lambda item: (item.name, str(item.question), item.part, item.number))
        for _, same in groupby(blends, key=lambda item: (item.configuration, item.question == OPEN)):
            ones = list(same)
            for start in range(0, len(ones), BATCH):
                if clock.is_over:
                    return False
                self._add_blends(ones[start : start + BATCH])
            say(f"{ones[0].name}: {len(ones)} more answers")
        return True

    def check_prefix_cache(self, items: Iterable[Item], clock: Clock) -> bool:
        """Answer some of full prefill's questions with known answers again, without the prefix cache. Returns
        whether all are answered."""
        for item in items:
            key = ("uncached", *item.key[1:])
            if clock.is_over:
                return False
            if key not in self.records:
                self.running.reset_prefix_cache()
                (answer,) = self.running.generate([self._request(item)])
                cached, again = self.records[item.key], self._full_values(item, answer)
                self.records.add(
                    key,
                    {
                        "same": again["token_ids"] == cached["token_ids"],
                        "same_right": again["right"] == cached["right"],
                    },
                )
        return True

    def _add_full(self, items: list[Item]) -> None:
        """Answers about one set: the first fills the prefix cache for the others."""
        self.running.reset_prefix_cache()
        for some in (items[:1], items[1:]):
            answers = self.running.generate([self._request(item) for item in some])
            for item, answer in zip(some, answers, strict=True):
                self.records.add(item.key, self._full_values(item, answer))
        say(f"full prefill of {items[0].part} set {items[0].number}: {len(items)} answers")

    def _full_values(self, item: Item, answer: Generation) -> dict[str, Any]:
        values: dict[str, Any] = {"text": answer.text, "token_ids": list(answer.token_ids)}
        if isinstance(item.question, str):
            steps = [
                [(token, round(logprob, LOGPROB_DIGITS)) for token, logprob in step.items()]
                for step in answer.top_logprobs
            ]
            return {**values, "steps": steps}
        asked = self.sets[item.part][item.number].asked[item.question]
        return {**values, "kind": asked.kind, "right": asked.is_right(answer.text)}

    def _request(self, item: Item, selection: Selection | None = None) -> Prompt:
        prompt = build_prompt(self.form, self.sets[item.part][item.number], item.question)
        trial = None if selection is None else make_trial(selection)
        given = None if trial is None else KintsugiParams(NAMESPACE, spans=prompt.spans, trial=trial)
        if item.question != OPEN:
            return Prompt(prompt.token_ids, given, ANSWER_TOKENS)
        forced = self.records[replace(item, configuration=None).key]["token_ids"] if given else None
        length = CONTINUATION_TOKENS if forced is None else len(forced)
        return Prompt(prompt.token_ids, given, length, top_logprobs=TOP_LOGPROBS, forced=forced)

    def _add_blends(self, items: list[Item]) -> None:
        """Answers with one configuration, to questions about different sets."""
        configuration = items[0].configuration
        assert configuration is not None
        assert configuration.context == self.context
        self._store(items)
        for item, answer in zip(items, self._blend(configuration.selection, items), strict=True):
            self.records.add(item.key, self._blend_values(item, answer))

    def _blend(self, selection: Selection, items: list[Item]) -> list[Generation]:
        self.running.reset_prefix_cache()
        answers = self.running.generate([self._request(item, selection) for item in items])
        for answer in answers:
            accounting = answer.accounting or {}
            if accounting.get("outcome") != Outcome.BLENDED.value or accounting.get("chunks_missed"):
                raise NotBlendable(
                    str(accounting.get("reason") or "chunks_missed"),
                    "a prompt was not blended as it should be; if the store was lost, name another folder "
                    "for the records",
                )
        return answers

    def _blend_values(self, item: Item, answer: Generation) -> dict[str, Any]:
        cost = float((answer.accounting or {})["cost"])
        full = self.records[replace(item, configuration=None).key]
        if not isinstance(item.question, str):
            asked = self.sets[item.part][item.number].asked[item.question]
            right = asked.is_right(answer.text)
            return {"kind": asked.kind, "right": right, "cost": cost, "text": answer.text}
        pairs = list(zip([dict(step) for step in full["steps"]], answer.top_logprobs, strict=True))
        return {
            "kl": sum(metrics.kl_divergence(*pair) for pair in pairs),
            "same_top": sum(metrics.same_top(*pair) for pair in pairs),
            "positions": len(pairs),
            "cost": cost,
        }

    def _store(self, items: list[Item]) -> None:
        """Save the passages that are not yet saved with this context."""
        passages = [text for item in items for text in self.sets[item.part][item.number].passages]
        keys = {("stored", self.context, digest_of(text)): text for text in passages}
        left = {key: text for key, text in keys.items() if key not in self.records}
        chunks = [self.form.tokenize(text + CHUNK_END) for text in left.values()]
        for key, saved in zip(left, self.running.save(self.form.head, chunks, NAMESPACE), strict=True):
            if not saved.is_saved:
                reason = str((saved.accounting or {}).get("reason") or "no_answer")
                raise NotBlendable(reason, "a chunk was not stored")
            self.records.add(key, {})


def digest_of(text: str) -> str:
    """Names a passage in a record."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
