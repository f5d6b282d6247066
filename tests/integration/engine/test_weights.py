"""Which of vLLM's calls leave stored chunks valid, and what an engine does once its weights have changed."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.engine.local import LocalEngine, Prompt, save_prompt
from kintsugi.engine.worker.side import WorkerSide
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask_cold,
    chunks_of,
    rag,
    ram_store,
)
from tests.integration.engine.test_failures import blocks_in_use

pytestmark = pytest.mark.engine("tiny-llama")

SHAPE = "tiny-llama"
CHUNKS = chunks_of(100, 130, seed=41)
STEPS_MAX = 1000


@pytest.fixture
def saved(engine_slot: EngineSlot) -> tuple[LocalEngine, Rag]:
    engine = engine_slot.get(SHAPE)
    engine.save(PREFIX, CHUNKS, NAMESPACE)
    return engine, rag(*CHUNKS)


def worker_of() -> WorkerSide:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    side: WorkerSide = connector._worker
    return side


def test_calls_that_leave_the_weights_alone_leave_the_chunks_valid(saved: tuple[LocalEngine, Rag]) -> None:
    engine, prompt = saved
    core = engine.llm.llm_engine.engine_core.engine_core

    def reset_prefix_cache() -> None:
        assert engine.llm.reset_prefix_cache(reset_connector=True)

    def pause_and_resume() -> None:
        core.pause_scheduler(mode="abort", clear_cache=True)
        core.resume_scheduler()

    def sleep_and_wake_up() -> None:
        # A CPU's worker ignores it; the scheduler resets its caches as on GPUs.
        core.sleep(level=1)
        core.wake_up()

    for act in (reset_prefix_cache, pause_and_resume, sleep_and_wake_up):
        act()
        accounting = ask_cold(engine, prompt.token_ids, prompt.params(0.2)).accounting or {}
        assert (accounting["outcome"], accounting["chunks_hit"]) == ("blended", 2), act


@pytest.mark.engine("tiny-llama", ends=True)
@pytest.mark.parametrize("running", ["blend", "save"])
def test_after_a_reload_nothing_is_blended_or_saved(
    saved: tuple[LocalEngine, Rag], engine_slot: EngineSlot, running: str
) -> None:
    engine, prompt = saved
    full = ask_cold(engine, prompt.token_ids)
    engine.reset_prefix_cache()
    (fresh,) = chunks_of(90, seed=42)
    saving = save_prompt(PREFIX, fresh, NAMESPACE)
    blending = Prompt(prompt.token_ids, prompt.params(0.2), 8, ignore_eos=True)
    stored = set(ram_store(SHAPE)._chunks)
    worker = worker_of()
    worker._slice_tokens = 1  # many steps for one pass
    engine._submit("running", blending if running == "blend" else saving)
    step_until_it_runs(engine, worker)
    try:
        engine.llm.collective_rpc("reload_weights")
        first = finished(engine)
        assert first["outcome"] == "failed"
        assert first["reason"].startswith("weights_changed: ")
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        for asked in (blending, saving):
            (answer,) = engine.generate([asked])
            accounting = answer.accounting or {}
            assert accounting["outcome"] == "declined"
            assert accounting["reason"].startswith("weights_changed: ")
            assert asked is saving or answer.token_ids == full.token_ids
        assert set(ram_store(SHAPE)._chunks) == stored
        assert blocks_in_use(engine) == 0
    finally:
        engine_slot.close()


def step_until_it_runs(engine: LocalEngine, worker: WorkerSide) -> None:
    for _ in range(STEPS_MAX):
        engine.llm.llm_engine.step()
        if worker._blends or worker._save is not None:
            return
    raise AssertionError("the pass has not begun")


def finished(engine: LocalEngine) -> dict[str, Any]:
    """The accounting of the one request that runs."""
    for _ in range(STEPS_MAX):
        for output in engine.llm.llm_engine.step():
            if output.finished:
                accounting: dict[str, Any] = output.kv_transfer_params["kintsugi"]
                return accounting
    raise AssertionError("the request has not ended")
