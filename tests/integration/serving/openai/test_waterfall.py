"""One request as spans, from the gateway to the layer, with times of a real engine in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kintsugi.gateway.prompts import Finished, GenerateCall
from kintsugi.gateway.texts.segments import Segment
from kintsugi.models.bundled import showcase
from kintsugi.store.protocol.access import ANYONE
from tests.integration.serving.openai.conftest import Served
from tests.recorded_spans import recorded

pytestmark = pytest.mark.engine

TIMES = {"timeline", "began_unix_s"}
CLOCK_NS = 2_000_000
"""Two clocks of one host, each read a moment after the other."""


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with recorded(monkeypatch) as exporter:
        yield exporter


def over_grpc(served: Served) -> None:
    show = showcase()
    segments = tuple(Segment(text=chunk) for chunk in show.chunks)
    call = GenerateCall("spans-grpc", segments, Segment(text=show.question), {"max_tokens": 2}, explain=True)

    async def ask() -> Mapping[str, Any]:
        async for event in served.gateway.generate(ANYONE, call):
            last = event
        assert isinstance(last, Finished)
        return last.accounting

    served.store(call.namespace, show.chunks)
    accounting = served.run(ask())
    assert accounting["outcome"] == "blended"
    assert set(accounting) >= TIMES


def over_http(served: Served) -> None:
    assert set(blended_over_http(served, "spans-http", 2, {"timeline": True})) >= TIMES


def blended_over_http(
    served: Served, namespace: str, max_tokens: int, own: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What the answer says of itself."""
    show = showcase()
    served.store(namespace, show.chunks)
    message = {"role": "user", "content": "".join(show.chunks) + show.question}
    body = {"model": served.model, "messages": [message], "max_tokens": max_tokens, "kintsugi": own}
    answer = served.post("/v1/chat/completions", body, namespace).json()
    accounting: Mapping[str, Any] = answer["kv_transfer_params"]["kintsugi"]
    assert accounting["outcome"] == "blended"
    return accounting


@pytest.mark.parametrize("ask", [over_grpc, over_http])
def test_layers_lie_within_their_request_and_load_ahead(
    served: Served, exported: InMemorySpanExporter, ask: Callable[[Served], None]
) -> None:
    exported.clear()
    ask(served)
    spans = {span.name: span for span in exported.get_finished_spans()}
    blend = spans["engine.blend"]
    assert _is_within(blend, spans["gateway.engine"])
    loads = _layers(spans, "load")
    computes = _layers(spans, "compute")
    assert len(loads) == len(computes) > 1
    for load, compute in zip(loads, computes, strict=True):
        assert _is_within(load, blend)
        assert _is_within(compute, blend)
        assert _end(load) <= _begin(compute)
    for layer, compute in enumerate(computes[:-1]):
        assert _end(compute) <= _begin(computes[layer + 1])
    # The loader's thread is ahead: what a layer needs is on its way while the one before is computed.
    assert any(_begin(later) < _end(now) for later, now in zip(loads[1:], computes, strict=False))


def test_layers_are_recorded_only_for_who_asks(served: Served, exported: InMemorySpanExporter) -> None:
    accounting = blended_over_http(served, "no-spans", 1, {})
    assert not TIMES & set(accounting)
    assert "engine.blend" not in {span.name for span in exported.get_finished_spans()}


def _layers(spans: Mapping[str, ReadableSpan], part: str) -> list[ReadableSpan]:
    names = [f"layer {layer} {part}" for layer in range(len(spans))]
    return [spans[name] for name in names if name in spans]


def _begin(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


def _end(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time


def _is_within(span: ReadableSpan, parent: ReadableSpan) -> bool:
    context = parent.get_span_context()
    assert span.parent is not None
    assert context is not None
    assert span.parent.span_id == context.span_id
    return _begin(parent) - CLOCK_NS <= _begin(span) and _end(span) <= _end(parent) + CLOCK_NS
