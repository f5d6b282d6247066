"""Lost chunks, stuck stores, aborts, bad input: the engine keeps running and says what happened."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kintsugi.core.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.engine.worker import side as worker
from kintsugi.engine.worker.stack import VllmStack
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.breaker import FAILURES_MAX, CircuitBreaker
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask,
    ask_cold,
    chunks_of,
    max_dlogprob,
    rag,
    ram_store,
)

pytestmark = pytest.mark.engine("tiny-llama")

SHAPE = "tiny-llama"


@pytest.fixture(scope="module")
def chunks() -> list[list[int]]:
    return chunks_of(100, 257, 64, seed=4)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, chunks: list[list[int]]) -> LocalEngine:
    engine = engine_slot.get(SHAPE)
    engine.save(PREFIX, chunks, NAMESPACE)
    return engine


Frames = Iterator[LayerFrame | ChunkLost]


Through = Callable[[int, Sequence[ChunkKey], Frames], Frames]


@pytest.fixture
def stream_through(monkeypatch: pytest.MonkeyPatch) -> Callable[[Through], None]:
    """Put a filter between the store and the engine: called with the number of streams before, and the keys
    of this one. On a GPU each of a loader's threads has a stream, with a share of the chunks."""

    def install(through: Through) -> None:
        store, opened = ram_store(SHAPE), []
        original = RamStore.stream

        def stream(
            self: RamStore,
            namespace: str,
            keys: Sequence[ChunkKey],
            layers: range,
            heads: HeadRange,
            deadline_s: float,
        ) -> Frames:
            opened.append(1)
            return through(len(opened) - 1, keys, original(self, namespace, keys, layers, heads, deadline_s))

        monkeypatch.setattr(type(store), "stream", stream)

    return install


def losing(layer: int, *chunks: ChunkKey) -> Through:
    """Lose the first chunk from a layer of the first pass on, the second one in the second pass."""
    passes: Counter[ChunkKey] = Counter()

    def through(_count: int, keys: Sequence[ChunkKey], frames: Frames) -> Frames:
        lost = {at for at, key in enumerate(keys) if chunks[passes[key] : passes[key] + 1] == (key,)}
        passes.update(keys)
        for frame in frames:
            if frame.chunk not in lost or frame.layer < layer:
                yield frame
            elif frame.layer == layer:
                yield ChunkLost(frame.chunk, layer, "injected")

    return through


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_chunk_lost_at_any_layer_is_computed_instead(
    engine: LocalEngine, chunks: list[list[int]], stream_through: Any, layer: int
) -> None:
    prompt = rag(*chunks)
    stream_through(losing(layer, ChunkKey.of(engine.space(NAMESPACE), chunks[1])))
    survived = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert survived.accounting is not None
    assert survived.accounting["outcome"] == "blended", survived.accounting
    assert survived.accounting["restarts"] == 1
    assert "injected" in survived.accounting["reason"]
    stream_through(lambda _count, _keys, frames: frames)
    planned = prompt.params(0.0)
    without = tuple(span for index, span in enumerate(planned.spans or ()) if index != 1)
    expected = ask_cold(engine, prompt.token_ids, type(planned)(NAMESPACE, spans=without, ratio=0.0))
    assert max_dlogprob(expected, survived) == 0.0


def test_a_second_loss_hands_the_prompt_to_the_engine(
    engine: LocalEngine, chunks: list[list[int]], stream_through: Any
) -> None:
    prompt, space = rag(*chunks), engine.space(NAMESPACE)
    full = ask_cold(engine, prompt.token_ids)
    stream_through(losing(1, *(ChunkKey.of(space, chunk) for chunk in chunks[:2])))
    failed = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert failed.accounting is not None
    assert failed.accounting["outcome"] == "failed"
    assert failed.accounting["restarts"] == 1, failed.accounting
    assert max_dlogprob(full, failed) <= 0.01


@pytest.mark.parametrize("error", [Unavailable("down"), DeadlineExceeded("late")])
def test_a_store_that_fails_is_survived(
    engine: LocalEngine, chunks: list[list[int]], stream_through: Any, error: Exception
) -> None:
    def failing(_count: int, _keys: Sequence[ChunkKey], frames: Frames) -> Frames:
        yield next(frames)
        raise error

    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    stream_through(failing)
    failed = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert failed.accounting is not None
    assert failed.accounting["outcome"] == "failed"
    assert type(error).__name__ in failed.accounting["reason"]
    assert max_dlogprob(full, failed) <= 0.01


