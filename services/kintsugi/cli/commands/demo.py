"""`kintsugi demo`: answers one question over chunks in four ways. With `--open`, then serves the model."""

from __future__ import annotations

import os
import random
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from kintsugi.cli.methods import Measurement, compare
from kintsugi.cli.render import make_plain_table, print_accounting, print_form, print_ways
from kintsugi.cli.screen import Screen
from kintsugi.cli.session import UNTESTED, Asked, Session, open_session
from kintsugi.core.deploy import EngineExpert, EngineSpec, GatewaySpec, ModelSpec, ServiceSpec
from kintsugi.core.errors import NotBlendable
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.gateway.addresses import format_address, free_port
from kintsugi.gateway.console import CONSOLE_PATH
from kintsugi.models.demo_questions import (
    DemoQuestion,
    RightAnswers,
    choose_shown,
    is_right,
    read_demo_questions,
)
from kintsugi.models.passages import read_bundled_passages
from kintsugi.models.reference import REFERENCE, display_name

NAMESPACE = "demo"
PASSAGES = 6
MAX_TOKENS = 32
CONSOLE_URL = f"http://{format_address(GatewaySpec().host, GatewaySpec().http_port)}{CONSOLE_PATH}"
"""URL of the console with `--open`, unless the port is taken."""
CONSOLE_PORTS = 16
"""Number of ports tried for the console, starting at the gateway's own."""
_ORDER_SEED = 3

REPEAT = 3
"""Number of timed runs of each method; medians are shown."""
BLEND = KintsugiParams(NAMESPACE, ratio=0.12, selector=SelectorName.QUERY)
"""The demo's blend, on every model."""

NO_REPORT_NOTE = (
    "The demo blends without a test. A service first measures on its own prompts how much quality blending "
    "loses, and blends only where the loss is small."
)
OWN_DOCUMENTS = "Ten minutes, on your own documents: docs/howto/own-documents.md"
OTHER_MODEL_NOTE = f"The question was chosen by the answers of {REFERENCE.title}, not of this model."


@dataclass(frozen=True)
class Show:
    """The model and the question of the demo, and how the question was chosen."""

    model: str
    """A checkpoint folder, the reference model's name, or a name that vLLM resolves."""
    question: DemoQuestion
    tally: RightAnswers | None
    """How often the model answered the demo's questions correctly; None if unknown."""

    @staticmethod
    def of(model: str) -> Show:
        """Return the demo for a model. The reference model's answers decide which question is shown."""
        questions = read_demo_questions()
        shown = choose_shown(questions)
        if model != REFERENCE.name:
            return Show(model, shown, None)
        return Show(model, shown, RightAnswers.of(questions))

    @property
    def chosen(self) -> str:
        """How the question was chosen, in words."""
        tally = self.tally
        if tally is None:
            return OTHER_MODEL_NOTE
        return (
            f"Each of {tally.asked} questions about these passages was written before the model answered it. "
            "They were asked in three ways that round differently: all at once, one by one, and one by one "
            f"without AVX-512. Full prefill answers {tally.full_right} of them right every time. Of these "
            f"{tally.full_right}, full KV reuse gets {tally.reuse_right} right at least once, and the blend "
            f"{tally.blend_right} every time. The question shown is the first of {tally.blend_mended} that "
            "full KV reuse always gets wrong and the blend always gets right."
        )


def run(screen: Screen, model: str, open_console: bool) -> None:
    """Run the demo. Raises `NotBlendable` if the blend fell back to full prefill."""
    show = Show.of(model)
    asked = Asked(demo_texts(), show.question.question)
    with open_session(screen, model, asked, NAMESPACE, MAX_TOKENS, UNTESTED) as session:
        _require_blend(session.not_saved_because)
        with screen.step("Answering four ways") as say:
            measurements = compare(session.engine, session.prompt, BLEND, MAX_TOKENS, REPEAT, say)
    for measurement in measurements:
        _require_blend(measurement.fell_back_because)
    document = demo_document(show, session, measurements)
    screen.show(document, lambda console: _render(console, show, session, measurements))
    if open_console:
        from kintsugi.cli.commands.serve import serve

        serve(screen, console_service_spec(model), open_in_browser)


