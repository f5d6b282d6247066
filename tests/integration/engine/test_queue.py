"""Many blends at once: few of them hold cache blocks, the same one is computed once, and all are answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kintsugi.engine.local import LocalEngine, Prompt, _Running, save_prompt
from kintsugi.store.client.ram import RamStore
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask_cold,
    chunks_of,
    max_dlogprob,
    rag,
    random_tokens,
)
from tests.simulation.mixed import blocks_in_use

pytestmark = pytest.mark.engine("tiny-llama")

SIZES = (100, 257, 64)
PLACES = 8
STEPS_MAX = 5_000


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    engine = engine_slot.get("tiny-llama")
    engine.save(PREFIX, chunks_of(*SIZES, seed=11), NAMESPACE)
    return engine


@pytest.fixture
def steps(engine: LocalEngine) -> Iterator[Steps]:
    engine.reset_prefix_cache()
    yield Steps(engine)
    assert blocks_in_use(engine) == 0


class Steps:
    """Steps the engine, and looks at it in between."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.running: dict[str, _Running] = {}
        self.parked_max = 0
        self.ended: list[str] = []

    def submit(self, name: str, prompt: Prompt) -> None:
        self.running[name] = _Running(0.0)
        self.engine._submit(name, prompt)

    def abort(self, name: str) -> None:
        del self.running[name]
        self.engine.llm.llm_engine.abort_request([name])

    @property
    def parked(self) -> list[Any]:
        """vLLM's requests that hold blocks and do not run."""
        return list(self.engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_holding_waiting)

    def step(self) -> None:
        for output in self.engine.llm.llm_engine.step():
            if output.request_id in self.running:
                self.running[output.request_id].take(output, 0.0)
                if output.finished:
                    self.ended.append(output.request_id)
        self.parked_max = max(self.parked_max, len(self.parked))

    def run(self) -> dict[str, Any]:
        """Step until everybody is answered."""
        for _ in range(STEPS_MAX):
            if not self.engine.llm.llm_engine.has_unfinished_requests():
                return {name: one.generation for name, one in self.running.items()}
            self.step()
        raise AssertionError(f"only {self.ended} ended within {STEPS_MAX} steps")


def prompt_of(prompt: Rag, ratio: float = 0.2, max_tokens: int = 4) -> Prompt:
    return Prompt(prompt.token_ids, prompt.params(ratio), max_tokens, top_logprobs=5, ignore_eos=True)


def outcomes(answers: dict[str, Any]) -> list[str]:
    return [answer.accounting["outcome"] for answer in answers.values()]


def arranged(index: int) -> Rag:
    """A prompt whose blend nobody else can use."""
    first, second, third = chunks_of(*SIZES, seed=11)
    arrangement = rag(*((first, second, third), (third, second), (second, first))[index % 3])
    arrangement.pieces = [("gap", random_tokens(40, 400 + index)), *arrangement.pieces]
    return arrangement


def test_a_crowd_of_blends_parks_few_of_them(steps: Steps) -> None:
    for index in range(24):
        steps.submit(f"crowd-{index}", prompt_of(arranged(index)))
    steps.submit("plain", Prompt(random_tokens(200, 5), None, 1, ignore_eos=True))
    answers = steps.run()
    assert 0 < steps.parked_max <= PLACES
    del answers["plain"]
    assert outcomes(answers) == ["blended"] * 24
    assert steps.ended.index("plain") < 8, "a plain prompt waits for none of them"


def test_identical_prompts_are_blended_once(engine: LocalEngine, steps: Steps) -> None:
    prompt = rag(*chunks_of(*SIZES, seed=11))
    for index in range(4):
        steps.submit(f"same-{index}", prompt_of(prompt, ratio=1.0, max_tokens=8))
    answers = steps.run()
    assert sorted(outcomes(answers)) == ["blended", "prefix_hit", "prefix_hit", "prefix_hit"]
    alone = ask_cold(engine, prompt.token_ids)
    for answer in answers.values():
        assert answer.token_ids == alone.token_ids
        assert max_dlogprob(alone, answer) <= 0.01


def test_when_the_first_of_identical_prompts_is_aborted_the_others_go_on(
    engine: LocalEngine, steps: Steps
) -> None:
    prompt = rag(*chunks_of(*SIZES, seed=11))
    for name in ("first", "second", "third"):
        steps.submit(name, prompt_of(prompt, ratio=1.0))
    for _ in range(STEPS_MAX):
        if steps.parked:
            break
        steps.step()
    assert [request.request_id.split("-")[0] for request in steps.parked] == ["first"]
    steps.abort("first")
    answers = steps.run()
    assert steps.ended == ["second", "third"]
    # The third follows the second, unless it had its store's answer in time to wait for the first.
    assert outcomes(answers)[0] == "blended"
    assert outcomes(answers)[1] in ("blended", "prefix_hit")
    alone = ask_cold(engine, prompt.token_ids, max_tokens=4)
    assert [answer.token_ids for answer in answers.values()] == [alone.token_ids] * 2


def in_flight(engine: LocalEngine) -> list[bool]:
    """Whether each parked request's blend still runs."""
    return [state.in_flight for state in engine._scheduler._states.values() if state.block_ids]


@pytest.mark.composed("pause")
@pytest.mark.parametrize("has_ended", [False, True])
def test_the_cache_is_emptied_while_blends_hold_blocks(
    has_ended: bool, engine: LocalEngine, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `/pause?mode=keep` and `/reset_prefix_cache?reset_running_requests=true` do."""
    core = engine.llm.llm_engine.engine_core.engine_core
    arrives = threading.Event()
    stream = RamStore.stream

    def late(self: RamStore, *args: Any, **kwargs: Any) -> Any:
        assert arrives.wait(60.0)
        return stream(self, *args, **kwargs)

    monkeypatch.setattr(RamStore, "stream", late)
    prompts = [arranged(0), arranged(1)]
    for index, prompt in enumerate(prompts):
        steps.submit(f"kept-{index}", prompt_of(prompt, ratio=1.0))
    steps.submit("save", save_prompt(PREFIX, random_tokens(90, 77), NAMESPACE))
    while len(steps.parked) < 2 or True not in in_flight(engine):
        steps.step()
    if has_ended:
        arrives.set()
        while False not in in_flight(engine):
            steps.step()
    core.pause_scheduler("keep")
    assert core.is_scheduler_paused()
    arrives.set()
    core.resume_scheduler()
    answers = steps.run()
    del answers["save"]
    assert "failed" in outcomes(answers)
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        if answer.accounting["outcome"] == "failed":
            assert answer.accounting["reason"].startswith("cache_reset: ")
        alone = ask_cold(engine, prompt.token_ids, max_tokens=4)
        assert answer.token_ids == alone.token_ids
        assert max_dlogprob(alone, answer) <= 0.01
    again = ask_cold(engine, prompts[0].token_ids, prompts[0].params(1.0))
    assert (again.accounting or {})["outcome"] == "blended"
