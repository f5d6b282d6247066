"""Summarises the rows of the matrix: figures with bars, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.support.architectures.catalogue import ALL, BLENDED, Architecture
from benchmarks.support.architectures.declines import is_clear
from benchmarks.support.architectures.registry import read_asked_classes
from benchmarks.support.architectures.rows import Outcome, Row
from benchmarks.support.architectures.sizes import PUBLISHED, bytes_per_token
from benchmarks.support.figures import Figure

EXACT_MIN = 28
NEEDED = ("sinks", "mla", "nope", "partial", "longrope", "backend", "vision", "geometry")
"""Classes that must be exact."""
HYBRIDS_MIN = 5
HYBRIDS_NEEDED = ("Lfm2ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")
"""Models with recurrent layers that must be exact."""
COLUMNS = (
    "ratio 1",
    "any ratio",
    "bfloat16",
    "mixed batches",
    "prefix caching",
    "chunked prefill",
    "two ranks",
)
"""Checks that the table shows."""
FULL_RATIO_CHECKS = ("ratio 1", "own prefix", "two ranks")


@dataclass(frozen=True)
class Matrix:
    """All rows of one run, by name."""

    one_rank: Mapping[str, Row]
    two_ranks: Mapping[str, Row]

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]], commit: str) -> Matrix:
        """Read the matrix that `to_mapping` wrote, without removed entries. ``commit``: for rows that name
        none."""
        one_rank = [row for row in rows if row["name"] in ALL]
        two_ranks = [row["two_ranks"] for row in one_rank if row["two_ranks"]]
        found = ([Row.of({"commit": commit, **row}) for row in those] for those in (one_rank, two_ranks))
        return Matrix(*({row.name: row for row in those} for those in found))

    def over(self, earlier: Matrix) -> Matrix:
        """Return these rows, and those of entries that only ``earlier`` has."""
        others = {name: row for name, row in earlier.two_ranks.items() if name not in self.one_rank}
        return Matrix({**earlier.one_rank, **self.one_rank}, {**others, **self.two_ranks})

    def all_rows(self) -> list[Row]:
        return [*self.one_rank.values(), *self.two_ranks.values()]

    def outcome(self, name: str) -> Outcome:
        """The outcome of an entry: two ranks count where one is exact."""
        row, ranks = self.one_rank[name], self.two_ranks.get(name)
        if row.outcome is Outcome.EXACT and ranks is not None:
            return ranks.outcome
        return row.outcome

    def reason(self, name: str) -> str:
        """Why the outcome of an entry is what it is."""
        row, ranks = self.one_rank[name], self.two_ranks.get(name)
        if row.reason or ranks is None or not ranks.reason:
            return row.reason
        return f"on two ranks, {ranks.reason}"

    def is_clear(self, name: str) -> bool:
        """Whether an entry is exact, or declined for a reason of the list. Ranks decline for one too."""
        rows = [row for row in (self.one_rank[name], self.two_ranks.get(name)) if row is not None]
        return all(
            row.outcome is Outcome.EXACT or (row.outcome is Outcome.DECLINED and is_clear(row.reason))
            for row in rows
        )

    def exact(self) -> list[Architecture]:
        """Entries for which every check holds, including the reference."""
        return [
            ALL[name]
            for name, row in self.one_rank.items()
            if self.outcome(name) is Outcome.EXACT and "any ratio" in row.figures and ALL[name] in BLENDED
        ]

    def to_mapping(self) -> list[dict[str, Any]]:
        """JSON form, one object for an entry."""
        return [
            {
                **row.to_mapping(),
                "class": ALL[name].model_class,
                "shows": sorted(ALL[name].shows),
                "outcome": self.outcome(name).value,
                "reason": self.reason(name),
                "two_ranks": self.two_ranks[name].to_mapping() if name in self.two_ranks else None,
            }
            for name, row in self.one_rank.items()
        ]


def make_table(matrix: Matrix) -> Table:
    """One line for an entry, the exact ones first."""
    table = Table(title="largest differences of a logprob", show_lines=False)
    for column in ("architecture", "outcome", *COLUMNS, "reason"):
        table.add_column(column)
    order = list(Outcome)
    for name, row in sorted(matrix.one_rank.items(), key=lambda item: order.index(matrix.outcome(item[0]))):
        ranks = matrix.two_ranks.get(name)
        found = {**row.figures, **(ranks.figures if ranks else {})}
        cells = (f"{found[column]:.1e}" if column in found else "" for column in COLUMNS)
        table.add_row(name, matrix.outcome(name).value, *cells, Text(matrix.reason(name)[:200]))
    return table


def figures_of(matrix: Matrix, before: Sequence[Mapping[str, Any]] = ()) -> list[Figure]:
    """The figures of a whole run; ``before`` are the rows of an earlier one."""
    rows = matrix.all_rows()
    in_float32 = [row for row in rows if ALL[row.name].dtype == "float32"]
    wrong = [f"{row.name} ({row.reason})" for row in rows if row.outcome is Outcome.WRONG]
    bfloat16 = ["bfloat16" not in row.failed for row in rows if "bfloat16" in row.figures]
    tied = [row.name for row in rows if "bfloat16" not in row.failed and "bfloat16_tie_at" in row.figures]
    lost = [
        f"{one['name']} ({matrix.outcome(one['name'])})"
        for one in before
        if one["outcome"] == Outcome.EXACT
        and one["name"] in matrix.one_rank
        and matrix.outcome(one["name"]) is not Outcome.EXACT
    ]
    return [
        _exact_classes(matrix),
        _exact_hybrids(matrix),
        _hybrid_bytes(),
        _largest("r1_max_abs_dlogprob", in_float32, FULL_RATIO_CHECKS, 1e-4, "ratio 1 against vLLM alone"),
        Figure.at_least(
            "r1_bf16_tokens_equal",
            sum(bfloat16) / len(bfloat16) if bfloat16 else 0.0,
            1.0,
            unit="",
            detail=f"share of {len(bfloat16)} models whose 32 tokens are equal"
            + (f"; up to a tie of vLLM's own: {', '.join(tied)}" if tied else ""),
        ),
        _largest("oracle_max_abs_dlogprob", in_float32, ("any ratio",), 1e-3, "float32, every selector"),
        _clear_declines(matrix),
        Figure.at_most("wrong_answers", len(wrong), 0, unit="", detail="; ".join(wrong)),
        Figure.at_most("no_longer_exact", len(lost), 0, unit="", detail="; ".join(lost)),
    ]


def _exact_classes(matrix: Matrix) -> Figure:
    exact = matrix.exact()
    classes = sorted({one.model_class for one in exact})
    shown = {kind for one in exact for kind in one.shows}
    missing = [kind for kind in NEEDED if kind not in shown]
    detail = ", ".join(classes) + (f"; none with {', '.join(missing)}" if missing else "")
    holds = len(classes) >= EXACT_MIN and not missing
    bar = f"≥ {EXACT_MIN}, with {', '.join(NEEDED)}"
    return Figure("architectures_exact", len(classes), "classes", bar, holds, detail)


def _exact_hybrids(matrix: Matrix) -> Figure:
    classes = sorted({one.model_class for one in matrix.exact() if "hybrid" in one.shows})
    missing = [name for name in HYBRIDS_NEEDED if name not in classes]
    detail = ", ".join(classes) + (f"; not {', '.join(missing)}" if missing else "")
    holds = len(classes) >= HYBRIDS_MIN and not missing
    bar = f"≥ {HYBRIDS_MIN}, with {', '.join(HYBRIDS_NEEDED)}"
    return Figure("hybrid_classes_exact", len(classes), "classes", bar, holds, detail)


def _hybrid_bytes() -> Figure:
    sizes = {model: bytes_per_token(name) for name, (model, _) in PUBLISHED.items()}
    detail = ", ".join(f"{model}: {size['raw']} raw, {size['int8']} int8" for model, size in sizes.items())
    return Figure("hybrid_bytes_per_token", max(size["raw"] for size in sizes.values()), "B", detail=detail)


def _largest(name: str, rows: Iterable[Row], checks: Sequence[str], bar: float, detail: str) -> Figure:
    found = [(row.figures[check], row.name) for row in rows for check in checks if check in row.figures]
    worst, where = max(found, default=(0.0, "no row"))
    return Figure.at_most(name, worst, bar, unit="", detail=f"{detail}; largest on {where}")


def _clear_declines(matrix: Matrix) -> Figure:
    """A class of the committed list is clear if each of its rows is exact, or declined for a clear reason."""
    asked = [
        name for name in read_asked_classes() if name in {ALL[row].model_class for row in matrix.one_rank}
    ]
    unclear = []
    for name in asked:
        rows = [row for row in matrix.one_rank if ALL[row].model_class == name]
        bad = [row for row in rows if not matrix.is_clear(row)]
        unclear += [f"{row} ({matrix.outcome(row)}: {matrix.reason(row)[:80]})" for row in bad[:1]]
    share = 1 - len(unclear) / len(asked) if asked else 0.0
    detail = f"of {len(asked)} classes" + (f"; not: {'; '.join(unclear)}" if unclear else "")
    return Figure.at_least("declines_clear", share, 1.0, unit="", detail=detail)
