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

from kintsugi.cli.methods import BlendChoice, Measurement, compare
from kintsugi.cli.models import prepare_model
from kintsugi.cli.options import DemoTask
from kintsugi.cli.render import make_plain_table, print_accounting, print_form, print_ways
from kintsugi.cli.screen import Screen
from kintsugi.cli.session import (
    REGARDLESS,
    Asked,
    ModelSource,
    Session,
    make_random_model,
    open_session,
    read_chunk,
    resolve_model_argument,
)
from kintsugi.core.deploy import (
    EngineExpert,
    EngineSpec,
    GatewaySpec,
    ModelSpec,
    ServiceSpec,
)
from kintsugi.core.errors import DeadlineExceeded, InvalidField, NotBlendable, ResourceExhausted, Unavailable
from kintsugi.core.request import SelectorName
from kintsugi.gateway.addresses import format_address, free_port
from kintsugi.gateway.console.assets import CONSOLE_PATH
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint, showcase
from kintsugi.models.demo_questions import RightAnswers, choose_shown, is_right, read_demo_questions
from kintsugi.models.passages import read_bundled_passages
from kintsugi.models.reference import REFERENCE

NAMESPACE = "demo"
PASSAGES = 6
MAX_TOKENS = 32
CONSOLE_URL = f"http://{format_address(GatewaySpec().host, GatewaySpec().http_port)}{CONSOLE_PATH}"
"""URL of the console with `--open`, unless the port is taken."""
CONSOLE_PORTS = 16
"""Number of ports tried for the console, starting at the gateway's own."""
FILES_QUESTION = "What are these texts about?"
_ORDER_SEED = 3

REPEAT = 3
"""How often each method is timed; medians are shown."""
BLEND = BlendChoice(NAMESPACE, ratio=0.12, selector=SelectorName.QUERY)
"""How the demo blends, on every model."""

REFERENCE_DTYPE = "float32"
"""Data type of the reference model in the demo. In bfloat16 its answers depend on the CPU: CPUs that multiply
in bfloat16 round where others do not."""

RANDOM_WEIGHTS_NOTE = (
    "This model was made for the demo with random weights: its answers are gibberish and show nothing "
    "about quality. The times are real."
)
SMALL_MODEL_NOTE = (
    "This model has 2.8 million parameters. Its times are left out: blending saves time on models that take "
    "long to read a prompt. The question was chosen: at this length the model is rarely right."
)
NO_REPORT_NOTE = (
    "The demo blends without a calibration report. A service does not: kintsugi calibrate measures whether "
    "blended answers are as good as those of full prefill, and writes the report."
)
OTHER_MODEL_NOTE = f"The question was chosen by the answers of {REFERENCE.title}, not of this model."
OUTSIDE_NOTE = (
    "Blended although the bundled model's calibration report does not speak about prompts of this length: a "
    "server would prefill this one in full (outside_calibration). The answer shows what happened here, not "
    "what to expect."
)


@dataclass(frozen=True)
class Fallback:
    """Why the bundled model serves instead of the reference model."""

    kind: str
    """Name of the error's type."""
    reason: str


@dataclass(frozen=True)
class Show:
    """The model, the prompt and the notes that the demo shows."""

    model: ModelSource
    asked: Asked
    note: str = NO_REPORT_NOTE
    """Why a service would not blend this."""
    max_tokens: int = MAX_TOKENS
    answers: tuple[str, ...] = ()
    """An answer that contains one of these is right. Empty: the right answer is unknown."""
    chosen: str | None = None
    """How the question was chosen; None if the user asked it."""
    tally: RightAnswers | None = None
    """How often this model answered the demo's questions correctly; None if unknown."""
    fallback: Fallback | None = None
    random_weights: bool = False
    dtype: str = "auto"
    """vLLM's data type of weights and KV."""

    @property
    def shows_times(self) -> bool:
        """Whether the model is large enough for its times to be meaningful."""
        return self.model.name != BUNDLED_NAME

    @property
    def shows_answers(self) -> bool:
        """Whether the model was trained, so that its answers are meaningful."""
        return not self.random_weights


def run(screen: Screen, task: DemoTask) -> None:
    """Run the demo. Raises `NotBlendable` if the blend fell back to full prefill."""
    show = _choose_show(screen, task)
    with open_session(
        screen, show.model, show.asked, NAMESPACE, show.max_tokens, REGARDLESS, dtype=show.dtype
    ) as session:
        _require_blend(session.not_saved_because)
        with screen.step("Answering four ways") as say:
            measurements = compare(session.engine, session.prompt, BLEND, show.max_tokens, REPEAT, say)
    for measurement in measurements:
        _require_blend(measurement.fell_back_because)
    document = demo_document(show, session, measurements)
    screen.show(document, lambda console: _render(console, show, session, measurements))
    if task.open_console:
        _serve_console(screen, show.model, show.dtype)


def _serve_console(screen: Screen, model: ModelSource, dtype: str) -> None:
    """Serve the model until interrupted, and open the console."""
    from kintsugi.cli.commands.serve import serve

    serve(screen, console_service_spec(model, dtype), open_in_browser)


def console_service_spec(model: ModelSource, dtype: str) -> ServiceSpec:
    """Return a service on this machine that blends as the demo does, even where a full prefill is faster."""
    gateway = GatewaySpec(grpc_port=0)
    expert = EngineExpert(loading_controller=False, selector=BLEND.selector, ratio=BLEND.ratio)
    return ServiceSpec(
        ModelSpec(model.path, model.name),
        engines=EngineSpec(allow_uncalibrated=True, vllm={"dtype": dtype}, expert=expert),
        gateway=replace(gateway, http_port=free_port(gateway.host, gateway.http_port, CONSOLE_PORTS)),
    )