def test_a_store_that_does_not_answer_is_left_alone_for_a_while(
    engine: LocalEngine, chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, lookups = rag(*chunks), []

    def down(*_arguments: object) -> None:
        lookups.append(1)
        raise Unavailable("down")

    with monkeypatch.context() as patch:
        patch.setattr(RamStore, "find", down)
        for _ in range(FAILURES_MAX + 3):
            declined = ask_cold(engine, prompt.token_ids, prompt.params(0.2), max_tokens=1)
            assert declined.accounting is not None
            assert declined.accounting["reason"].startswith("store_unavailable")
    assert len(lookups) <= 2, "one prompt asks, and at once a thread"
    engine._scheduler._lookups._breaker = CircuitBreaker(failures_max=1)  # as if the while were over
    blended = ask_cold(engine, prompt.token_ids, prompt.params(0.2), max_tokens=1)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended"


def test_a_store_that_hangs_in_the_middle_of_layer_3_costs_one_prompt_its_deadline(
    engine: LocalEngine, chunks: list[list[int]], stream_through: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, answers_again = threading.Event(), threading.Event()
    find = RamStore.find

    def hanging(count: int, _keys: Sequence[ChunkKey], frames: Frames) -> Frames:
        for frame in frames:
            if frame.layer == 3 and (count or frame.chunk):
                hangs.set()
                assert answers_again.wait(60)
            yield frame

    def find_unless_hanging(self: RamStore, namespace: str, keys: Sequence[ChunkKey]) -> Any:
        assert not hangs.is_set() or answers_again.wait(60)
        return find(self, namespace, keys)

    prompt, lookups = rag(*chunks), engine._scheduler._lookups
    full = ask_cold(engine, prompt.token_ids)
    stream_through(hanging)
    with monkeypatch.context() as patch:
        patch.setattr(RamStore, "find", find_unless_hanging)
        worker_side = get_kv_transfer_group()._worker
        patch.setattr(
            worker_side, "_config", dataclasses.replace(worker_side._config, layer_deadline_ms=3_000)
        )
        first, *others = [ask_cold(engine, prompt.token_ids, prompt.params(0.2)) for _ in range(4)]
        answers_again.set()
        while not lookups._breaker.is_closed:  # The probe that began with the failure is answered.
            lookups._prober.submit(int).result(10)
    assert first.accounting is not None
    assert (first.accounting["outcome"], first.accounting["restarts"]) == ("failed", 0)
    assert first.accounting["reason"].startswith("load_timeout: layer 3")
    for other in others:
        assert other.accounting is not None
        assert other.accounting["reason"].startswith("store_unavailable: the store failed recently")
    assert all(max_dlogprob(full, answer) <= 0.01 for answer in (first, *others))
    stream_through(lambda _count, _keys, frames: frames)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(0.2))
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended"


def test_requests_beside_a_stuck_store_are_served(
    engine: LocalEngine, chunks: list[list[int]], stream_through: Any
) -> None:
    opened = threading.Event()

    def stuck(_count: int, _keys: Sequence[ChunkKey], frames: Frames) -> Frames:
        assert opened.wait(60)
        yield from frames

    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    stream_through(stuck)
    engine.reset_prefix_cache()
    llm = engine.llm.llm_engine
    engine._submit("blend", Prompt(prompt.token_ids, prompt.params(1.0), 4, top_logprobs=5, ignore_eos=True))
    engine._submit("plain", Prompt(prompt.token_ids, None, 4, ignore_eos=True))
    finished: list[str] = []
    while "plain" not in finished:
        finished += [output.request_id for output in llm.step() if output.finished]
    assert finished == ["plain"]
    opened.set()
    tokens: list[int] = []
    while llm.has_unfinished_requests():
        for output in llm.step():
            tokens += output.outputs[0].token_ids
    assert tokens == full.token_ids[:4]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_an_aborted_blend_gives_its_blocks_back(
    engine: LocalEngine, chunks: list[list[int]], steps: int
) -> None:
    prompt = rag(*chunks)
    engine.reset_prefix_cache()
    llm = engine.llm.llm_engine
    engine._submit("aborted", Prompt(prompt.token_ids, prompt.params(0.5), 8, ignore_eos=True))
    for _ in range(steps):
        llm.step()
    llm.abort_request(["aborted"])
    after = ask(engine, prompt.token_ids, prompt.params(1.0))
    assert max_dlogprob(ask_cold(engine, prompt.token_ids), after) <= 0.01
    assert blocks_in_use(engine) == 0


def blocks_in_use(engine: LocalEngine) -> int:
    core = engine.llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


BAD = {
    "overlap": ({"spans": [[1, 50], [40, 60]]}, "spans[1]"),
    "outside": ({"spans": [[1, 5000]]}, "spans[0]"),
    "empty span": ({"spans": [[5, 5]]}, "spans[0]"),
    "negative": ({"spans": [[-4, 5]]}, "spans[0]"),
    "another space's key": ({"spans": [[1, 50, "ab" * 32]]}, "spans[0].key"),
    "short key": ({"spans": [[1, 50, "abcd"]]}, "key"),
    "ratio": ({"ratio": 1.5}, "ratio"),
    "not a number": ({"ratio": float("nan")}, "ratio"),
    "selector": ({"selector": "best"}, "selector"),
    "unknown field": ({"ration": 0.1}, "did you mean 'ratio'"),
    "no namespace": ({"namespace": ""}, "namespace"),
    "version": ({"version": 9}, "version"),
    "save far from the prefix": ({"op": "save", "spans": [[5, 50]]}, "spans[0]"),
    "save to the end": ({"op": "save", "spans": [[1, 439]]}, "spans[0]"),
    "not a mapping": (7, "mapping"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_declined_with_the_field_and_the_prompt_is_answered(
    engine: LocalEngine, chunks: list[list[int]], name: str
) -> None:
    from vllm import SamplingParams

    values, named = BAD[name]
    wire = {"namespace": NAMESPACE, **values} if isinstance(values, dict) else values
    prompt = rag(*chunks).token_ids
    sampling = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, extra_args={"kv_transfer_params": {"kintsugi": wire}}
    )
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    accounting = output.kv_transfer_params["kintsugi"]
    assert accounting["outcome"] == "declined"
    assert named in accounting["reason"]
    assert list(output.outputs[0].token_ids) == ask_cold(engine, prompt).token_ids[:4]


def test_prompt_logprobs_are_declined(engine: LocalEngine, chunks: list[list[int]]) -> None:
    from vllm import SamplingParams

    prompt = rag(*chunks)
    sampling = SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=1,
        extra_args={"kv_transfer_params": prompt.params(0.2).to_mapping()},
    )
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt.token_ids}], sampling, use_tqdm=False)
    assert output.kv_transfer_params["kintsugi"]["reason"].startswith("prompt_logprobs")


