from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kintsugi.core.accounting import LayerTiming
from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.exchange import EngineDelta, EngineRequest
from kintsugi.gateway import tracing
from kintsugi.gateway.fronts.openai_answer import Piece
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.prompts import Finished, GenerateCall
from kintsugi.gateway.texts.segments import Segment
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.access import ANYONE
from tests.fakes.stub_backend import StubBackend
from tests.recorded_spans import recorded


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}

BLENDED = {
    "outcome": "blended",
    "blend_ms": 7.5,
    "began_unix_s": 1_700_000_000.5,
    "timeline": [
        dataclasses.asdict(timing) for timing in (LayerTiming(0, 1, 1, 3.5), LayerTiming(1, 4, 4, 7.25))
    ],
}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with recorded(monkeypatch) as exporter:
        yield exporter


def test_a_span_is_a_child_of_what_came_and_the_parent_of_what_goes(exported: InMemorySpanExporter) -> None:
    with tracing.span("gateway.generate", PARENT) as current:
        current.set("kintsugi.namespace", "tenant")
        headers = current.headers()
    (span,) = exported.get_finished_spans()
    assert span.name == "gateway.generate"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.attributes == {"kintsugi.namespace": "tenant"}
    assert headers["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert headers["traceparent"].split("-")[2] == f"{id_of(span):016x}"


class TimedBackend(StubBackend):
    """Says when layers were computed wherever it is asked to."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        asked = request.params.timeline or request.params.explain
        async for delta in super().generate(request):
            if delta.accounting is not None and asked:
                delta = dataclasses.replace(delta, accounting={**delta.accounting, **BLENDED})
            yield delta


async def _accountings(calls: int, explain: bool = False) -> list[Mapping[str, Any]]:
    """What callers with `PARENT`'s headers are told."""
    gateway = Gateway(TimedBackend(), RamStore(), lambda text: [ord(letter) for letter in text])
    told = []
    call = GenerateCall("tenant", (), Segment(text="why?"), trace=PARENT, explain=explain)
    for _ in range(calls):
        async for event in gateway.generate(ANYONE, call):
            if isinstance(event, Finished):
                told.append(event.accounting)
    await gateway.close()
    return told


async def _sent_to_the_engine() -> EngineRequest:
    """The request that an engine gets for a call with `PARENT`'s headers."""
    backend = StubBackend()
    gateway = Gateway(backend, RamStore(), lambda text: [ord(letter) for letter in text])
    call = GenerateCall("tenant", (Segment(text="chunk"),), Segment(text="why?"), trace=PARENT)
    async for _ in gateway.generate(ANYONE, call):
        pass
    await gateway.close()
    return backend.seen.requests[0]


def test_a_request_is_a_waterfall(exported: InMemorySpanExporter) -> None:
    sent = asyncio.run(_sent_to_the_engine()).trace["traceparent"]
    spans = {span.name: span for span in exported.get_finished_spans()}
    assert set(spans) == {"gateway.generate", "gateway.resolve", "gateway.engine"}
    whole = spans["gateway.generate"]
    for name in ("gateway.resolve", "gateway.engine"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == id_of(whole)
    assert sent.split("-")[2] == f"{id_of(spans['gateway.engine']):016x}"
    assert whole.attributes is not None
    assert whole.attributes["kintsugi.outcome"] == "declined"
    assert whole.attributes["kintsugi.tokens_missed"] == 5


def test_what_fails_says_so(exported: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError), tracing.span("gateway.generate"):
        raise ValueError("secret")
    (span,) = exported.get_finished_spans()
    assert not span.status.is_ok
    assert span.status.description == "ValueError"


def test_where_nobody_traces_nothing_happens() -> None:
    with tracing.span("gateway.generate") as current:
        current.set("name", 1)
        current.record_error(ValueError())
        assert current.headers() == {}
        tracing.add_layers(current, BLENDED)


def test_layers_are_below_their_blend_at_the_times_of_the_engine(exported: InMemorySpanExporter) -> None:
    with tracing.span("gateway.engine") as engine:
        tracing.add_layers(engine, BLENDED)
        tracing.add_layers(engine, {"outcome": "declined"})
    spans = {span.name: span for span in exported.get_finished_spans()}
    assert list(spans) == [
        *("engine.blend", "layer 0 load", "layer 0 compute", "layer 1 load", "layer 1 compute"),
        "gateway.engine",
    ]
    blend = spans["engine.blend"]
    assert blend.parent is not None
    assert blend.parent.span_id == id_of(spans["gateway.engine"])
    began_ns = 1_700_000_000_500_000_000
    assert (blend.start_time, blend.end_time) == (began_ns, began_ns + 7_500_000)
    computed = spans["layer 1 compute"]
    assert (computed.start_time, computed.end_time) == (began_ns + 4_000_000, began_ns + 7_250_000)
    for name in list(spans)[1:5]:
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == id_of(blend)


def test_a_request_that_asks_for_times_has_its_layers_recorded(exported: InMemorySpanExporter) -> None:
    (told,) = asyncio.run(_accountings(1))
    assert "timeline" not in told
    assert "engine.blend" not in {span.name for span in exported.get_finished_spans()}
    (explained,) = asyncio.run(_accountings(1, explain=True))
    assert len(explained["timeline"]) == 2
    assert "layer 1 compute" in {span.name for span in exported.get_finished_spans()}


@pytest.mark.parametrize("piece", [b"data: [DONE]\n\n", b'{"timeline": 1}', b'"timeline"'])
def test_other_pieces_go_as_they_are(piece: bytes) -> None:
    read = Piece(piece)
    read.remove_accounting()
    assert read.to_bytes() is piece
    assert read.accounting is None


def test_spans_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", set_up.append)
    for name in tracing.EXPORTED:
        monkeypatch.delenv(name, raising=False)
    assert not tracing.start_export()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert tracing.start_export()
    (provider,) = set_up
    assert provider.resource.attributes["service.name"] == "kintsugi-gateway"
    provider.shutdown()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    assert tracing.start_export()
    assert set_up == [provider]


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "kintsugi-gateway"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=east"}, "east"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=east", "OTEL_SERVICE_NAME": "west"}, "west"),
    ],
)
def test_the_environment_names_the_service(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    set_up: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", set_up.append)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert tracing.start_export()
    assert [provider.resource.attributes["service.name"] for provider in set_up] == [name]
    set_up[0].shutdown()


def test_the_environment_says_in_which_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.PROTOCOLS:
        monkeypatch.delenv(name, raising=False)
    assert ".proto.grpc." in tracing.load_exporter_class().__module__
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert ".proto.http." in tracing.load_exporter_class().__module__
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    assert ".proto.grpc." in tracing.load_exporter_class().__module__
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(InvalidField, match="must be one of grpc, http/protobuf"):
        tracing.load_exporter_class()


def test_spans_that_cannot_be_exported_are_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(Unavailable, match="install opentelemetry-exporter-otlp"):
        tracing.start_export()
