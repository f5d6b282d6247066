"""OpenTelemetry spans. Without a configured SDK, the functions do nothing.

with span("gateway.generate", incoming) as current:
    current.set("kintsugi.namespace", namespace)
    headers = current.headers()  # for the next process

Attributes named `gen_ai.*` follow OpenTelemetry's semantic conventions for generative AI. The texts of
prompts and answers are never recorded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.exchange import CHAT_PATH, RESPONSES_PATH, EngineInfo, Usage

TRACE_HEADERS = ("traceparent", "tracestate")
EXPORTED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's variables for the export's destination. Further ones configure sampling and TLS."""
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""Variables that name the protocol, in order of precedence; the default is gRPC."""
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


Attribute = str | int | float | bool | Sequence[str]
PROVIDER = "kintsugi"
CHAT, COMPLETION = "chat", "text_completion"
"""Values of `gen_ai.operation.name`."""
_REQUEST = {
    "model": (str, "gen_ai.request.model"),
    "max_tokens": (int, "gen_ai.request.max_tokens"),
    "max_completion_tokens": (int, "gen_ai.request.max_tokens"),
    "max_output_tokens": (int, "gen_ai.request.max_tokens"),
    "n": (int, "gen_ai.request.choice.count"),
    "seed": (int, "gen_ai.request.seed"),
    "stream": (bool, "gen_ai.request.stream"),
    "temperature": (float, "gen_ai.request.temperature"),
    "top_p": (float, "gen_ai.request.top_p"),
    "top_k": (int, "gen_ai.request.top_k"),
    "frequency_penalty": (float, "gen_ai.request.frequency_penalty"),
    "presence_penalty": (float, "gen_ai.request.presence_penalty"),
}
"""Types and attributes of the fields of an OpenAI body and of vLLM's sampling parameters."""


def start_export() -> bool:
    """Export this process's spans if the environment configures it. Return whether it does.

    An SDK that is already configured, for example by `opentelemetry-instrument`, is not changed. Raises
    `Unavailable` if packages are missing, and `InvalidField` for an unknown protocol.
    """
    if not any(os.environ.get(name) for name in EXPORTED):
        return False
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter_class = load_exporter_class()
    except ImportError as error:
        raise Unavailable(
            f"traces cannot be exported ({error}); install opentelemetry-exporter-otlp, or "
            f"unset {' and '.join(EXPORTED)}"
        ) from error
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        ours = Resource.create({SERVICE_NAME: "kintsugi-gateway"})
        provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
        provider.add_span_processor(BatchSpanProcessor(exporter_class()))
        trace.set_tracer_provider(provider)
    return True


def load_exporter_class() -> Any:
    """Return the exporter for the environment's protocol. Raises `InvalidField` and `ImportError`."""
    protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "grpc")
    if protocol not in EXPORTERS:
        raise InvalidField(PROTOCOLS[-1], f"{protocol!r} must be one of {', '.join(EXPORTERS)}")
    return import_module(EXPORTERS[protocol]).OTLPSpanExporter


class TraceSpan:
    """A running span."""

    def __init__(self, span: trace.Span, context: Context) -> None:
        """``context``: the context of the span's children."""
        self._span = span
        self._context = context

    def record_past(self, name: str, began_ns: int, ended_ns: int) -> TraceSpan:
        """Record a completed child span. Times are in nanoseconds since 1970."""
        past = trace.get_tracer("kintsugi").start_span(name, context=self._context, start_time=began_ns)
        past.end(max(began_ns, ended_ns))
        return TraceSpan(past, trace.set_span_in_context(past, self._context))

    def set(self, name: str, value: Attribute) -> None:
        self._span.set_attribute(name, value)

    def set_all(self, attributes: Mapping[str, Attribute]) -> None:
        for name, value in attributes.items():
            self.set(name, value)

    def headers(self) -> dict[str, str]:
        """Return the W3C headers that make the next process's spans children of this one."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self._context)
        return carrier

    def record_error(self, error: BaseException) -> None:
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))


@contextmanager
def span(name: str, incoming: Mapping[str, str] | None = None) -> Iterator[TraceSpan]:
    """Run the block in a child of the span that the `incoming` headers name. The new span does not become the
    current one: a generator runs in its caller's context, where another request's span may be current."""
    parent = propagate.extract(dict(incoming or {}))
    started = trace.get_tracer("kintsugi").start_span(name, context=parent)
    current = TraceSpan(started, trace.set_span_in_context(started, parent))
    try:
        yield current
    except BaseException as error:
        current.record_error(error)
        raise
    finally:
        started.end()


def describe(request: TraceSpan, accounting: Mapping[str, Any]) -> None:
    """Set the accounting's attributes on a request's span."""
    for name in ("outcome", "reason", "selector", "ratio", "cost", "tokens_hit", "tokens_missed"):
        if name in accounting:
            request.set(f"kintsugi.{name}", accounting[name])


def add_layers(engine: TraceSpan, accounting: Mapping[str, Any]) -> None:
    """Record the blend as a child of the request's `engine` span, and the loading and computation of each
    layer as its children. Does nothing without a timeline, which `explain` and `timeline` request.

    Times are from the clock of the engine's host, which may differ from the gateway's.
    """
    timeline, began_s = accounting.get("timeline"), accounting.get("began_unix_s")
    if not timeline or began_s is None:
        return
    began_ns = int(began_s * 1e9)

    def at(since_ms: Any) -> int:
        return began_ns + int(since_ms * 1e6)

    blend = engine.record_past("engine.blend", began_ns, at(accounting["blend_ms"]))
    for layer, timing in enumerate(timeline):
        for part in ("load", "compute"):
            blend.record_past(
                f"layer {layer} {part}", at(timing[f"{part}_start_ms"]), at(timing[f"{part}_end_ms"])
            )


def describe_request(path: str, asked: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return the attributes of a request. ``path``: OpenAI's path or an RPC's name. ``asked``: the body or
    the sampling parameters. Values of a wrong type, which the engine refuses, are omitted."""
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": CHAT if path in (CHAT_PATH, RESPONSES_PATH) else COMPLETION,
        "gen_ai.provider.name": PROVIDER,
    }
    for field, (kind, name) in _REQUEST.items():
        value: Any = asked.get(field)
        if type(value) is int and kind is float:
            value = float(value)
        has_kind: bool = type(value) is kind
        if has_kind and value != "":
            found[name] = value
    return found


def describe_answer(
    usage: Usage | None, info: EngineInfo | None, response_id: str, finish_reasons: Sequence[str]
) -> dict[str, Attribute]:
    """Return the attributes of an answer. What the engine has not reported is omitted."""
    found: dict[str, Attribute] = {"gen_ai.response.id": response_id}
    if info is not None:
        found["gen_ai.response.model"] = info.model
    if finish_reasons:
        found["gen_ai.response.finish_reasons"] = tuple(finish_reasons)
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    return found