def test_off_means_off(engine: LocalEngine, chunks: list[list[int]]) -> None:
    from vllm import SamplingParams

    wire = {"kintsugi": {"namespace": NAMESPACE, "op": "off"}}
    sampling = SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": wire})
    (output,) = engine.llm.generate([{"prompt_token_ids": rag(*chunks).token_ids}], sampling, use_tqdm=False)
    assert output.kv_transfer_params is None


def test_nothing_is_asked_of_the_store_to_account(
    engine: LocalEngine, chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard may be gone by the time a blend that it fed is accounted for."""

    def gone(_store: RamStore) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(RamStore, "stats", gone)
    prompt = rag(*chunks)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(0.2))
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended"


@pytest.mark.parametrize("error", [ResourceExhausted("full"), MemoryError("out")])
def test_a_chunk_that_cannot_be_stored_costs_only_itself(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_arguments: object) -> bool:
        raise error

    monkeypatch.setattr(RamStore, "put", refuse)
    (chunk,) = chunks_of(50, seed=31)
    (saved,) = engine.save(PREFIX, [chunk], NAMESPACE)
    assert saved.accounting is not None
    assert saved.accounting["outcome"] == "failed"
    assert type(error).__name__ in saved.accounting["reason"]
    assert blocks_in_use(engine) == 0


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has none")
FAILURES = [(RuntimeError("broken"), "defect: RuntimeError: broken"), (NO_MEMORY, "device_memory: CUDA out")]


@pytest.mark.parametrize("method", ["__init__", "write_kv"])
@pytest.mark.parametrize(("error", "reason"), FAILURES)
def test_a_defect_in_a_pass_costs_one_blend(
    engine: LocalEngine,
    chunks: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    error: Exception,
    reason: str,
) -> None:
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)

    def broken(*_arguments: object, **_keywords: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(VllmStack, method, broken)
        failed = ask_cold(engine, prompt.token_ids, prompt.params(0.2))
    assert failed.accounting is not None
    assert failed.accounting["outcome"] == "failed"
    assert failed.accounting["reason"].startswith(reason)
    assert failed.token_ids == full.token_ids
    again = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert max_dlogprob(full, again) <= 0.01


def test_a_blend_that_needs_more_memory_than_there_is_costs_a_prefill(
    engine: LocalEngine, chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    worker = connector._worker
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_room_bytes", 1 << 20)
        refused = ask_cold(engine, prompt.token_ids, prompt.params(0.2))
        assert worker._room_bytes == 1 << 20
    assert refused.accounting is not None
    assert refused.accounting["outcome"] == "failed"
    assert refused.accounting["reason"].startswith("device_memory: ")
    assert refused.token_ids == full.token_ids


@pytest.mark.parametrize("method", ["__init__", "run_layer"])
@pytest.mark.parametrize(("error", "reason"), FAILURES)
def test_a_defect_in_a_save_costs_its_chunks(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, reason: str
) -> None:
    fresh = chunks_of(40, 60, seed=33)

    def broken(*_arguments: object, **_keywords: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(VllmStack, method, broken)
        failed = engine.save(PREFIX, fresh, NAMESPACE)
    for answer in failed:
        assert answer.accounting is not None
        assert answer.accounting["outcome"] == "failed"
        assert answer.accounting["reason"].startswith(reason)
    assert blocks_in_use(engine) == 0
    again = engine.save(PREFIX, fresh, NAMESPACE)
    assert [(answer.accounting or {})["outcome"] for answer in again] == ["saved", "saved"]


def test_more_blends_than_may_run_at_once_are_all_answered(
    engine: LocalEngine, chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PASSES_MAX", 2)
    prompt = rag(*chunks)
    engine.reset_prefix_cache()
    ratios = [0.1 * step for step in range(7)]
    asked = [Prompt(prompt.token_ids, prompt.params(ratio), 2, ignore_eos=True) for ratio in ratios]
    outcomes = [(answer.accounting or {})["outcome"] for answer in engine.generate(asked)]
    assert outcomes == ["blended"] * len(ratios)
