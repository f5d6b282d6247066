"""`kintsugi generate`: answers a question from the user's own chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.methods import Measurement, Method, blend_once, compare
from kintsugi.cli.options import GenerateTask
from kintsugi.cli.render import print_accounting, print_form, print_ways
from kintsugi.cli.screen import Screen
from kintsugi.cli.session import (
    UNTESTED_NOTE,
    Asked,
    Session,
    open_session,
    read_chunk,
)
from kintsugi.core.evidence import Quality
from kintsugi.core.request import KintsugiParams
from kintsugi.models.reference import display_name
from kintsugi.quality import reports

NAMESPACE = "cli"
"""Namespace of the chunks, in a store of this process."""


def run(screen: Screen, task: GenerateTask) -> ExitCode:
    """Answer the question. Returns `NOT_BLENDABLE` if a full prefill produced the answer."""
    choice = KintsugiParams(NAMESPACE, ratio=task.ratio, selector=task.selector)
    extra_config: Mapping[str, object] = {"quality": task.quality.value}
    if task.report is not None:
        reports.read(task.report)  # refuses an invalid report before an engine starts
        extra_config = {**extra_config, "report": str(task.report.resolve())}
    asked = Asked([read_chunk(path) for path in task.chunk], task.question, task.form)
    given = (task.model, asked, NAMESPACE, task.max_tokens, extra_config, task.context)
    step = "Answering four ways" if task.compare else "Answering"
    with open_session(screen, *given) as session, screen.step(step) as say:
        request = session.engine, session.prompt, choice, task.max_tokens
        measurements = compare(*request, 1, say) if task.compare else [blend_once(*request)]
    blend = measurements[-1]
    document = generate_document(session, task, measurements)
    screen.show(document, lambda console: _render(console, session, measurements))
    reason = session.not_saved_because or blend.fell_back_because
    if reason is not None:
        screen.note(f"kintsugi: not blended, a full prefill produced this answer: {reason}")
        return ExitCode.NOT_BLENDABLE
    if task.quality is Quality.OFF:
        screen.note(f"kintsugi: {UNTESTED_NOTE}")
    return ExitCode.OK


def generate_document(
    session: Session, task: GenerateTask, measurements: Sequence[Measurement]
) -> dict[str, Any]:
    """JSON form of the answer."""
    blend, prompt = measurements[-1], session.prompt
    assert blend.method is Method.BLEND
    document: dict[str, Any] = {
        "model": display_name(task.model),
        "question": task.question,
        "form": session.form.name.value,
        "prompt_tokens": len(prompt.token_ids),
        "chunks": [chunk.title for chunk in prompt.chunks],
        "answer": blend.generation.text,
        "token_ids": blend.generation.token_ids,
        "ttft_ms": round(blend.ttft_s * 1e3, 2),
        "accounting": blend.generation.accounting,
    }
    if task.compare:
        document["methods"] = [entry.to_mapping(measurements[0].ttft_s) for entry in measurements]
    return document


def _render(console: Console, session: Session, measurements: Sequence[Measurement]) -> None:
    blend = measurements[-1]
    console.print(Text(blend.generation.text.strip()))
    console.print()
    print_form(console, session.form.name)
    if len(measurements) > 1:
        print_ways(console, measurements)
    print_accounting(console, blend.generation.accounting)
