"""An open-loop load: when it sends what, what it makes of the answers, and itself over a scripted server."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.load.profile import (
    RagWorkload,
    corpus,
    poisson_arrivals,
    prompt_of,
    requests,
)
from benchmarks.support.load.report import PERCENTILES, Sample, hit_rate, spread, summarize_samples
from benchmarks.support.load.run import Endpoint, run
from kintsugi.core.errors import InvalidField
from kintsugi.core.exchange import OpenAICall
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from tests.fakes.openai_backend import STREAM, Item, ScriptedBackend, gateway_over

SMALL = RagWorkload(documents=20, chunks=3, chunk_tokens=40, answer_tokens=2)


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    arrivals = poisson_arrivals(4.0, 4000, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(0.25, rel=0.1)
    assert arrivals == poisson_arrivals(4.0, 4000, seed=1) != poisson_arrivals(4.0, 4000, seed=2)
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidField):
            poisson_arrivals(rate, 1)


def test_popular_documents_are_asked_for_as_zipf_says() -> None:
    workload = RagWorkload(documents=50, zipf=0.9, chunks=1)
    drawn = Counter(one.documents[0] for one in requests(workload, [0.0] * 20_000))
    shares = [count / 20_000 for _, count in drawn.most_common(10)]
    total = sum(k**-0.9 for k in range(1, 51))
    assert shares == pytest.approx([k**-0.9 / total for k in range(1, 11)], rel=0.12)
    even = Counter(one.documents[0] for one in requests(RagWorkload(4, 0.0, 1), [0.0] * 8000))
    assert min(even.values()) > 1800


def test_requests_hold_different_documents_and_questions() -> None:
    found = requests(SMALL, [0.5, 1.0, 2.0])
    assert [one.at_s for one in found] == [0.5, 1.0, 2.0]
    assert all(len(set(one.documents)) == SMALL.chunks for one in found)
    assert len({one.question for one in found}) == 3
    assert found == requests(SMALL, [0.5, 1.0, 2.0])
    texts = corpus(SMALL)
    assert prompt_of(found[0], texts).split("\n\n")[:-1] == [texts[i] for i in found[0].documents]


def test_documents_are_as_long_as_a_chunk() -> None:
    texts = corpus(SMALL, lambda text: len(text) // 3)
    assert len(set(texts)) == SMALL.documents
    assert all(30 < len(text) // 3 <= 40 for text in texts)
    guessed = corpus(SMALL)
    assert all(25 <= len(text.split()) <= 40 for text in guessed)
    assert corpus(RagWorkload(1, chunks=1, chunk_tokens=1), lambda text: len(text))[0]


@pytest.mark.parametrize(
    ("change", "field"),
    [({"documents": 0}, "documents"), ({"chunks": 9, "documents": 8}, "chunks"), ({"zipf": -1}, "zipf")],
)
def test_workloads_that_cannot_be(change: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        RagWorkload(**change)
    assert caught.value.field == field


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_percentiles_lie_within_and_grow(values: list[float]) -> None:
    found = [spread(values)[f"p{percent}"] for percent in PERCENTILES]
    assert min(values) <= found[0] <= found[-1] <= max(values)
    assert found == sorted(found)


def test_percentiles_of_known_values() -> None:
    assert spread([3.0, 1.0, 2.0])["p50"] == spread([3.0, 1.0, 2.0])["mean"] == 2.0
    assert spread([0.0, 10.0])["p95"] == 9.5
    assert spread([]) == {}


def test_a_summary_counts_what_came_in_time() -> None:
    samples = [
        Sample(0.0, 1.0, 2.0, (0.5, 0.5), 100, 3, accounting={"tokens_hit": 90, "tokens_missed": 10}),
        Sample(5.0, 3.0, 5.0, (1.0,), 100, 2),
        Sample(10.0, None, 1.0, error="HTTP 503"),
    ]
    summary = summarize_samples(samples, slo_s=2.0)
    assert (summary.requests, summary.errors, summary.error_kinds) == (3, 1, {"HTTP 503": 1})
    assert summary.duration_s == 11.0
    assert summary.rate_per_s == pytest.approx(0.2)
    assert summary.ttft_s["p50"] == 2.0
    assert summary.itl_s["mean"] == pytest.approx(2 / 3)
    assert summary.goodput_per_s == pytest.approx(1 / 11)
    assert summary.in_time_share == pytest.approx(1 / 3)
    assert summary.output_tokens_per_s == pytest.approx(5 / 11)
    assert summary.hit_rate == pytest.approx(0.9)
    empty = summarize_samples([])
    assert (empty.requests, empty.ttft_s, empty.goodput_per_s) == (0, {}, None)


def test_hit_rates_count_what_was_not_cached_at_all() -> None:
    hit = {"tokens_hit": 80, "tokens_prefix_cached": 10, "tokens_missed": 10}
    nothing = {"outcome": "declined", "tokens_hit": 0, "tokens_missed": 0}
    assert hit_rate([hit]) == pytest.approx(0.9)
    assert hit_rate([hit, nothing]) == pytest.approx(0.45)
    assert hit_rate([nothing]) == 0.0
    assert hit_rate([]) is None


def _script(call: OpenAICall) -> Sequence[Item]:
    if "Question 0-1:" in str(call.body["prompt"]):
        return [STREAM, b'data: {"error": {"message": "broken"}}\n\n', b"data: [DONE]\n\n"]
    events = [{"choices": [{"text": word}]} for word in ("one", " two")]
    last = {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
        "kv_transfer_params": {"kintsugi": {"tokens_hit": 7}},
    }
    body = [f"data: {json.dumps(event)}\n\n".encode() for event in (*events, last)]
    return [STREAM, 0.02, body[0], 0.02, *body[1:], b"data: [DONE]\n\n"]


def test_a_load_against_a_server() -> None:
    async def measured() -> None:
        server = HttpServer(HttpFront(gateway_over(ScriptedBackend(_script))).app, "127.0.0.1", 0)
        await server.start()
        endpoint = Endpoint(f"http://{server.address}/v1", "scripted", namespace="acme")
        coming, texts = requests(SMALL, [0.0, 0.0, 0.05]), corpus(SMALL)
        ended: list[int] = []
        prompts = [prompt_of(one, texts) for one in coming]
        samples = await run(endpoint, coming, prompts, 2, ended.append)
        await server.stop()
        assert ended == [1, 2, 3]
        assert [sample.error for sample in samples] == ["", "broken", ""]
        first = samples[0]
        assert (first.text, first.prompt_tokens, first.completion_tokens) == ("one two", 9, 2)
        assert first.accounting == {"tokens_hit": 7}
        assert first.ttft_s is not None
        assert 0.02 <= first.ttft_s <= first.done_s
        assert len(first.itl_s) == 1
        assert first.itl_s[0] >= 0.01
        (gone,) = await run(endpoint, coming[:1], prompts[:1], 2)
        assert gone.error == "ConnectError"
        assert not gone.is_ok

    asyncio.run(measured())


def _strange(call: OpenAICall) -> Sequence[Item]:
    number = int(str(call.body["prompt"]))
    error = [b'{"error": "no room"}', b'{"error": null}', b'{"error": {"message": null}}', b'{"error": [1]}']
    usage = [
        b'{"usage": {"prompt_tokens": null, "completion_tokens": "7"}}',
        b'{"usage": [9]}',
        b"[]",
        b"null",
    ]
    choices = [
        *(b'{"choices": [null, {"delta": "x"}]}', b'{"choices": {"text": "y"}}'),
        b'{"choices": [{"delta": {"content": [{"text": "z"}]}}], "kv_transfer_params": "hit"}',
    ]
    token = b'{"choices": [{"text": "well"}]}'
    events = [[*error][number : number + 1], [*usage, *choices, token], [b"{"], [b"7", token]][
        max(0, number - 3)
    ]
    return [STREAM, *(b"data: %s\n\n" % event for event in events), b"data: [DONE]\n\n"]


def test_no_answer_of_an_endpoint_costs_the_others() -> None:
    async def measured() -> list[Sample]:
        server = HttpServer(HttpFront(gateway_over(ScriptedBackend(_strange))).app, "127.0.0.1", 0)
        await server.start()
        endpoint = Endpoint(f"http://{server.address}/v1", "scripted", namespace="acme")
        samples = await run(endpoint, requests(SMALL, [0.0] * 7), [str(n) for n in range(7)], 2)
        await server.stop()
        return samples

    samples = asyncio.run(measured())
    errors = ["no room", "error", "error", "error", "", "JSONDecodeError", ""]
    assert [sample.error for sample in samples] == errors
    assert [sample.text for sample in samples[4::2]] == ["well", "well"]
    assert (samples[4].prompt_tokens, samples[4].completion_tokens, samples[4].accounting) == (0, 0, None)
    assert summarize_samples(samples).errors == 5


@pytest.mark.parametrize(
    "url", ["http://host:99999/v1", "http://[::1/v1", "localhost:8000/v1", "", "http:///v1"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidField, match="url"):
        Endpoint(url)
