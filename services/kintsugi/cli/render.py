"""Prints results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kintsugi.cli.methods import Measurement, Method
from kintsugi.core.accounting import Outcome
from kintsugi.core.prompt import FormName

HEADINGS = ("", "TTFT", "speed-up", "cost", "chunks hit", "agrees", "answer")
ANSWER_CHARS_MAX = 120
VERDICTS = {True: Text("right", style="green"), False: Text("wrong", style="red"), None: Text()}


def make_figures_table(headings: Sequence[str], **options: Any) -> Table:
    """An empty table: the first column to the left, figures to the right."""
    table = Table(header_style="bold", **options)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def make_plain_table(style: str = "") -> Table:
    """An empty table without headings and lines."""
    return Table(show_header=False, box=None, padding=(0, 2, 0, 0), style=style)


def comparison_rows(measurements: Sequence[Measurement], num_chunks: int) -> list[list[str]]:
    """The comparison's cells: one row per method, in the order of `HEADINGS`."""
    full = measurements[0]
    assert full.method is Method.FULL
    return [
        [
            measurement.method.value,
            format_milliseconds(measurement.ttft_s),
            f"{full.ttft_s / measurement.ttft_s:.1f}×",
            f"{measurement.cost:.0%}",
            "–" if measurement.chunks_hit is None else f"{measurement.chunks_hit} of {num_chunks}",
            f"{measurement.agreement} of {len(full.generation.token_ids)}",
            one_line(measurement.generation.text),
        ]
        for measurement in measurements
    ]


def print_comparison(
    console: Console,
    measurements: Sequence[Measurement],
    num_chunks: int,
    right: Sequence[bool | None] | None = None,
) -> None:
    """Print the figures as a table, and the answers below it.

    ``right`` tells for each answer whether it is right; None where that is unknown for all or for one.
    """
    table = make_figures_table(HEADINGS[:-1])
    answers = make_plain_table()
    rows = comparison_rows(measurements, num_chunks)
    for measurement, row, verdict in zip(measurements, rows, right or [None] * len(rows), strict=True):
        style = "bold yellow" if measurement.method is Method.BLEND else ""
        *figures, answer = (Text(cell) for cell in row)
        table.add_row(*figures, style=style)
        cells = [Text(measurement.method.value, style="dim"), answer]
        if right is not None:
            cells.insert(1, VERDICTS[verdict])
        answers.add_row(*cells)
    console.print(table)
    console.print(answers)
    console.print(
        "cost: share of a full prefill's token-layers that was computed. "
        "agrees: leading answer tokens that equal those of full prefill.",
        style="dim",
    )


def print_form(console: Console, form: FormName) -> None:
    """Say in which form the prompt was written."""
    console.print(f"prompt form: {form.value}\n", style="dim", highlight=False)


def print_accounting(console: Console, accounting: dict[str, Any] | None) -> None:
    table = make_plain_table()
    for name, value in facts_of(accounting):
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(table)


def facts_of(accounting: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The accounting as (name, text) pairs."""
    if accounting is None:
        return [("outcome", "no answer from the connector")]
    values: dict[str, Any] = {"cost": 1.0, **accounting}
    facts = [("outcome", str(values.get("outcome", "unknown")))]
    if values.get("reason"):
        facts.append(("reason", str(values["reason"])))
    if values.get("outcome") != Outcome.BLENDED.value:
        return facts
    return [
        *facts,
        ("selector, ratio", f"{values.get('selector')}, {values.get('ratio')}"),
        ("chunks", f"{values.get('chunks_hit', 0)} hit, {values.get('chunks_missed', 0)} missed"),
        (
            "tokens",
            f"{values.get('tokens_hit', 0):,} loaded, "
            f"{values.get('tokens_recomputed', 0):,} of them recomputed, "
            f"{values.get('tokens_missed', 0):,} missed, "
            f"{values.get('tokens_question', 0):,} around the chunks",
        ),
        ("cost", f"{values['cost']:.1%} of a full prefill"),
        ("loaded", f"{values.get('bytes_loaded', 0) / 2**20:.1f} MiB over {values.get('transport')}"),
        (
            "time",
            f"{values.get('blend_ms', 0.0):.0f} ms: {values.get('compute_ms', 0.0):.0f} computing, "
            f"{values.get('load_wait_ms', 0.0):.0f} waiting for loads",
        ),
    ]


def format_bytes(size: float) -> str:
    """`512 B`, `1.5 GiB`: four significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def format_milliseconds(seconds: float) -> str:
    """`1,234 ms`; one decimal below ten."""
    value = seconds * 1e3
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"


def format_count(number: int, noun: str) -> str:
    """`1 token`, `1,234 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    """`text` without line breaks and control characters, cut to `ANSWER_CHARS_MAX`."""
    flat = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return flat if len(flat) <= ANSWER_CHARS_MAX else flat[: ANSWER_CHARS_MAX - 1] + "…"
