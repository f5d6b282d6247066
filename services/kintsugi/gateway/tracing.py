"""OpenTelemetry spans. Without an SDK that is set up, nothing happens.

with span("gateway.generate", incoming) as current:
    current.set("kintsugi.namespace", namespace)
    headers = current.headers()  # for the next process

Attributes named `gen_ai.*` are of OpenTelemetry's semantic conventions for generative AI. Texts of prompts
and answers are never recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from kintsugi.core.accounting import Outcome
from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.exchange import CHAT_PATH, RESPONSES_PATH, Usage

TRACE_HEADERS = ("traceparent", "tracestate")
EXPORTED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's own variables for where to export to. Its others configure sampling, TLS and the rest."""
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""The first that is set names the protocol; the default is gRPC."""
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


LAYERS_PER_S_MAX = 10.0
"""Maximum rate of answers whose layers are recorded. Most samplers follow the flag of a caller's
`traceparent`, and 32 layers are 64 spans of one answer."""
TIMES = ("timeline", "began_unix_s")
"""Fields of an accounting that are meant for `add_layers`."""
Attribute = str | int | float | bool | Sequence[str]
PROVIDER = "kintsugi"
CHAT, COMPLETION = "chat", "text_completion"
"""`gen_ai.operation.name`."""
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
"""Fields of OpenAI's body, and of vLLM's sampling parameters, with their types."""


def start_export() -> bool:
    """Exports this process's spans if the environment asks for it; whether it does. Once per process.

    An SDK that is set up already, for example by `opentelemetry-instrument`, is left as it is. Raises
    `Unavailable` if packages are missing, `InvalidField` for an unknown protocol.
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
    """The exporter of the protocol that the environment names. Raises `InvalidField` and `ImportError`."""
    protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "grpc")
    if protocol not in EXPORTERS:
        raise InvalidField(PROTOCOLS[-1], f"{protocol!r} is none of {', '.join(EXPORTERS)}")
    return import_module(EXPORTERS[protocol]).OTLPSpanExporter


class TraceSpan:
    """A span that is running. Does nothing where nobody traces."""

    def __init__(self, span: trace.Span, context: Context) -> None:
        """``context``: the one of spans below it."""
        self._span = span
        self._context = context

    @property
    def is_recording(self) -> bool:
        """Whether it will be exported."""
        return self._span.is_recording()

    def record_past(self, name: str, began_ns: int, ended_ns: int) -> TraceSpan:
        """Records a span that is over, below this one. Times are nanoseconds since 1970."""
        over = trace.get_tracer("kintsugi").start_span(name, context=self._context, start_time=began_ns)
        over.end(max(began_ns, ended_ns))
        return TraceSpan(over, trace.set_span_in_context(over, self._context))

    def set(self, name: str, value: Attribute) -> None:
        self._span.set_attribute(name, value)

    def set_all(self, attributes: Mapping[str, Attribute]) -> None:
        for name, value in attributes.items():
            self.set(name, value)

    def headers(self) -> dict[str, str]:
        """W3C headers that make the next process's spans children of this one."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self._context)
        return carrier

    def record_error(self, error: BaseException) -> None:
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))


@contextmanager
def span(name: str, incoming: Mapping[str, str] | None = None) -> Iterator[TraceSpan]:
    """A span below the one that `incoming` headers name. It does not become the current span: a generator's
    frames run in their caller's context, where another request's span may be current."""
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


class Timelines:
    """Chooses the traced answers whose layers are recorded: at most so many a second, whoever traces them.
    For one event loop."""

    def __init__(self, per_s: float = LAYERS_PER_S_MAX, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = per_s
        self._since_s = clock()

    def should_trace_layers(self, request: TraceSpan) -> bool:
        """Whether the engine is to report when it loaded and computed each layer of this request."""
        if not request.is_recording:
            return False
        now_s = self._clock()
        self._left = min(self._per_s, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


def without_times(accounting: Mapping[str, Any]) -> dict[str, Any]:
    """The accounting for a caller who did not ask for times."""
    return {name: value for name, value in accounting.items() if name not in TIMES}


def describe(request: TraceSpan, accounting: Mapping[str, Any]) -> None:
    """Sets an answer's attributes on its request's span."""
    for name in ("outcome", "reason", "selector", "ratio", "cost", "tokens_hit", "tokens_missed"):
        if name in accounting:
            request.set(f"kintsugi.{name}", accounting[name])


def add_layers(engine: TraceSpan, accounting: Mapping[str, Any]) -> None:
    """Records the blend below its request's `engine` span, and below it the loading and computing of each
    layer. Does nothing without a recording span or a timeline.

    The times are those of the engine's host; its clock may differ from the gateway's.
    """
    timeline, began_s = accounting.get("timeline"), accounting.get("began_unix_s")
    if not engine.is_recording or not timeline or began_s is None:
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
    """The attributes of a request: ``path`` is OpenAI's or an RPC's name, ``asked`` its body or sampling
    parameters. Values of another type, which the engine refuses, are left out."""
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
    usage: Usage | None, model: str | None, response_id: str, finish_reasons: Sequence[str]
) -> dict[str, Attribute]:
    """The attributes of an answer, as far as the engine told of it."""
    found: dict[str, Attribute] = {"gen_ai.response.id": response_id}
    if model:
        found["gen_ai.response.model"] = model
    if finish_reasons:
        found["gen_ai.response.finish_reasons"] = tuple(finish_reasons)
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    return found


def count_cached(reported: int, accounting: Mapping[str, Any]) -> int:
    """How many of a prompt's tokens came from a cache: from vLLM's own, or from a stored chunk.

    vLLM reports what it did not compute itself, and of a blended prompt that is all but the last token. The
    question and the missed chunks are among those, and the blend computed them.
    """
    if accounting.get("outcome") != Outcome.BLENDED.value:
        return reported
    found = (accounting.get(name, 0) for name in ("tokens_prefix_cached", "tokens_hit"))
    return min(reported, sum(count for count in found if isinstance(count, int)))
