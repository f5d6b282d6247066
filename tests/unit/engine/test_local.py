"""The local engine's own part, over a scripted vLLM: timing, merging deltas, bounds, checks."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.errors import DeadlineExceeded, InvalidField, NotFound, Unavailable
from kintsugi.core.request import Op
from kintsugi.core.spaces import Span
from kintsugi.engine import local
from kintsugi.engine.local import LocalEngine, Prompt, save_prompt, transfer_config


def delta(request_id: str, token: int, *, finished: bool = False, params: Any = None) -> SimpleNamespace:
    logprobs = [{token: SimpleNamespace(logprob=-0.5), 99: SimpleNamespace(logprob=-1.5)}]
    completion = SimpleNamespace(
        token_ids=[token], text=f"<{token}>", logprobs=logprobs, finish_reason="length" if finished else None
    )
    return SimpleNamespace(
        request_id=request_id,
        outputs=[completion],
        finished=finished,
        kv_transfer_params=params,
        num_cached_tokens=None,
    )


class ScriptedEngine:
    """`LLMEngine` whose steps are given."""

    def __init__(self, *steps: list[SimpleNamespace]) -> None:
        self.steps = deque(steps)
        self.requests: dict[str, tuple[Any, Any]] = {}
        self.aborted: list[str] = []
        self.model_config = SimpleNamespace(max_model_len=32)

    def add_request(self, request_id: str, prompt: Any, sampling: Any) -> None:
        self.requests[request_id] = (prompt, sampling)

    def step(self) -> list[SimpleNamespace]:
        return self.steps.popleft() if self.steps else []

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def engine_of(*steps: list[SimpleNamespace]) -> tuple[LocalEngine, ScriptedEngine]:
    scripted = ScriptedEngine(*steps)
    return LocalEngine(SimpleNamespace(llm_engine=scripted)), scripted


def submit_nothing(*_: Any) -> None:
    """In place of `_submit`, which imports vLLM."""


def test_deltas_become_generations_in_the_order_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "_submit", submit_nothing)
    engine, _ = engine_of(
        [],
        [delta("local-1", 7)],
        [delta("local-0", 3), delta("local-1", 8, finished=True, params={"kintsugi": {"ratio": 0.5}})],
        [delta("local-0", 4, finished=True)],
    )
    first, second = engine.generate([Prompt([1, 2]), Prompt([3])])
    assert (first.token_ids, first.text, first.accounting) == ([3, 4], "<3><4>", None)
    assert (second.token_ids, second.accounting) == ([7, 8], {"ratio": 0.5})
    assert second.logprobs == [-0.5, -0.5]
    assert second.top_logprobs[0] == {7: -0.5, 99: -1.5}
    assert 0 < second.ttft_s < first.ttft_s
    assert len(first.itl_s) == 1
    assert first.itl_s[0] >= 0


def test_request_ids_are_never_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "_submit", submit_nothing)
    engine, _ = engine_of([delta("local-0", 1, finished=True)], [delta("local-1", 2, finished=True)])
    assert engine.generate([Prompt([1])])[0].token_ids == [1]
    assert engine.generate([Prompt([1])])[0].token_ids == [2]


def test_an_engine_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "_submit", submit_nothing)
    engine, scripted = engine_of()
    with pytest.raises(DeadlineExceeded):
        engine.generate([Prompt([1]), Prompt([2])], timeout_s=0.01)
    assert scripted.aborted == ["local-0", "local-1"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (Prompt([]), "token_ids"),
        (Prompt([1], max_tokens=0), "max_tokens"),
        (Prompt([1] * 30, max_tokens=3), "token_ids"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_is_submitted(prompt: Prompt, field: str) -> None:
    engine, scripted = engine_of()
    with pytest.raises(InvalidField) as caught:
        engine.generate([Prompt([1]), prompt])
    assert caught.value.field == f"prompts[1].{field}"
    assert scripted.requests == {}


def test_a_save_asks_for_one_token_behind_its_chunk() -> None:
    prompt = save_prompt([0], [5, 6], "tenant")
    assert list(prompt.token_ids) == [0, 5, 6, 6]
    assert prompt.max_tokens == 1
    assert prompt.params is not None
    assert (prompt.params.op, prompt.params.spans) == (Op.SAVE, (Span(1, 3),))
    with pytest.raises(InvalidField, match="empty chunk"):
        save_prompt([0], [], "tenant")


def test_the_transfer_config_recomputes_what_cannot_be_loaded() -> None:
    config = transfer_config({"store": "ram://x"})
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"store": "ram://x"}


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not a folder"):
        LocalEngine.start(tmp_path / "absent")


def test_a_busy_prefix_cache_is_unavailable() -> None:
    steps: list[int] = []
    core = SimpleNamespace(step=lambda: steps.append(1))
    engine = LocalEngine(SimpleNamespace(reset_prefix_cache=lambda: False, llm_engine=core))
    with pytest.raises(Unavailable, match="running requests"):
        engine.reset_prefix_cache()
    assert steps == [1], "a step that was in flight has ended"


def test_closing_twice_is_closing_once() -> None:
    stops: list[int] = []
    core = SimpleNamespace(shutdown=lambda: stops.append(1))
    with LocalEngine(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))) as engine:
        engine.close()
    assert stops == [1]


def test_steps_that_compute_nothing_leave_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "_submit", submit_nothing)
    slept_s: list[float] = []
    monkeypatch.setattr("kintsugi.engine.local.time.sleep", slept_s.append)
    engine, _ = engine_of([], [], [delta("local-0", 7, finished=True)])
    assert engine.generate([Prompt([1, 2], max_tokens=1)])[0].token_ids == [7]
    assert slept_s == [local.IDLE_S] * 2


def test_a_closed_engine_returns_its_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next engine of the process gets as much."""
    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: calls.append("emptied"))
    engine, scripted = engine_of()
    scripted.engine_core = SimpleNamespace(shutdown=lambda: calls.append("shut down"))  # type: ignore[attr-defined]
    engine.close()
    engine.close()
    assert calls == ["shut down", "emptied"]
