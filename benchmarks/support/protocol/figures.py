"""The figures of the protocol, from the records."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence

from benchmarks.support.figures import Figure, report
from benchmarks.support.protocol.workloads import HARD
from benchmarks.support.real.records import Records
from benchmarks.support.scores import ratio_bootstrap
from kintsugi.quality.metrics import Interval, mean

Row = Mapping[str, Mapping[str, float]]
"""The values of each cell on one prompt, by the cell's name."""
REUSE = "plain/r0"
"""Full KV reuse of chunks saved after the chat's head: what KL is divided by."""


def rows_of(records: Records, is_judged: bool) -> dict[str, list[Row]]:
    """The prompts of each workload."""
    prompts: dict[tuple[str, int], dict[str, Mapping[str, float]]] = {}
    for (workload, number, cell), values in records.below().items():
        if int(number) % 2 == is_judged:
            prompts.setdefault((str(workload), int(number)), {})[str(cell)] = values
    found: dict[str, list[Row]] = {}
    for (workload, _), cells in sorted(prompts.items()):
        found.setdefault(workload, []).append(cells)
    return found


def share(rows: Sequence[Row], name: str, base: str = REUSE) -> Interval | None:
    """KL of a cell ÷ that of another on the prompts that have both; None without any, as for full prefill."""
    both = [row for row in rows if all("kl" in row.get(cell, {}) for cell in (name, base))]
    if not both:
        return None
    return ratio_bootstrap([row[name]["kl"] for row in both], [row[base]["kl"] for row in both])


def report_all(records: Records, arguments: argparse.Namespace) -> None:
    """Print a table of each workload, then report the judged figures; with ``--save``, keep them."""
    tables = {}
    for is_judged in (False, True):
        for workload, rows in rows_of(records, is_judged).items():
            title = f"{workload}, {'judged' if is_judged else 'choosing'}, {len(rows)} prompts"
            tables[title] = [describe(rows, name) for name in sorted({one for row in rows for one in row})]
            print(title, *tables[title], sep="\n  ")
    name = arguments.model.replace("/", "-")
    config = {
        "model": arguments.model,
        "tables": tables,
        "choice": [arguments.preparation, arguments.selector],
    }
    figures = judged_figures(rows_of(records, True), arguments.preparation, arguments.selector)
    report("protocol", config, figures, save_as=f"protocol-{name}" if arguments.save else None)


def describe(rows: Sequence[Row], name: str) -> str:
    mine = [row[name] for row in rows if name in row]
    words = [f"{name:27}"]
    if (found := share(rows, name)) is not None:
        words.append(f"KL share {found}")
    words += [
        f"{field} {mean([one[field] for one in mine]):.3f}"
        for field in ("agreement", "cost", "f1")
        if all(field in one for one in mine)
    ]
    return "  ".join([*words, f"n {len(mine)}"])


def judged_figures(found: Mapping[str, Sequence[Row]], preparation: str, selector: str) -> list[Figure]:
    """Shares of the chosen configuration, and how much better it is than the best published selection."""
    hard = [row for name, rows in found.items() if name in HARD for row in rows]
    easy = list(found.get("unrelated", ()))
    chosen = f"{preparation}/{selector}@0.2"
    wanted = (
        ("hard_kl_share_cost20", hard, chosen, 0.2),
        ("hard_kl_share_cost10", hard, f"{preparation}/{selector}@0.1", 0.3),
        ("hard_kl_share_r0", hard, f"{preparation}/r0", 0.45),
        ("easy_kl_share_cost20", easy, chosen, 0.1),
    )
    figures = [
        Figure.at_most(name, one.mean, bar, "×", f"{one}, {len(rows)} prompts")
        for name, rows, cell, bar in wanted
        if (one := share(rows, cell)) is not None
    ]
    published = {cell for row in hard for cell in row if cell.endswith("@0.2") and cell != chosen}
    published = {cell for cell in published if cell.startswith(f"{preparation}/")}
    shares = {cell: one.mean for cell in published if (one := share(hard, cell)) is not None}
    best = min(shares, key=lambda cell: shares[cell], default=None)
    lead = None if best is None else share(hard, best, chosen)
    if lead is not None and not math.isnan(lead.low):
        figures.append(Figure.at_least("protocol_lead", lead.low, 1.5, "×", f"{lead}, {best}"))
    return figures
