"""`kintsugi demo`: one question over passages in shuffled order, answered four ways."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kintsugi.checkpoints.passages import BUNDLED_QUESTIONS, bundled_passages
from kintsugi.cli.methods import BlendChoice, Measurement, compare
from kintsugi.cli.rag import read_chunk
from kintsugi.cli.render import print_accounting, print_comparison
from kintsugi.cli.screen import Screen
from kintsugi.cli.session import REGARDLESS, UNCALIBRATED_NOTE, Model, chosen_model, opened
from kintsugi.core.errors import NotBlendable
from kintsugi.core.prompt import RagPrompt

NAMESPACE = "demo"
PASSAGES = 6
MAX_TOKENS = 16
_ORDER_SEED = 3

RANDOM_WEIGHTS_NOTE = (
    "This model was made for the demo and has random weights: its answers are gibberish and say nothing "
    "about quality. The times are real. Name a trained model with --model PATH."
)


def run(screen: Screen, model: str | None, files: Sequence[Path], question: str | None, repeat: int) -> None:
    """Raises `NotBlendable` where the blend fell back to full prefill: there is nothing to show then."""
    texts = [read_chunk(path) for path in files] or bundled_texts()
    random.Random(_ORDER_SEED).shuffle(texts)
    asked = question or BUNDLED_QUESTIONS[0]
    chosen = chosen_model(screen, model)
    with opened(screen, chosen, texts, asked, NAMESPACE, MAX_TOKENS, REGARDLESS) as session:
        _insist(session.not_saved_because)
        with screen.step("Answering four ways") as say:
            measurements = compare(
                session.engine, session.prompt, BlendChoice(NAMESPACE), MAX_TOKENS, repeat, say
            )
        prompt = session.prompt
    for measurement in measurements:
        _insist(measurement.fell_back_because)
    document = demo_document(chosen, prompt, asked, measurements)
    screen.show(document, lambda console: _render(console, chosen, prompt, asked, measurements))


def bundled_texts() -> list[tuple[str, str]]:
    """(title, text) of the passages that the demo uses."""
    return [(passage.title, passage.text) for passage in bundled_passages()[:PASSAGES]]


def _insist(reason: str | None) -> None:
    if reason is not None:
        label, _, detail = reason.partition(": ")
        raise NotBlendable(label, detail or "run kintsugi doctor for more")


def demo_document(
    model: Model, prompt: RagPrompt, question: str, measurements: Sequence[Measurement]
) -> dict[str, Any]:
    """JSON form of the demo."""
    return {
        "model": model.name,
        "random_weights": model.random_weights,
        "calibrated": False,
        "question": question,
        "prompt_tokens": len(prompt.token_ids),
        "chunks": [
            {"title": chunk.title, "tokens": len(chunk.token_ids), "start": span.start}
            for chunk, span in zip(prompt.chunks, prompt.spans, strict=True)
        ],
        "methods": [measurement.to_mapping(measurements[0].ttft_s) for measurement in measurements],
    }


def _render(
    console: Console,
    model: Model,
    prompt: RagPrompt,
    question: str,
    measurements: Sequence[Measurement],
) -> None:
    titles = " · ".join(chunk.title for chunk in prompt.chunks)
    console.print()
    console.print(f"[bold]{len(prompt.token_ids):,} tokens[/] on {model.name}", highlight=False)
    prompt_table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), style="dim")
    prompt_table.add_row("chunks", Text(titles))
    prompt_table.add_row("question", Text(question))
    console.print(prompt_table)
    console.print()
    print_comparison(console, measurements, len(prompt.chunks))
    console.print("\n[bold]The blend[/]")
    print_accounting(console, measurements[-1].generation.accounting)
    if model.random_weights:
        console.print(f"\n{RANDOM_WEIGHTS_NOTE}", style="yellow", highlight=False)
    console.print(f"\n{UNCALIBRATED_NOTE}", style="yellow", highlight=False)
