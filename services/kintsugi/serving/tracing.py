"""OpenTelemetry spans, where its API is installed; without it, or without an SDK set up, nothing happens.

with span("gateway.generate", incoming) as current:
    current.set("kintsugi.namespace", namespace)
    headers = current.headers()  # for the next process
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

propagate: Any = None
trace: Any = None
with suppress(ImportError):  # without the extra `serving` there is nothing to trace with
    from opentelemetry import propagate, trace

TRACE_HEADERS = ("traceparent", "tracestate")


class Span:
    """A span that is running, or nothing."""

    def __init__(self, span: Any, context: Any) -> None:
        self._span = span
        self._context = context

    def set(self, name: str, value: str | int | float | bool) -> None:
        if self._span is not None:
            self._span.set_attribute(name, value)

    def headers(self) -> dict[str, str]:
        """W3C headers that make the next process's spans children of this one."""
        carrier: dict[str, str] = {}
        if propagate is not None:
            propagate.inject(carrier, self._context)
        return carrier

    def failed(self, error: BaseException) -> None:
        if self._span is not None:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))


@contextmanager
def span(name: str, incoming: Mapping[str, str] | None = None) -> Iterator[Span]:
    """A span below what `incoming` headers name. It is not made the current one: a generator's frames run in
    their caller's context, where another request's span may be current."""
    if trace is None:
        yield Span(None, None)
        return
    parent = propagate.extract(dict(incoming or {}))
    started = trace.get_tracer("kintsugi").start_span(name, context=parent)
    current = Span(started, trace.set_span_in_context(started, parent))
    try:
        yield current
    except BaseException as error:
        current.failed(error)
        raise
    finally:
        started.end()
