"""An engine that serves finds out that its store is damaged, and stops blending."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry

from kintsugi.core.baseline import Baseline
from kintsugi.core.deploy import EngineSpec
from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.engine.local import Generation, Prompt
from kintsugi.models.bundled import bundled_report, showcase
from kintsugi.quality import reports
from kintsugi.quality.metrics import kl_divergence
from kintsugi.serving import shadowing as shadowing_module
from kintsugi.serving.shadowing import Shadowing, make_shadowing
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkStore, LayerFrame
from tests.integration.serving.openai.conftest import Served, publish_report

pytestmark = pytest.mark.engine

WAIT_S = 60.0
HEALTHY = 6


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def shadowing(served: Served, registry: CollectorRegistry) -> Iterator[Shadowing]:
    async def start() -> Shadowing | None:
        with patch.multiple(shadowing_module, SHADOW_SHARE=1.0, SHADOW_TIME_SHARE=1.0):
            return make_shadowing(EngineSpec(), served.engine, registry)

    shadowing = served.run(start())
    assert shadowing is not None
    yield shadowing
    served.run(shadowing.close())
    publish_report(served.store_url)
    assert _within(lambda: served.run(served.engine.info()).blending == "on")


def test_a_damaged_store_trips_the_gate_through_serving(
    served: Served, shadowing: Shadowing, registry: CollectorRegistry
) -> None:
    show = showcase()
    orders = itertools.permutations(show.chunks)
    # The showcase is one prompt, and harder than most that were calibrated: six of it would be a drift.
    _publish_baseline(served, Baseline.of([[0.3]] * 96, [[False]] * 96))
    served.store("sound", show.chunks)
    for order in itertools.islice(orders, HEALTHY):
        assert _asked(served, "sound", order) == "blended"
    assert _within(lambda: shadowing.counts.compared == HEALTHY)
    assert shadowing.counts.trips == 0
    assert _within(lambda: shadowing.counts.audited == HEALTHY)
    assert shadowing.counts.damaged == 0

    served.store("damaged", show.chunks)
    _damage(served, "damaged", show.chunks)
    for order in itertools.islice(orders, 60):
        outcome = _asked(served, "damaged", order)
        if shadowing.counts.trips:
            break
        assert outcome == "blended"
    assert _within(lambda: registry.get_sample_value("kintsugi_shadow_trips_total") == 1)
    assert shadowing.counts.compared < HEALTHY + 60
    assert registry.get_sample_value("kintsugi_shadow_damaged_total") == shadowing.counts.damaged > 0
    assert _within(lambda: served.run(served.engine.info()).blending.startswith("drift"))
    # The scheduler polls the report on its own.
    order = next(orders)
    assert _within(lambda: _asked(served, "sound", order) == "declined")


def test_an_answer_does_not_show_what_a_shadow_asked_for(served: Served, shadowing: Shadowing) -> None:
    show = showcase()
    served.store("unseen", show.chunks)
    body = _body(served, show.chunks, max_tokens=2)
    answer = served.post("/v1/chat/completions", body, "unseen").json()
    assert answer["kv_transfer_params"]["kintsugi"]["outcome"] == "blended"
    assert answer["choices"][0]["logprobs"] is None
    assert _within(lambda: shadowing.counts.compared == 1)
    wanted = _body(served, show.chunks[::-1], max_tokens=2, logprobs=True, top_logprobs=3)
    answer = served.post("/v1/chat/completions", wanted, "unseen").json()
    assert [len(token["top_logprobs"]) for token in answer["choices"][0]["logprobs"]["content"]] == [3, 3]
    assert shadowing.counts.compared == 1


FORCED = 6


def test_a_prefill_along_an_answer_sees_what_prefills_of_each_beginning_see(served: Served) -> None:
    """Two passes for all positions, against one full prefill for every position, at every block boundary."""
    show = showcase()
    text = "".join(show.chunks) + show.question
    whole = [*served.info.prefix_token_ids, *served.chunker.token_ids(text)]
    answer = [7, 300, 12, 40, 41, 9]
    block = served.engine.client.vllm_config.cache_config.block_size

    def first(token_ids: list[int]) -> dict[int, float]:
        prompt = Prompt(token_ids, None, max_tokens=1, top_logprobs=20)
        return served.run(served.engine.answer_in_full(prompt, 0)).top_logprobs[0]

    for length in (block - 1, block, block + 1, len(whole)):
        prompt = Prompt(whole[:length], None, FORCED, top_logprobs=20, forced=tuple(answer))
        forced = served.run(served.engine.answer_in_full(prompt, 0))
        assert forced.token_ids == answer
        assert [len(step) for step in forced.top_logprobs] == [20] * FORCED
        for position, step in enumerate(forced.top_logprobs):
            alone = first([*whole[:length], *answer[:position]])
            assert kl_divergence(alone, step) < 1e-3, f"{length} tokens, position {position}"
        neighbours = pairwise(forced.top_logprobs)
        assert max(kl_divergence(*pair) for pair in neighbours) > 1e-2, "a shift by one would be seen"


def test_whole_answers_are_compared_where_calibration_measured_them(
    served: Served, shadowing: Shadowing
) -> None:
    _publish_baseline(served, Baseline.of([[0.0] * 3] * 96, [[False] * 3] * 96))
    show, seen = showcase(), []
    served.store("whole", show.chunks)
    prefill = served.engine.answer_in_full

    async def note(prompt: Prompt, priority: int) -> Generation:
        full = await prefill(prompt, priority)
        seen.append((len(prompt.forced or ()), len(full.top_logprobs)))
        return full

    served.engine.answer_in_full = note  # type: ignore[method-assign]
    try:
        body = _body(served, show.chunks, max_tokens=8, ignore_eos=True)
        served.post("/v1/chat/completions", body, "whole")
        assert _within(lambda: shadowing.counts.compared == 1)
    finally:
        del served.engine.answer_in_full
    assert seen == [(3, 3)]
    assert shadowing.counts.kl_sum < 1.0


def test_nothing_is_shadowed_without_a_calibration(served: Served) -> None:
    assert make_shadowing(EngineSpec(allow_uncalibrated=True), served.engine) is None


def _publish_baseline(served: Served, baseline: Baseline) -> None:
    store = open_store(served.store_url)
    try:
        reports.publish(store, dataclasses.replace(reports.read(bundled_report()), baseline=baseline))
    finally:
        store.close()


def _body(served: Served, chunks: tuple[str, ...], **more: object) -> dict[str, object]:
    message = {"role": "user", "content": "".join(chunks) + showcase().question}
    return {"model": served.model, "messages": [message], "temperature": 0, **more}


def _asked(served: Served, namespace: str, chunks: tuple[str, ...]) -> str:
    body = _body(served, chunks, max_tokens=1)
    answer = served.post("/v1/chat/completions", body, namespace).json()
    return str(answer["kv_transfer_params"]["kintsugi"]["outcome"])


def _damage(served: Served, namespace: str, texts: tuple[str, ...]) -> None:
    """Under each chunk's key, with sound digests, the KV of the same tokens in another order."""
    space = served.space(namespace)
    chunks = [tuple(served.chunker.token_ids(text)) for text in texts]
    wrong = [TokenIds.of(chunk[::-1]) for chunk in chunks]
    served.run(served.engine.save("wrong", namespace, wrong))
    store = open_store(served.store_url)
    try:
        for right, other in zip(chunks, wrong, strict=True):
            _copy(store, namespace, ChunkKey.of(space, other), ChunkKey.of(space, right))
    finally:
        store.close()


def _copy(store: ChunkStore, namespace: str, source: ChunkKey, target: ChunkKey) -> None:
    held, replaced = store.lookup(namespace, [source, target])
    assert held is not None
    assert replaced is not None
    layout = held.layout
    stream = store.stream(
        namespace, [source], range(layout.num_layers), HeadRange(0, layout.num_kv_heads), WAIT_S
    )
    # Copied as they come: a frame's memory is the stream's.
    frames = [bytes(item.data) for item in stream if isinstance(item, LayerFrame)]
    assert store.delete(namespace, [target]) == 1
    assert store.put(dataclasses.replace(held, key=target, anchors=replaced.anchors), frames)


def _within(condition: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.05)
    return False
