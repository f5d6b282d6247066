"""The measuring of passage sets, on an engine that only remembers what it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.real.corpus import PassageSet
from benchmarks.support.real.engine import (
    ANSWER_TOKENS,
    BATCH,
    CONTINUATION_TOKENS,
    Clock,
    RealBench,
)
from benchmarks.support.real.questions import QUOTE, Asked
from benchmarks.support.real.records import Records
from benchmarks.support.real.rows import (
    JUDGED,
    OPEN,
    REUSE,
    Configuration,
    Item,
    blend_items,
    full_items,
)
from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import Selection, selection_of
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import Generation, Prompt
from kintsugi.models.context import NONE
from kintsugi.models.prompt_form import PromptForm

SETS = 6
KL_PER_POSITION = 0.5
CHOSEN = Configuration(NONE, Selection(0.2, SelectorName.QUERY))
AHEAD, OVER = Clock(float("inf")), Clock(0.0)


class Letters:
    """A tokenizer with one token per character and a template of two marks."""

    chat_template = "two marks"

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<{messages[0]['content']}>"


class RecordingEngine:
    """Answers `1994`; blended answers have half the probability at every position."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []
        self.calls: list[int] = []
        self.resets = 0
        self.saved: list[tuple[int, ...]] = []
        self.outcome = "blended"

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        self.asked += prompts
        self.calls.append(len(prompts))
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Generation:
        ids = list(prompt.forced or [7] * 3)
        logprob = -KL_PER_POSITION if prompt.params else 0.0
        accounting = {"outcome": self.outcome, "cost": 0.2} if prompt.params else None
        return Generation(ids, " 1994.", 1.0, [], [], [{7: logprob}] * len(ids), "stop", 0, accounting)

    def save(
        self, prefix: Sequence[int], chunks: Sequence[Sequence[int]], namespace: str
    ) -> list[Generation]:
        self.saved += map(tuple, chunks)
        return [Generation([], "", 0.0, [], [], [], "stop", 0, {"outcome": "saved"}) for _ in chunks]

    def reset_prefix_cache(self) -> None:
        self.resets += 1


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def bench(engine: RecordingEngine, tmp_path: Path) -> RealBench:
    asked = (
        Asked("year", "When?", QUOTE + "it was in", "1994", "it was in 1994"),
        Asked("year", "When else?", QUOTE + "it was also in", "2001", "it was also in 2001"),
    )
    sets = {number: PassageSet(number, (f"a{number}", "b"), "Why?", asked) for number in range(SETS)}
    records = Records(tmp_path / "records.jsonl", {})
    running: Any = engine
    return RealBench(running, PromptForm.of(Letters()), {JUDGED: sets}, records)


def items(bench: RealBench) -> list[Item]:
    return full_items(JUDGED, list(bench.sets[JUDGED].values()), ["year"], 2)


def text_of(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.token_ids))


def test_full_prefill_of_one_set_shares_the_prefix_cache(bench: RealBench, engine: RecordingEngine) -> None:
    assert bench.measure(items(bench), AHEAD)
    assert engine.resets == SETS
    assert engine.calls == [1, 2] * SETS  # the first fills the cache for the others
    assert text_of(engine.asked[0]) == "<a0\n\nb\n\n\nWhy?>"
    assert text_of(engine.asked[1]) == f"<a0\n\nb\n\n\nWhen?>{QUOTE}it was in"
    assert [prompt.max_tokens for prompt in engine.asked[:2]] == [CONTINUATION_TOKENS, ANSWER_TOKENS]
    assert bench.records["full", JUDGED, 0, 0]["right"] is True
    assert bench.records["full", JUDGED, 0, 1]["right"] is False


def test_what_is_recorded_is_not_measured_again(bench: RealBench, engine: RecordingEngine) -> None:
    everything = items(bench) + blend_items(items(bench), [REUSE])
    assert bench.measure(everything, AHEAD)
    asked = len(engine.asked)
    assert bench.measure(everything, AHEAD)
    assert len(engine.asked) == asked


def test_blends_are_forced_along_full_prefills_answer(bench: RealBench, engine: RecordingEngine) -> None:
    full = items(bench)
    bench.measure(full, AHEAD)
    engine.asked.clear()
    engine.calls.clear()
    bench.measure(blend_items([item for item in full if item.question == OPEN], [CHOSEN]), AHEAD)
    trials = [prompt.params.trial for prompt in engine.asked if prompt.params and prompt.params.trial]
    assert {selection_of(trial) for trial in trials} == {CHOSEN.selection}
    assert engine.calls == [BATCH, SETS - BATCH]
    assert {tuple(prompt.forced or ()) for prompt in engine.asked} == {(7, 7, 7)}
    values = bench.records["blend", JUDGED, 0, OPEN, CHOSEN.name]
    assert values["kl"] == pytest.approx(3 * KL_PER_POSITION)
    assert (values["positions"], values["same_top"], values["cost"]) == (3, 3, 0.2)


def test_each_passage_is_stored_once(bench: RealBench, engine: RecordingEngine) -> None:
    bench.measure(items(bench) + blend_items(items(bench), [REUSE, CHOSEN]), AHEAD)
    stored = {bench.form.tokenize(text) for text in ("b\n\n", *(f"a{number}\n\n" for number in range(SETS)))}
    assert len(engine.saved) == len(set(engine.saved)) == SETS + 1
    assert set(engine.saved) == stored


def test_nothing_is_begun_after_the_time(bench: RealBench, engine: RecordingEngine) -> None:
    assert not bench.measure(items(bench), OVER)
    bench.measure(items(bench), AHEAD)
    engine.asked.clear()
    assert not bench.measure(blend_items(items(bench), [REUSE]), OVER)
    assert not bench.check_prefix_cache(items(bench), OVER)
    assert not engine.asked


@pytest.mark.parametrize("outcome", ["declined", "prefix_hit"])
def test_a_prompt_that_was_not_blended_ends_the_run(
    bench: RealBench, engine: RecordingEngine, outcome: str
) -> None:
    bench.measure(items(bench), AHEAD)
    engine.outcome = outcome
    with pytest.raises(NotBlendable, match="not blended as it should be"):
        bench.measure(blend_items(items(bench), [REUSE]), AHEAD)


def test_answers_without_the_prefix_cache_are_compared(bench: RealBench, engine: RecordingEngine) -> None:
    bench.measure(items(bench), AHEAD)
    before = engine.resets
    assert bench.check_prefix_cache(items(bench)[1:3], AHEAD)
    assert engine.resets == before + 2
    assert bench.records["uncached", JUDGED, 0, 1] == {"same": True, "same_right": True}
