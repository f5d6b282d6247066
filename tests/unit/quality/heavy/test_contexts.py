"""Which context wins: the lowest KL, and `none` unless another one is clearly better."""

from __future__ import annotations

import random

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName
from kintsugi.quality.contexts import (
    CONTEXTS_MAX,
    PROMPTS_MIN,
    check_contexts,
    choose_context,
    make_probes,
)

NONE = tuple(0.4 + 0.02 * (number % 7) for number in range(16))


def lowered(by: float, spread: float = 0.0, seed: int = 1) -> tuple[float, ...]:
    """KL behind another context: lower by this on average, more or less from prompt to prompt."""
    picks = random.Random(seed)
    return tuple(kl - by + spread * picks.uniform(-1, 1) for kl in NONE)


def test_a_context_that_is_clearly_better_than_none_wins() -> None:
    choice = choose_context({"none": NONE, "sample.txt": lowered(0.1, 0.1)})
    assert choice.context == "sample.txt"
    assert choice.num_prompts == 16
    assert choice.why.startswith("its KL is lower than behind none by 0.1")
    none, sample = choice.tried
    assert none.gain is None
    assert sample.gain is not None
    assert 0 < sample.gain.low < sample.gain.mean < sample.gain.high
    assert sample.gain.mean == pytest.approx(none.kl_mean - sample.kl_mean)


@pytest.mark.parametrize("kl", [lowered(0.01, 0.2), lowered(0.0), lowered(-0.1)])
def test_none_stays_if_the_difference_may_be_chance_or_is_none_at_all(kl: tuple[float, ...]) -> None:
    choice = choose_context({"none": NONE, "bundled": kl})
    assert choice.context == "none"
    assert "nothing is clearly better on 16 prompts" in choice.why


def test_a_lower_mean_that_may_be_chance_does_not_hide_one_that_is_clear() -> None:
    wild = tuple(kl - (1.2 if number == 0 else 0.0) for number, kl in enumerate(NONE))
    trials = {"wild": wild, "clear": lowered(0.05), "none": NONE}
    choice = choose_context(trials)
    assert choice.tried[0].kl_mean < choice.tried[1].kl_mean
    assert choice.context == "clear"


def test_of_several_that_are_clearly_better_the_lowest_wins() -> None:
    trials = {"none": NONE, "a": lowered(0.1), "b": lowered(0.2)}
    assert choose_context(trials).context == "b"


def test_without_none_the_lowest_mean_wins() -> None:
    choice = choose_context({"a": NONE, "b": lowered(0.01, 0.2)})
    assert choice.context == min(choice.tried, key=lambda one: one.kl_mean).context == "b"
    assert all(one.gain is None for one in choice.tried)


def test_contexts_are_compared_on_the_prompts_that_all_of_them_were_probed_on() -> None:
    """Where time ran out, the last prompts of others would decide."""
    behind = (*lowered(0.1)[:12], 9.0, 9.0, 9.0, 9.0)
    choice = choose_context({"none": NONE[:12], "bundled": behind})
    assert (choice.context, choice.num_prompts) == ("bundled", 12)


def test_few_prompts_prefer_no_context() -> None:
    few = PROMPTS_MIN - 1
    trials = {"none": NONE[:few], "bundled": lowered(0.2)[:few]}
    choice = choose_context(trials)
    assert choice.context == "none"
    assert f"{few} prompts are too few" in choice.why


def test_a_context_that_breaks_the_model_loses() -> None:
    broken = (1000.0, *NONE[1:])
    assert choose_context({"none": NONE, "b": broken}).context == "none"
    assert choose_context({"b": broken, "c": NONE}).context == "c"


def test_contexts_with_the_same_tokens_are_refused() -> None:
    check_contexts(["none", "a", "b"], [(), (1, 2), (1, 3)])
    with pytest.raises(InvalidField, match=r"context: copy\.txt is the same context as bundled"):
        check_contexts(["none", "bundled", "copy.txt"], [(), (1, 2), (1, 2)])
    with pytest.raises(InvalidField, match="none is the same context as none; name each context once"):
        check_contexts(["none", "none"], [(), ()])
    many = [str(number) for number in range(CONTEXTS_MAX + 1)]
    with pytest.raises(InvalidField, match=f"at most {CONTEXTS_MAX}"):
        check_contexts(many, [(number,) for number in range(len(many))])


def test_the_probes_are_fixed_and_cheap() -> None:
    reuse, *cheap = make_probes(8)
    assert reuse == Selection(0.0, SelectorName.HKVD, 1)
    assert [one.selector for one in cheap] == [SelectorName.HKVD, SelectorName.QUERY]
    assert all(0 < one.ratio <= 0.15 for one in cheap)
