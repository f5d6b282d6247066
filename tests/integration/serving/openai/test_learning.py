"""An engine that serves learns what its blends lose, and finds out that its store is damaged."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry

from kintsugi.core.documents import next_date
from kintsugi.core.layout import HeadRange
from kintsugi.core.plan import Selection, make_trial
from kintsugi.core.report import LADDER, Report
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, Span, TokenIds
from kintsugi.engine.local import Generation, Prompt
from kintsugi.models.bundled import bundled_checkpoint, showcase
from kintsugi.quality import stream as stream_module
from kintsugi.quality.metrics import kl_divergence
from kintsugi.quality.questions import read_questions
from kintsugi.quality.reports import utc_now
from kintsugi.serving import learning as learning_module
from kintsugi.serving.learning import Learning, make_learning
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkStore, LayerFrame
from tests.integration.serving.openai.conftest import Served, publish_report

pytestmark = pytest.mark.engine

WAIT_S = 60.0
HEALTHY = 3
PROMPTS_MAX = 120


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def learning(served: Served, registry: CollectorRegistry) -> Iterator[Learning]:
    """Every answer is measured, whenever the engine is idle."""

    async def start() -> Learning | None:
        return make_learning(served.engine, registry)

    with (
        patch.multiple(stream_module, OPEN_SHARE=1.0),
        patch.multiple(learning_module, FULL_SHARE=1.0, BLEND_SHARE=1.0, POLL_S=0.02),
    ):
        learning = served.run(start())
        assert learning is not None
        yield learning
        served.run(learning.close())
    publish_report(served.store_url, served.engine.binding)
    assert _within(lambda: served.run(served.engine.info()).blending == "on")


def _forget(served: Served) -> None:
    """Replace the report with one without evidence."""
    binding = served.engine.binding
    store = open_store(served.store_url)
    try:
        held = store.get_report(binding.model, binding.report_name)
        empty = Report(binding, next_date(utc_now(), held))
        store.put_report(binding.model, binding.report_name, empty.to_bytes())
    finally:
        store.close()
    assert _within(lambda: served.run(served.engine.info()).progress.state == "learning")


@pytest.mark.timeout(600)
def test_served_prompts_open_the_gate(
    served: Served, learning: Learning, registry: CollectorRegistry
) -> None:
    _forget(served)
    questions = read_questions(bundled_checkpoint() / "questions.jsonl.xz", PROMPTS_MAX)
    served.store("learns", list(dict.fromkeys(chunk for one in questions for chunk in one.chunks)))
    outcomes = []
    for one in questions:
        message = {"role": "user", "content": "".join(one.chunks) + one.tail}
        body = {"model": served.model, "messages": [message], "temperature": 0, "max_tokens": 1}
        answer = served.post("/v1/chat/completions", body, "learns").json()
        outcomes.append(answer["kv_transfer_params"]["kintsugi"]["outcome"])
        if outcomes[-1] == "blended":
            break
        assert _within(lambda: not learning.stream.pending)
    assert outcomes[-1] == "blended", served.run(served.engine.info()).progress
    assert len(outcomes) > 30, "no evidence passes anything sooner"
    assert set(outcomes[:-1]) == {"declined"}
    found = served.run(served.engine.info())
    assert (found.progress.state, found.ratio) == ("open", LADDER[0].ratio)
    assert found.progress.pairs > 30
    assert registry.get_sample_value("kintsugi_quality_open") == 1
    assert _asked(served, "another", showcase().chunks) == "declined", "one namespace opens for itself alone"


def test_a_damaged_store_closes_the_gate(
    served: Served, learning: Learning, registry: CollectorRegistry
) -> None:
    show = showcase()
    orders = itertools.permutations(show.chunks)
    served.store("sound", show.chunks)
    for order in itertools.islice(orders, HEALTHY):
        assert _asked(served, "sound", order) == "blended"
        assert _within(lambda: not learning.stream.pending)
    assert _within(lambda: learning.stream.counts.audited == HEALTHY)
    assert (learning.stream.counts.damaged, learning.stream.counts.closings) == (0, 0)

    served.store("damaged", show.chunks)
    _damage(served, "damaged", show.chunks)
    for order in itertools.islice(orders, 60):
        outcome = _asked(served, "damaged", order)
        if learning.stream.counts.closings:
            break
        assert outcome == "blended"
        assert _within(lambda: not learning.stream.pending)  # the next request would end its twin
    assert _within(lambda: registry.get_sample_value("kintsugi_quality_closings_total") == 1)
    assert registry.get_sample_value("kintsugi_quality_damaged_total") == learning.stream.counts.damaged > 0
    assert _within(lambda: served.run(served.engine.info()).progress.state != "open")
    # The scheduler polls the report on its own.
    order = next(orders)
    assert _within(lambda: _asked(served, "sound", order) == "declined")


def test_an_answer_does_not_show_what_measuring_requested(served: Served, learning: Learning) -> None:
    show = showcase()
    served.store("unseen", show.chunks)
    body = _body(served, show.chunks, max_tokens=2)
    answer = served.post("/v1/chat/completions", body, "unseen").json()
    assert answer["kv_transfer_params"]["kintsugi"]["outcome"] == "blended"
    assert answer["choices"][0]["logprobs"] is None
    assert _within(lambda: learning.stream.counts.pairs >= 1)
    assert _within(lambda: not learning.stream.pending)
    pairs = learning.stream.counts.pairs
    wanted = _body(served, show.chunks[::-1], max_tokens=2, logprobs=True, top_logprobs=3)
    answer = served.post("/v1/chat/completions", wanted, "unseen").json()
    assert [len(token["top_logprobs"]) for token in answer["choices"][0]["logprobs"]["content"]] == [3, 3]
    assert (learning.stream.counts.pairs, learning.stream.pending) == (pairs, 0)


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
        return served.run(served.engine.measure(prompt, 0)).top_logprobs[0]

    for length in (block - 1, block, block + 1, len(whole)):
        prompt = Prompt(whole[:length], None, FORCED, top_logprobs=20, forced=tuple(answer))
        forced = served.run(served.engine.measure(prompt, 0))
        assert forced.token_ids == answer
        assert [len(step) for step in forced.top_logprobs] == [20] * FORCED
        for position, step in enumerate(forced.top_logprobs):
            alone = first([*whole[:length], *answer[:position]])
            assert kl_divergence(alone, step) < 1e-3, f"{length} tokens, position {position}"
        neighbours = pairwise(forced.top_logprobs)
        assert max(kl_divergence(*pair) for pair in neighbours) > 1e-2, "a shift by one would be seen"


def test_a_full_trial_along_an_answer_equals_full_prefill(served: Served) -> None:
    """With everything recomputed, both passes report what full prefill reports, at every position."""
    show = showcase()
    served.store("trial", show.chunks)
    pieces = [served.chunker.token_ids(chunk) for chunk in show.chunks]
    question = served.chunker.token_ids(show.question)
    spans, end = [], len(served.info.prefix_token_ids)
    for piece in pieces:
        spans.append(Span(end, end + len(piece)))
        end += len(piece)
    whole = [*served.info.prefix_token_ids, *itertools.chain(*pieces), *question]
    answer = (7, 300, 12, 40, 41, 9)
    plain = Prompt(whole, None, FORCED, top_logprobs=20, forced=answer)
    full = served.run(served.engine.measure(plain, 0))

    def blend(ratio: float) -> Generation:
        params = KintsugiParams("trial", spans=tuple(spans), trial=make_trial(Selection(ratio)))
        return served.run(served.engine.measure(dataclasses.replace(plain, params=params), 0))

    exact, reused = blend(1.0), blend(0.0)
    assert exact.accounting is not None
    assert exact.accounting["outcome"] == "blended"
    assert [len(step) for step in exact.top_logprobs] == [20] * FORCED
    pairs = list(zip(full.top_logprobs, exact.top_logprobs, strict=True))
    assert max(kl_divergence(*pair) for pair in pairs) < 0.02
    assert reused.accounting is not None
    assert reused.accounting["cost"] < 0.5
    other = zip(full.top_logprobs, reused.top_logprobs, strict=True)
    assert max(kl_divergence(*pair) for pair in other) > 10 * max(kl_divergence(*pair) for pair in pairs)


def test_nothing_is_learned_where_nothing_is_tested(served: Served) -> None:
    gate = served.engine.gate
    with patch.object(gate, "_read", None):
        assert make_learning(served.engine) is None


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
