from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kintsugi.serving import tracing

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


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
    assert headers["traceparent"].split("-")[2] == f"{span.get_span_context().span_id:016x}"


def test_what_fails_says_so(exported: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError), tracing.span("gateway.generate"):
        raise ValueError("secret")
    (span,) = exported.get_finished_spans()
    assert not span.status.is_ok
    assert span.status.description == "ValueError"


def test_without_the_package_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    monkeypatch.setattr(tracing, "propagate", None)
    with tracing.span("gateway.generate", PARENT) as current:
        current.set("name", 1)
        current.failed(ValueError())
        assert current.headers() == {}
