"""What the scheduler's side measures, by a clock that the test turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kintsugi.engine.protocol import PassSample
from kintsugi.engine.scheduler.stats import REFUSALS_PER_PROBE, TRIAL_FIRST, TRIAL_LAST, Timing


@dataclass
class StubRequest:
    request_id: str
    num_output_tokens: int = 0


@dataclass
class StubNew:
    req_id: str
    num_computed_tokens: int


@dataclass
class StubCached:
    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class StubOutput:
    """As much of vLLM's `SchedulerOutput` as is looked at."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[StubNew] = field(default_factory=list)
    scheduled_cached_reqs: StubCached = field(default_factory=StubCached)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Bench:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.timing = Timing(clock=lambda: self.now_s)

    def step(self, output: Any, seconds: float, ours_in_flight: bool = False) -> None:
        self.timing.step_began(output, ours_in_flight)
        self.now_s += seconds
        self.timing.step_ended()

    def prefill(self, tokens: int, seconds: float, ours_in_flight: bool = False) -> None:
        self.step(StubOutput({"p": tokens}, [StubNew("p", 0)]), seconds, ours_in_flight)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_ttft_runs_from_the_first_look_to_the_end_of_the_step_with_the_first_token(bench: Bench) -> None:
    request: Any = StubRequest("r")
    bench.timing.record_admission(request)
    bench.now_s += 0.5
    bench.timing.record_admission(request)
    bench.timing.record_plan("r", 2.0, is_blend=True)
    bench.step(StubOutput({}), 1.0)
    request.num_output_tokens = 1
    bench.step(StubOutput({"r": 1}), 1.5)
    request.num_output_tokens = 9
    bench.now_s += 7.0
    ttft = bench.timing.forget("r")
    assert ttft is not None
    assert ttft.measured_s == 3.0
    assert ttft.predicted_s == 2.5


def test_a_request_that_ends_with_its_first_token_has_a_ttft(bench: Bench) -> None:
    """vLLM lets it go before the step's end is told."""
    request: Any = StubRequest("r")
    bench.timing.record_admission(request)
    bench.now_s += 1.0
    request.num_output_tokens = 1
    ttft = bench.timing.forget("r")
    assert ttft is not None
    assert ttft.measured_s == 1.0
    assert ttft.predicted_s is None


def test_an_aborted_request_has_none(bench: Bench) -> None:
    request: Any = StubRequest("r")
    bench.timing.record_admission(request)
    assert bench.timing.forget("r") is None
    assert bench.timing.forget("never seen") is None


def test_prefills_are_learnt_where_nothing_of_ours_ran_beside(bench: Bench) -> None:
    bench.prefill(100, 50.0, ours_in_flight=True)
    assert bench.timing.measured.step is None
    for tokens in (100, 200, 400):
        bench.prefill(tokens, tokens / 1000)
    step = bench.timing.measured.step
    assert step is not None
    assert step[0] + step[1] * 300 + step[2] * 300 * 150 == pytest.approx(0.3, rel=0.05)


def test_steps_that_overlap_are_not_counted_twice(bench: Bench) -> None:
    """With asynchronous scheduling the next step begins before the last one has ended."""
    output: Any = StubOutput({"p": 100}, [StubNew("p", 0)])
    for _ in range(4):
        bench.timing.step_began(output, ours_in_flight=False)
        bench.timing.step_began(output, ours_in_flight=False)
        for _ in range(2):
            bench.now_s += 0.1
            bench.timing.step_ended()
    step = bench.timing.measured.step
    assert step is not None
    assert step[0] + step[1] * 100 + step[2] * 5050 == pytest.approx(0.1, rel=0.01)


def test_the_tail_is_what_a_pass_does_not_explain(bench: Bench) -> None:
    request: Any = StubRequest("r")
    bench.timing.record_admission(request)
    bench.timing.record_plan("r", None, is_blend=True)
    bench.now_s += 1.0
    bench.timing.pass_ended("r", PassSample(busy_s=0.7, load_wait_s=0.2, projection_share=0.2))
    bench.now_s += 0.3
    request.num_output_tokens = 1
    bench.timing.forget("r")
    assert bench.timing.measured.tail_s == pytest.approx(0.4)


@pytest.mark.parametrize("other", ["a step", "a pass"])
def test_what_others_compute_meanwhile_is_no_tail(bench: Bench, other: str) -> None:
    request: Any = StubRequest("r")
    bench.timing.record_admission(request)
    bench.timing.record_plan("r", None, is_blend=True)
    if other == "a step":
        bench.prefill(8000, 1.0, ours_in_flight=True)
    else:
        bench.timing.record_plan("later", None, is_blend=True)
    bench.timing.pass_ended("r", PassSample(busy_s=0.1, load_wait_s=0.0, projection_share=0.2))
    bench.step(StubOutput({"r": 1}), 1.0)
    request.num_output_tokens = 1
    bench.timing.forget("r")
    assert bench.timing.measured.tail_s == 0


def test_a_pass_waits_for_those_ahead(bench: Bench) -> None:
    assert bench.timing.ahead_s == 0
    bench.timing.record_plan("one", 3.0, is_blend=True)
    bench.timing.record_plan("plain", 9.0, is_blend=False)
    bench.now_s += 1.0
    assert bench.timing.ahead_s == 2.0
    bench.timing.pass_ended("one", None)
    assert bench.timing.ahead_s == 0


def test_a_blend_that_got_no_cache_blocks_and_then_none_was_needed_holds_up_nobody(bench: Bench) -> None:
    bench.timing.record_plan("one", 3.0, is_blend=True)
    bench.timing.record_plan("one", 1.0, is_blend=False)
    assert bench.timing.ahead_s == 0
    assert bench.timing.is_alone("other")


def test_who_computes_beside_another_is_not_alone(bench: Bench) -> None:
    assert bench.timing.is_alone("me")
    bench.step(StubOutput({"me": 1, "other": 1}), 0.1)
    assert not bench.timing.is_alone("me")
    bench.timing.forget("other")
    assert bench.timing.is_alone("me")
    bench.timing.forget("me")
    bench.timing.record_plan("blend", 1.0, is_blend=True)
    assert bench.timing.is_alone("blend")
    assert not bench.timing.is_alone("me")


def test_now_and_then_a_refusal_is_looked_into(bench: Bench) -> None:
    due = [bench.timing.probe_is_due("loading_is_slower") for _ in range(2 * REFUSALS_PER_PROBE)]
    assert due == [True, *[False] * (REFUSALS_PER_PROBE - 1)] * 2
    assert not bench.timing.probe_is_due("no_chunk_cached")


def test_trials_come_soon_at_first_and_then_rarely(bench: Bench) -> None:
    gaps = []
    for _ in range(8):
        refused = 0
        while not bench.timing.trial_is_due():
            assert not bench.timing.probe_is_due("blending_is_slower")
            refused += 1
        gaps.append(refused)
        bench.timing.record_trial()
    assert gaps == [2, 4, 8, 16, 32, 64, 64, 64]
    assert (gaps[0], gaps[-1]) == (TRIAL_FIRST, TRIAL_LAST)


def test_a_context_behind_cached_tokens_is_attended_to(bench: Bench) -> None:
    cached = StubCached(["c"], [1000])
    for tokens in (50, 100):
        bench.step(StubOutput({"c": tokens}, [], cached), 1e-3 * tokens * 1000)
    step = bench.timing.measured.step
    assert step is not None
    assert step[2] > 0 or step[1] > 0
