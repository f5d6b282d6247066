"""Running and comparing, over an engine whose quality is known."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import InvalidField, NotBlendable, ResourceExhausted
from kintsugi.core.plan import Selection
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import metrics
from kintsugi.quality.measure import Bench, answer_tokens, choose_score, measure_selection, tokenize_questions
from kintsugi.quality.questions import Question
from tests.fakes.chat_templates import CHATML, tokenizer_with
from tests.unit.quality.fakes import RIGHT, FakeEngine, WordTokenizer, case, distribution

GOOD, BAD = Selection(0.2), Selection(0.1)


def bench(engine: FakeEngine, count: int = 10, max_tokens: int = 1) -> Bench:
    return Bench(engine, [case(index) for index in range(count)], max_tokens, batch=4)  # type: ignore[arg-type]


def test_each_distinct_chunk_is_stored_once() -> None:
    engine = FakeEngine()
    bench(engine, 3).store_chunks()
    assert engine.saved == [(1, 2, 3), (4, 10), (4, 11), (4, 12)]


def test_a_chunk_that_cannot_be_stored_ends_it() -> None:
    engine = FakeEngine()
    engine.save_outcome = {"outcome": "declined", "reason": "lora: adapters"}
    with pytest.raises(NotBlendable, match="lora: adapters"):
        bench(engine).store_chunks()


def test_a_blend_is_compared_with_full_prefill() -> None:
    one = bench(FakeEngine())
    good = measure_selection(one, GOOD, range(10))
    assert (good.kl_mean, good.cost, good.top1_agreement) == (0.0, pytest.approx(0.2), 1.0)
    assert [score.right for score in good.by_prompt] == [(1.0, 1.0)] * 10
    bad = measure_selection(one, BAD, range(10))
    assert bad.top1_agreement == 0.5
    assert [score.right for score in bad.by_prompt] == [(1.0, 1.0), (0.0, 1.0)] * 5
    wrong = metrics.kl_divergence(distribution(RIGHT, 0.99), distribution(2, 0.99))
    assert bad.kl_mean == pytest.approx(wrong / 2, abs=1e-5)
    assert bad.kl_p99 == pytest.approx(wrong, abs=1e-5)


def test_each_prompt_is_a_pair_of_evidence() -> None:
    good, wrong = measure_selection(bench(FakeEngine()), BAD, range(2)).by_prompt
    tally = good.tally([100, 200])
    assert (tally.loss, tally.answers, tally.cost, tally.sizes) == (0.0, ((0, 1),), 0.1, ((7, 1),))
    lost = wrong.tally([100, 200])
    assert (lost.loss, lost.answers, lost.changed) == (1.0, ((1, 1),), 1.0)


def test_without_answers_exact_match_stays_unknown() -> None:
    one = Bench(FakeEngine(), [case(0, answers=())], 1)  # type: ignore[arg-type]
    (score,) = measure_selection(one, GOOD, [0]).by_prompt
    assert score.right is None
    assert score.tally([4]).answers == ()


def test_full_prefill_runs_once() -> None:
    engine = FakeEngine()
    one = bench(engine)
    measure_selection(one, GOOD, range(10))
    measure_selection(one, BAD, range(10))
    assert sum(prompt.params is None for prompt in engine.submitted) == 10


def test_an_answer_that_parts_is_forced_along_full_prefills() -> None:
    engine = FakeEngine()
    scores = measure_selection(bench(engine, max_tokens=3), BAD, range(10))
    forced = [prompt for prompt in engine.submitted if prompt.forced is not None]
    assert [prompt.forced for prompt in forced] == [(RIGHT,) * 3] * 5
    assert all(prompt.params is not None for prompt in forced)
    assert [len(score.divergences) for score in scores.by_prompt] == [3] * 10
    assert scores.blend[1].text == "w2 w2 w2", "what it says by itself is what is scored"


def test_where_no_answer_is_scored_all_blends_are_forced_in_one_pass() -> None:
    engine = FakeEngine()
    scores = measure_selection(bench(engine, max_tokens=3), BAD, range(10), is_free=False)
    blends = [prompt for prompt in engine.submitted if prompt.params is not None]
    assert [prompt.forced for prompt in blends] == [(RIGHT,) * 3] * 10
    assert scores.top1_agreement == 0.5


@pytest.mark.parametrize(
    ("accounting", "error"),
    [
        ({"outcome": "declined", "reason": "store_timeout: slow"}, NotBlendable),
        ({"outcome": "failed"}, NotBlendable),
        ({"outcome": "blended", "chunks_missed": 1}, ResourceExhausted),
    ],
)
def test_what_was_not_blended_is_not_measured(accounting: dict[str, object], error: type[Exception]) -> None:
    engine = FakeEngine()
    engine.accounting = accounting
    with pytest.raises(error):
        measure_selection(bench(engine), GOOD, range(10))


def test_results_by_task() -> None:
    engine = FakeEngine()
    cases = [case(index, task="alias" if index < 4 else "code") for index in range(10)]
    one = Bench(engine, cases, 1)  # type: ignore[arg-type]
    scores = measure_selection(one, BAD, range(10))
    assert len(scores.of_task("alias").by_prompt) == 4


def test_prompts_that_do_not_fit_are_left_out_with_a_warning() -> None:
    short = Question(("a b c", "d"), "what is it")
    long = Question(("word " * 50,), "what")
    cases, warnings = tokenize_questions([short, long], PromptForm.of(WordTokenizer()), 20, 2)
    assert [one.question for one in cases] == [short]
    assert cases[0].prompt.token_ids == [0, 1, 1, 1, 1, 4, 2, 2]
    assert len(warnings) == 2
    assert "one token" in warnings[0]
    assert "question 2 is left out: it has 54 tokens" in warnings[1]
    with pytest.raises(InvalidField, match=r"none fits the model; .* fewer or shorter chunks"):
        tokenize_questions([long], PromptForm.of(WordTokenizer()), 20, 2)


def test_chunks_are_cut_into_segments_and_prompts_stay_as_they_are() -> None:
    form = PromptForm.of(tokenizer_with(CHATML))
    classes = TokenClasses.of_tokenizer(form.tokenizer)
    passage = "The tide is the slow rise and fall of the sea. " * 20 + "\n\n"
    long, short = Question((f"Tides\n\n{passage}",) * 2, "Why?", bare=True), Question((passage[:40],), "Why?")
    (whole,), _ = tokenize_questions([long], form, 4096, 1)
    (cut,), warnings = tokenize_questions([long, short], form, 4096, 1, classes)
    assert cut.prompt.token_ids == whole.prompt.token_ids
    assert {form.tokenizer.decode(chunk.token_ids) for chunk in cut.prompt.chunks} == {passage}
    assert [form.tokenizer.decode(chunk.separator) for chunk in cut.prompt.chunks] == ["Tides\n\n"] * 2
    assert warnings == ["question 2 is left out: none of its chunks holds a segment, which takes 64 tokens"]
    with pytest.raises(InvalidField, match=r"none fits the model; .* holds a segment"):
        tokenize_questions([short], form, 4096, 1, classes)


def test_questions_are_written_in_the_form_and_whole_endings_are_left_alone() -> None:
    form = PromptForm.of(tokenizer_with(CHATML))
    bare = Question(("Tea.\n", "Salt.\n"), "Why?", bare=True)
    whole = Question(("Tea.\n",), "Q: why")
    cases, _ = tokenize_questions([bare, whole], form, 4096, 1)
    first, second = (form.tokenizer.decode(one.prompt.token_ids) for one in cases)
    head, foot = form.tokenizer.decode(form.head), "<|im_end|>\n<|im_start|>assistant\n"
    assert first == f"{head}Tea.\nSalt.\n\nWhy?{foot}"
    assert second == f"{head}Tea.\nQ: why{foot}"


def test_how_long_answers_are() -> None:
    tokenizer = WordTokenizer()
    assert answer_tokens([Question(("a",), "q", ("attic",))], tokenizer) == 1
    assert answer_tokens([Question(("a",), "q", ("red attic",))], tokenizer) == 10
    assert answer_tokens([Question(("a",), "q")], tokenizer) == 8
    assert answer_tokens([Question(("a",), "q", ("word " * 500,))], tokenizer) == 128


def test_the_token_that_ends_an_answer_is_not_compared() -> None:
    engine = FakeEngine()
    engine.finish_reason = "stop"
    scores = measure_selection(bench(engine, max_tokens=3), BAD, range(10))
    assert [len(score.divergences) for score in scores.by_prompt] == [2] * 10
    assert all(prompt.forced == (RIGHT,) * 2 for prompt in engine.submitted if prompt.forced is not None)
    alone = measure_selection(bench(engine, max_tokens=1), BAD, range(10))
    assert [len(score.divergences) for score in alone.by_prompt] == [1] * 10, (
        "an answer of nothing else keeps it"
    )


def test_exact_match_is_kept_whatever_the_other_answers_are() -> None:
    """One answer of two words changes nothing for the others."""
    cases = [case(0), case(1, ("w5 more",)), case(2, ("x",), "samsum")]
    scores = measure_selection(Bench(FakeEngine(), cases, 1), GOOD, range(3)).by_prompt  # type: ignore[arg-type]
    assert [one.right for one in scores] == [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]


def test_summaries_are_scored_by_rouge_l_and_other_answers_by_f1() -> None:
    other, summary = (choose_score(case(0, task=task).question) for task in ("code", "samsum"))
    assert (other("d c", ["c d"]), summary("d c", ["c d"])) == (1.0, 0.5)


def test_chunks_are_stored_as_they_are_needed() -> None:
    engine = FakeEngine()
    one = bench(engine, 3)
    one.store_chunks([0])
    assert engine.saved == [(1, 2, 3), (4, 10)]
    one.store_chunks([0, 1])
    assert engine.saved == [(1, 2, 3), (4, 10), (4, 11)]
