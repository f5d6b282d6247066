"""The simulation of mixes notices a prompt that was declined although the store had answered."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kintsugi.core.errors import DeadlineExceeded, Unavailable
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import Span
from kintsugi.engine.local import Generation, Prompt
from tests.simulation.mixed import NAMESPACE, SUSPENDED, Ask, Fault, Mix, MixReport, _Simulation

VICTIM, OTHER = (5, 6), (7, 8)
FULL, BLENDED = -1.0, -2.0
"""Logprobs of the only token, after a full prefill and after a blend."""
DOWN = Unavailable("injected")


def blend_of(chunk: tuple[int, ...]) -> Ask:
    params = KintsugiParams(NAMESPACE, spans=(Span(1, 3),))
    return Ask("blend", Prompt([0, *chunk, 9], params, 1), (chunk,), 0, None)


def answer_of(outcome: str, logprob: float, reason: str = "") -> Generation:
    accounting = {"outcome": outcome, "reason": reason}
    return Generation([3], "", 0.0, [], [logprob], [{3: logprob}], "length", 0, accounting)


class _Solo(_Simulation):
    """Solo runs are as they should be, without an engine."""

    def __init__(self) -> None:
        self.report = MixReport(0)

    def _alone(self, prompt: Prompt, num_cached: int = 0) -> Generation:
        is_blended = prompt.params is not None and prompt.params.spans
        return answer_of("", BLENDED if is_blended else FULL)


def judged(
    fault: Fault, error: Exception, others: list[tuple[Ask, Generation | None]], answer: Generation
) -> MixReport:
    """What is found of the answer to a request without a victim, beside others."""
    ask = blend_of(OTHER)
    asks, answers = [ask, *(one for one, _ in others)], [answer, *(one for _, one in others)]
    simulation = _Solo()
    simulation._judge(Mix(tuple(asks), fault, {VICTIM: 0}, error, 1), answers, ask, answer)
    return simulation.report


HIT = (blend_of(VICTIM), answer_of("failed", FULL))
DECLINED = answer_of("declined", FULL, SUSPENDED)


@pytest.mark.parametrize("error", [DOWN, DeadlineExceeded("injected")])
@pytest.mark.parametrize("hit", [HIT, (blend_of(VICTIM), None)])
def test_a_prompt_may_be_declined_beside_one_that_the_store_did_not_answer(
    error: Exception, hit: tuple[Ask, Generation | None]
) -> None:
    report = judged(Fault.RAISES, error, [hit], DECLINED)
    assert (report.errors, report.declined, report.max_abs_dlogprob) == (0, 1, 0.0)


@pytest.mark.parametrize(
    ("fault", "error", "others", "answer"),
    [
        (Fault.LOST, DOWN, [HIT], DECLINED),
        (Fault.LOST_TWICE, DOWN, [HIT], DECLINED),
        (Fault.SLOW, DOWN, [HIT], DECLINED),
        (Fault.NONE, DOWN, [HIT], DECLINED),
        (Fault.RAISES, OSError("injected"), [HIT], DECLINED),
        (Fault.RAISES, DOWN, [], DECLINED),
        (Fault.RAISES, DOWN, [(blend_of(OTHER), None)], DECLINED),
        (Fault.RAISES, DOWN, [(blend_of(VICTIM), answer_of("blended", BLENDED))], DECLINED),
        (Fault.RAISES, DOWN, [HIT], answer_of("declined", FULL, "no_chunk_cached: none")),
        (Fault.RAISES, DOWN, [HIT], answer_of("failed", BLENDED)),
    ],
)
def test_any_other_prompt_that_was_not_blended_is_an_error(
    fault: Fault, error: Exception, others: list[tuple[Ask, Generation | None]], answer: Generation
) -> None:
    assert judged(fault, error, others, answer).errors == 1


@pytest.mark.parametrize(
    ("outcome", "logprob", "twins", "deviation"),
    [
        ("declined", BLENDED, [], 1.0),
        ("declined", BLENDED, ["blended"], 0.0),
        ("declined", FULL, ["blended"], 0.0),
        ("prefix_hit", FULL, [], 1.0),
        ("prefix_hit", FULL, ["blended"], 1.0),
        ("prefix_hit", FULL, ["declined"], 0.0),
        ("prefix_hit", BLENDED, ["declined"], 0.0),
        ("blended", FULL, ["declined"], 1.0),
    ],
)
def test_an_answer_is_a_blend_or_a_full_prefill_as_it_and_equal_requests_ended(
    outcome: str, logprob: float, twins: list[str], deviation: float
) -> None:
    equal: list[tuple[Ask, Generation | None]] = [
        (blend_of(OTHER), answer_of(twin, FULL, SUSPENDED)) for twin in twins
    ]
    report = judged(Fault.RAISES, DOWN, [HIT, *equal], answer_of(outcome, logprob, SUSPENDED))
    assert (report.errors, report.max_abs_dlogprob) == (0, deviation)