def open_in_browser(url: str) -> None:
    """Open a page if there is a desktop. Without one, Python might start a browser in the terminal."""
    if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        webbrowser.open(url)


def _choose_show(screen: Screen, task: DemoTask) -> Show:
    """Choose the model and the prompt. Raises `InvalidField` for options that exclude each other, and the
    errors of `prepare_model` if the user chose the model, files or question: the bundled model knows only its
    own words."""
    if task.random_weights:
        if task.model is not None:
            raise InvalidField("random-weights", "makes a model of its own; omit --model")
        show = _passages_show(make_random_model(screen), task)
        return replace(show, answers=(), chosen=None, random_weights=True)
    model = resolve_model_argument(task.model or REFERENCE.name)
    try:
        prepare_model(screen, model.path)
    except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
        if task.model is not None or task.files or task.question is not None:
            raise
        return replace(_bundled_show(), fallback=Fallback(type(error).__name__, str(error)))
    return _passages_show(model, task)


def _passages_show(model: ModelSource, task: DemoTask) -> Show:
    """Show the user's files and question, or the bundled passages and their question."""
    texts = [read_chunk(path) for path in task.files or ()] or demo_texts()
    if task.files or task.question is not None:
        return Show(model, Asked(texts, task.question or FILES_QUESTION))
    questions = read_demo_questions()
    shown = choose_shown(questions)
    tally = RightAnswers.of(questions)
    show = Show(model, Asked(texts, shown.question), answers=shown.answers)
    if model.path != REFERENCE.name:
        return replace(show, chosen=OTHER_MODEL_NOTE)
    return replace(show, chosen=_describe_choice(tally), tally=tally, dtype=REFERENCE_DTYPE)


def _describe_choice(tally: RightAnswers) -> str:
    return (
        f"Each of {tally.asked} questions about these passages was written before the model answered it. "
        "They were asked in three ways that round differently: all at once, one by one, and one by one "
        f"without AVX-512. Full prefill answers {tally.full_right} of them right every time. Of those "
        f"{tally.full_right}, full KV reuse gets {tally.reuse_right} right at least once, the blend "
        f"{tally.blend_right} every time. This is the first of the {tally.blend_mended} that full KV reuse "
        "gets wrong and the blend right, every time."
    )


def _bundled_show() -> Show:
    shown = showcase()
    texts = [(f"chunk {number}", text) for number, text in enumerate(shown.chunks, start=1)]
    return Show(
        model=ModelSource(str(bundled_checkpoint()), BUNDLED_NAME),
        asked=Asked(texts, shown.question, bare=False),
        note=OUTSIDE_NOTE,  # its report covers prompts a sixth as long
        max_tokens=1,
        answers=(shown.answer,),
        chosen=SMALL_MODEL_NOTE,
    )


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
        "model": show.model.name,
        "dtype": show.dtype,
        "fallback": None if show.fallback is None else asdict(show.fallback),
        "random_weights": show.random_weights,
        "calibrated": False,
        "question": show.asked.question,
        "form": session.form.name.value,
        "expected": show.answers[0] if show.answers else None,
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


def _judge(measurement: Measurement, show: Show) -> bool | None:
    """Whether the answer is right; None if unknown."""
    return is_right(measurement.generation.text, show.answers) if show.answers else None


def _render(console: Console, show: Show, session: Session, measurements: Sequence[Measurement]) -> None:
    prompt = session.prompt
    console.print()
    if show.fallback is not None:
        note = f"{REFERENCE.title}, which the demo runs on, is not here. The bundled model serves instead."
        console.print(f"{note}\n{show.fallback.reason}\n", style="yellow", highlight=False, markup=False)
    console.print(f"[bold]{len(prompt.token_ids):,} tokens[/] on {show.model.name}", highlight=False)
    prompt_table = make_plain_table(style="dim")
    prompt_table.add_row("chunks", Text(" · ".join(chunk.title for chunk in prompt.chunks)))
    prompt_table.add_row("question", Text(show.asked.question))
    if show.answers:
        prompt_table.add_row("right answer", Text(show.answers[0]))
    console.print(prompt_table)
    print_form(console, session.form.name)
    right = [_judge(measurement, show) for measurement in measurements] if show.answers else None
    print_ways(console, measurements, right, show.shows_times, show.shows_answers)
    console.print("\n[bold]The blend[/]")
    print_accounting(console, measurements[-1].generation.accounting)
    if show.chosen is not None:
        console.print("\n[bold]The question[/]")
        console.print(show.chosen, highlight=False)
    if show.random_weights:
        console.print(f"\n{RANDOM_WEIGHTS_NOTE}", style="yellow", highlight=False)
    console.print(f"\n{show.note}", style="yellow", highlight=False)
    if not show.random_weights:
        _print_next_steps(console, show)


def _print_next_steps(console: Console, show: Show) -> None:
    console.print("\n[bold]Next[/]")
    steps = make_plain_table()
    steps.add_row(
        Text("kintsugi demo --open"), f"keep it running, with a console in the browser: {CONSOLE_URL}"
    )
    model = ""
    if show.fallback is None:
        model = f" --model {show.model.path}"
        steps.add_row(Text(f"kintsugi calibrate{model} --out report.json"), "may it be blended, and how?")
    steps.add_row(Text(f"kintsugi serve{model}"), "serve it to gRPC and OpenAI clients")
    console.print(steps)
