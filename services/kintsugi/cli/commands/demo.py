"""`kintsugi demo`: answers one question over chunks in four ways."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from kintsugi.cli.methods import BlendChoice, Measurement, compare
from kintsugi.cli.options import DemoTask
from kintsugi.cli.render import make_plain_table, print_accounting, print_comparison, print_form
from kintsugi.cli.screen import Screen
from kintsugi.cli.session import (
    REGARDLESS,
    UNCALIBRATED_NOTE,
    Asked,
    ModelSource,
    Session,
    Trust,
    make_random_model,
    open_session,
    read_chunk,
    resolve_model_argument,
)
from kintsugi.core.errors import InvalidField, NotBlendable
from kintsugi.core.prompt import FormName
from kintsugi.models.bundled import BUNDLED_CHECKPOINT, BUNDLED_NAME, showcase
from kintsugi.models.passages import BUNDLED_QUESTIONS, read_bundled_passages

NAMESPACE = "demo"
PASSAGES = 6
MAX_TOKENS = 16
_ORDER_SEED = 3

RANDOM_WEIGHTS_NOTE = (
    "This model was made for the demo with random weights: its answers are gibberish and show nothing "
    "about quality. The times are real."
)
SMALL_MODEL_NOTE = (
    "This model has 2.8 million parameters, and the question was chosen: at this length the model is rarely "
    "right. To see the times of a larger model, run kintsugi demo --random-weights."
)

OUTSIDE_NOTE = (
    "Blended although the bundled model's calibration report does not speak about prompts of this length: a "
    "server would prefill this one in full (outside_calibration). The answer shows what happened here, not "
    "what to expect."
)


@dataclass(frozen=True)
class Show:
    """What the demo shows."""

    model: ModelSource
    asked: Asked
    trust: Trust
    max_tokens: int = MAX_TOKENS
    expected: str | None = None
    """The right answer, if it is known."""
    random_weights: bool = False


def run(screen: Screen, task: DemoTask) -> None:
    """Raises `NotBlendable` if the blend fell back to full prefill: there is nothing to show then."""
    show = _choose_show(screen, task)
    with open_session(screen, show.model, show.asked, NAMESPACE, show.max_tokens, show.trust) as session:
        _require_blend(session.not_saved_because)
        with screen.step("Answering four ways") as say:
            measurements = compare(
                session.engine, session.prompt, BlendChoice(NAMESPACE), show.max_tokens, task.repeat, say
            )
    for measurement in measurements:
        _require_blend(measurement.fell_back_because)
    document = demo_document(show, session, measurements)
    screen.show(document, lambda console: _render(console, show, session, measurements))


def _choose_show(screen: Screen, task: DemoTask) -> Show:
    """Raises `InvalidField` if the model could not answer the question."""
    if task.model is None and not task.random_weights:
        if task.files or task.question is not None:
            raise InvalidField(
                "model",
                "the bundled model knows only the words of its own question; name a model for yours, "
                "or give --random-weights to see times alone",
            )
        return _bundle_show(task.form)
    if task.model is not None and task.random_weights:
        raise InvalidField("random-weights", "makes a model of its own; omit --model")
    texts = [read_chunk(path) for path in task.files or ()] or demo_texts()
    random.Random(_ORDER_SEED).shuffle(texts)
    asked = Asked(texts, task.question or BUNDLED_QUESTIONS[0], task.form)
    model = make_random_model(screen) if task.model is None else resolve_model_argument(task.model)
    return Show(model, asked, REGARDLESS, random_weights=task.random_weights)


def _bundle_show(form: FormName) -> Show:
    shown = showcase()
    texts = [(f"chunk {number}", text) for number, text in enumerate(shown.chunks, start=1)]
    return Show(
        model=ModelSource(str(BUNDLED_CHECKPOINT), BUNDLED_NAME),
        asked=Asked(texts, shown.question, form, bare=False),
        # Its report speaks about prompts a sixth as long.
        trust=REGARDLESS,
        max_tokens=1,
        expected=shown.answer,
    )


def demo_texts() -> list[tuple[str, str]]:
    """(title, text) of the passages that the demo uses."""
    return [(passage.title, passage.text) for passage in read_bundled_passages()[:PASSAGES]]


def _require_blend(reason: str | None) -> None:
    if reason is not None:
        label, _, detail = reason.partition(": ")
        raise NotBlendable(label, detail or "run kintsugi doctor for more")


def demo_document(show: Show, session: Session, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """JSON form of the demo."""
    full_ttft_s, prompt = measurements[0].ttft_s, session.prompt
    return {
        "model": show.model.name,
        "random_weights": show.random_weights,
        "calibrated": show.trust.report is not None,
        "question": show.asked.question,
        "form": session.form.name.value,
        "expected": show.expected,
        "prompt_tokens": len(prompt.token_ids),
        "chunks": [
            {"title": chunk.title, "tokens": len(chunk.token_ids), "start": span.start}
            for chunk, span in zip(prompt.chunks, prompt.spans, strict=True)
        ],
        "methods": [
            {**measurement.to_mapping(full_ttft_s), "right": is_right(measurement, show.expected)}
            for measurement in measurements
        ],
    }


def is_right(measurement: Measurement, expected: str | None) -> bool | None:
    """Whether the answer begins with the expected one; None if none is expected."""
    return None if expected is None else measurement.generation.text.split()[:1] == [expected]


def _render(console: Console, show: Show, session: Session, measurements: Sequence[Measurement]) -> None:
    prompt = session.prompt
    titles = " · ".join(chunk.title for chunk in prompt.chunks)
    console.print()
    console.print(f"[bold]{len(prompt.token_ids):,} tokens[/] on {show.model.name}", highlight=False)
    prompt_table = make_plain_table(style="dim")
    prompt_table.add_row("chunks", Text(titles))
    prompt_table.add_row("question", Text(show.asked.question))
    if show.expected is not None:
        prompt_table.add_row("right answer", Text(show.expected))
    console.print(prompt_table)
    print_form(console, session.form.name)
    right = [is_right(measurement, show.expected) for measurement in measurements]
    print_comparison(console, measurements, len(prompt.chunks), right)
    console.print("\n[bold]The blend[/]")
    print_accounting(console, measurements[-1].generation.accounting)
    if show.expected is not None:
        console.print(f"\n{SMALL_MODEL_NOTE}", style="dim", highlight=False)
    if show.random_weights:
        console.print(f"\n{RANDOM_WEIGHTS_NOTE}", style="yellow", highlight=False)
    if show.trust.regardless:
        note = UNCALIBRATED_NOTE if show.expected is None else OUTSIDE_NOTE
        console.print(f"\n{note}", style="yellow", highlight=False)