def console_service_spec(model: str) -> ServiceSpec:
    """Return a service on this machine that blends as the demo does, even where a full prefill is faster."""
    gateway = GatewaySpec(grpc_port=0)
    expert = EngineExpert(loading_controller=False, selector=BLEND.selector, ratio=BLEND.ratio)
    return ServiceSpec(
        ModelSpec(model, display_name(model)),
        engines=EngineSpec(quality="off", expert=expert),
        gateway=replace(gateway, http_port=free_port(gateway.host, gateway.http_port, CONSOLE_PORTS)),
    )


def open_in_browser(url: str) -> None:
    """Open a page if there is a desktop. Without one, Python might start a browser in the terminal."""
    if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        webbrowser.open(url)


def demo_texts() -> list[tuple[str, str]]:
    """Return (title, text) of the passages that the demo uses, in prompt order."""
    texts = [(passage.title, passage.text) for passage in read_bundled_passages()[:PASSAGES]]
    random.Random(_ORDER_SEED).shuffle(texts)
    return texts


def _require_blend(reason: str | None) -> None:
    if reason is not None:
        label, _, detail = reason.partition(": ")
        raise NotBlendable(label, detail or "run kintsugi doctor for more")


def demo_document(show: Show, session: Session, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """JSON form of the demo."""
    full_ttft_s, prompt = measurements[0].ttft_s, session.prompt
    return {
        "model": display_name(show.model),
        "calibrated": False,
        "question": show.question.question,
        "form": session.form.name.value,
        "expected": show.question.answers[0],
        "chosen": show.chosen,
        "tally": None if show.tally is None else asdict(show.tally),
        "prompt_tokens": len(prompt.token_ids),
        "chunks": [
            {"title": chunk.title, "tokens": len(chunk.token_ids), "start": span.start}
            for chunk, span in zip(prompt.chunks, prompt.spans, strict=True)
        ],
        "methods": [
            {**measurement.to_mapping(full_ttft_s), "right": _judge(measurement, show)}
            for measurement in measurements
        ],
    }


def _judge(measurement: Measurement, show: Show) -> bool:
    """Whether the answer is right."""
    return is_right(measurement.generation.text, show.question.answers)


def _render(console: Console, show: Show, session: Session, measurements: Sequence[Measurement]) -> None:
    prompt, name = session.prompt, display_name(show.model)
    console.print(f"\n[bold]{len(prompt.token_ids):,} tokens[/] on {name}")
    prompt_table = make_plain_table(style="dim")
    prompt_table.add_row("chunks", Text(" · ".join(chunk.title for chunk in prompt.chunks)))
    prompt_table.add_row("question", Text(show.question.question))
    prompt_table.add_row("right answer", Text(show.question.answers[0]))
    console.print(prompt_table)
    print_form(console, session.form.name)
    print_ways(console, measurements, [_judge(measurement, show) for measurement in measurements])
    console.print("\n[bold]The blend[/]")
    print_accounting(console, measurements[-1].generation.accounting)
    console.print("\n[bold]The question[/]")
    console.print(show.chosen)
    console.print(f"\n{NO_REPORT_NOTE}", style="yellow")
    console.print("\n[bold]Next[/]")
    steps = make_plain_table()
    for command, purpose in (
        ("kintsugi demo --open", f"keep the model running, with a console in the browser: {CONSOLE_URL}"),
        ("kintsugi generate --compare", "ask your own question about your own files"),
        (f"kintsugi calibrate --model {show.model} --out report.json", "measure how it can be blended"),
        (f"kintsugi serve --model {show.model}", "serve it to gRPC and OpenAI clients"),
    ):
        steps.add_row(Text(command), purpose)
    console.print(steps)
    console.print(f"\n{OWN_DOCUMENTS}")
