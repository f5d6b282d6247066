"""Prints results in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kintsugi.cli.methods import Measurement, Method
from kintsugi.core.accounting import Outcome
from kintsugi.core.plan import FormName

ABOUT: Mapping[Method, str] = {
    Method.FULL: "computes the whole prompt",
    Method.PREFIX: "reuses the beginning that prompts share",
    Method.REUSE: "reuses every chunk unchanged",
    Method.BLEND: "reuses every chunk, recomputes a few tokens",
}
"""Descriptions of the methods for readers who do not know the paper."""
ANSWER_CHARS_MAX = 120
VERDICTS = {True: Text("right", style="green"), False: Text("wrong", style="red"), None: Text()}


def make_figures_table(headings: Sequence[str], **options: Any) -> Table:
    """Return an empty table with a left-aligned first column and right-aligned figures."""
    table = Table(header_style="bold", **options)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def make_plain_table(style: str = "") -> Table:
    """Return an empty table without headings and lines."""
    return Table(show_header=False, box=None, padding=(0, 2, 0, 0), style=style)


def print_ways(
    console: Console, measurements: Sequence[Measurement], right: Sequence[bool] | None = None
) -> None:
    """Print what each method does, its time to first token, and its answer. ``right``: whether each answer is
    right; None: unknown."""
    headings = ("way", "what it does", "first word after", "sooner", "computed")
    table, answers = make_figures_table(headings), make_plain_table()
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    full_ttft_s = measurements[0].ttft_s
    for index, measurement in enumerate(measurements):
        style = "bold yellow" if measurement.method is Method.BLEND else ""
        sooner = f"{full_ttft_s / measurement.ttft_s:.1f}×" if index else ""
        name, ttft = measurement.method.value, format_milliseconds(measurement.ttft_s)
        table.add_row(name, ABOUT[measurement.method], ttft, sooner, f"{measurement.cost:.0%}", style=style)
        verdict = VERDICTS[None if right is None else right[index]]
        answers.add_row(Text(name, style="dim"), verdict, Text(one_line(measurement.generation.text)))
    console.print(table)
    console.print("\n[bold]The answers[/]")
    console.print(answers)
    console.print("computed: share of a full prefill's token-layers", style="dim")


def print_form(console: Console, form: FormName) -> None:
    """Print the name of the prompt form."""
    console.print(f"prompt form: {form.value}\n", style="dim")


def print_accounting(console: Console, accounting: dict[str, Any] | None) -> None:
    table = make_plain_table()
    for name, value in facts_of(accounting):
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(table)


def facts_of(accounting: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the accounting as (name, text) pairs."""
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
    """Format as `512 B` or `1.5 GiB`, with three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} TiB" if size < 1000 else f"{size:,.0f} TiB"


def format_milliseconds(seconds: float) -> str:
    """Format as `1,234 ms`; with one decimal below ten."""
    value = seconds * 1e3
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"


def format_count(number: int, noun: str) -> str:
    """Format as `1 token` or `1,234 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    """Return `text` without line breaks and control characters, cut to `ANSWER_CHARS_MAX`."""
    flat = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return flat if len(flat) <= ANSWER_CHARS_MAX else flat[: ANSWER_CHARS_MAX - 1] + "…"
