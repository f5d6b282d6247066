"""The section that compares selectors on a model of another family: what it picks, says and trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.support.family import NOTHING, compare, divergences, pick_each, train_once
from benchmarks.support.quality_curve import exact, exact_mean
from benchmarks.testbed.generator import Shape
from benchmarks.testbed.recipes import RECIPES, Stage
from kintsugi.core.plan import RagPrompt, Selection
from kintsugi.core.request import SelectorName
from kintsugi.quality.measure import Case, CaseAnswer, Scores
from kintsugi.quality.questions import Question

HKVD, DEEPER = Selection(0.1), Selection(0.05, check_layer=2)
QUERY = Selection(0.2, SelectorName.QUERY)


def scores_of(selection: Selection, texts: str, sure: float) -> Scores:
    """Full prefill answers "a" to each question; the blend says `texts`, with `sure` as "a"'s logprob."""
    question = Question(("chunk",), "what", ("a",), "alias")
    case = Case(question, RagPrompt((), (), ()))
    full = CaseAnswer("a", (1,), ({1: -0.1, 2: -2.4},), 1.0, 0.0)
    blends = [CaseAnswer(text, (1,), ({1: sure, 2: -3.0},), 0.2, 0.0) for text in texts]
    return Scores(selection, [case] * len(texts), [full] * len(texts), blends)


def test_each_selector_is_picked_once_and_the_best_is_first() -> None:
    curve = [scores_of(HKVD, "ab", -6.0), scores_of(QUERY, "aa", -1.0), scores_of(DEEPER, "ab", -3.0)]
    by_match = pick_each(curve, lambda one: -exact_mean(one))
    assert list(by_match.items()) == [(SelectorName.QUERY, QUERY), (SelectorName.HKVD, DEEPER)]
    by_kl = pick_each([*curve, scores_of(HKVD, "bb", -0.1)], lambda one: one.kl_mean)
    assert list(by_kl) == [SelectorName.HKVD, SelectorName.QUERY]


def test_the_order_is_that_of_the_judged_prompts() -> None:
    scores = {
        NOTHING: scores_of(NOTHING, "bbbb", -6.0),
        HKVD: scores_of(HKVD, "aaab", -1.0),
        QUERY: scores_of(QUERY, "aabb", -3.0),
    }
    picks: dict[str, Selection] = {SelectorName.QUERY: QUERY, SelectorName.HKVD: HKVD}
    right = exact(scores[NOTHING], of_blend=False)
    figures = compare("em", scores, picks, exact, right, largest_wins=True)
    assert [(one.name, one.value, one.bar) for one in figures] == [
        ("em", 0.5, None),
        ("em_hkvd", 0.75, None),
        ("em_query", 0.5, None),
    ]
    assert "order hkvd query; the first differs from the second by 0.250 [" in figures[0].detail
    figures = compare("kl", scores, picks, divergences, divergences(scores[NOTHING]))
    assert [one.name for one in figures] == ["kl", "kl_hkvd", "kl_query"]
    assert figures[0].value == figures[2].value


def test_a_model_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINTSUGI_CACHE", str(tmp_path))
    shape = replace(RECIPES["qwen3"].shape, intermediate_size=96, num_hidden_layers=6)
    recipe = replace(RECIPES["qwen3"], shape=shape, stages=(Stage(1, 112, 1, Shape((2, 3), (1, 2), (0, 1))),))
    folder = train_once(recipe)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "state.pt").exists()
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert train_once(recipe) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert train_once(replace(recipe, seed=2)) != folder
