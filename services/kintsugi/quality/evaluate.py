"""Evaluation: measures quality, cost and time of configurations over several shapes of prompts.

Axes: selector, ratio and check layer; codec; tokens per chunk; number of chunks; prompts per batch; speed of
the tier. Each combination of codec and tier speed runs in its own engine, one after the other. A row holds
one configuration in one setting; each setting also has rows for full prefill and full KV reuse.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.core.plan import Selection
from kintsugi.core.prompt import PromptChunk, RagPrompt
from kintsugi.core.report import describe_selection
from kintsugi.engine.local import LocalEngine
from kintsugi.quality import metrics
from kintsugi.quality.measure import Bench, Case, Notify, Scores, measure_selection
from kintsugi.quality.metrics import Interval

FULL = "full prefill"
REUSE = "full KV reuse"
REUSE_SELECTION = Selection(0.0)
RATE_PROMPTS_MAX = 64
RATE_COST_MAX = 0.5


@dataclass(frozen=True)
class Axes:
    """The values to vary: one per axis by default."""

    selections: Sequence[Selection]
    codecs: Sequence[str] = ("raw",)
    chunk_tokens: Sequence[int | None] = (None,)
    """None keeps the chunks' own lengths."""
    chunk_counts: Sequence[int | None] = (None,)
    """Number of leading chunks to keep; None keeps all."""
    batches: Sequence[int] = (32,)
    """Prompts that are submitted together; TTFT includes the time spent waiting for each other."""
    tier_bytes_per_s: Sequence[float | None] = (None,)
    """None means as fast as memory."""
    rates_per_s: Sequence[float] = ()
    """Rates of Poisson arrivals at which TTFT is measured."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "chunk_counts", "batches"):
            if any(value is not None and value < 1 for value in getattr(self, name)):
                raise InvalidField(name, "must be at least 1")
        for name in ("tier_bytes_per_s", "rates_per_s"):
            if any(value is not None and not value > 0 for value in getattr(self, name)):
                raise InvalidField(name, "must be above 0")
        for codec in self.codecs:
            codec_named(codec)
        if not self.selections:
            raise InvalidField("selectors", "no configuration to measure; name a selector and a ratio")

    def engines(self) -> list[tuple[str, float | None]]:
        """The codec and tier speed of each engine to start."""
        return list(itertools.product(self.codecs, self.tier_bytes_per_s))


@dataclass(frozen=True)
class Setting:
    """A point on all axes except the configuration."""

    codec: str
    tier_bytes_per_s: float | None
    chunk_tokens: int | None
    chunk_count: int | None
    batch: int


@dataclass(frozen=True)
class EvaluationRow:
    """One configuration in one setting. Intervals are 95 % bootstrap intervals over prompts; losses are
    paired."""

    setting: Setting
    method: str
    selection: Selection | None
    cost: float
    ttft: Interval
    """Seconds."""
    num_prompts: int
    kl_mean: float = 0.0
    kl_p99: float = 0.0
    top1_agreement: float = 1.0
    exact_match: Interval | None = None
    f1: Interval | None = None
    rouge_l: Interval | None = None
    em_loss: Interval | None = None
    """Full prefill's exact match minus this one's, on the same prompts."""
    by_task: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RateRow:
    """The TTFT of one method at one request rate."""

    method: str
    rate_per_s: float
    ttft: Interval
    ttft_p95_s: float
    num_prompts: int


def reshape_cases(cases: Sequence[Case], chunk_tokens: int | None, chunk_count: int | None) -> list[Case]:
    """Cut the chunks' text into chunks of `chunk_tokens` (the last may be shorter), and keep the first
    `chunk_count`. Text that a template wrote between documents is dropped when chunks are cut again."""
    changed = []
    for case in cases:
        prompt = case.prompt
        if chunk_tokens is not None:
            ids = [token for chunk in prompt.chunks for token in chunk.token_ids]
            pieces = range(0, len(ids), chunk_tokens)
            chunks = tuple(PromptChunk("", tuple(ids[start : start + chunk_tokens])) for start in pieces)
            prompt = RagPrompt(prompt.prefix, chunks, prompt.question)
        if chunk_count is not None:
            prompt = RagPrompt(prompt.prefix, prompt.chunks[:chunk_count], prompt.question)
        changed.append(Case(case.question, prompt))
    return changed


def evaluate(
    engine: LocalEngine,
    cases: Sequence[Case],
    axes: Axes,
    codec: str,
    speed: float | None,
    max_tokens: int,
    notify: Notify = lambda text: None,
) -> list[EvaluationRow]:
    """Measure every setting and configuration that this engine can run."""
    rows: list[EvaluationRow] = []
    for chunk_tokens, chunk_count in itertools.product(axes.chunk_tokens, axes.chunk_counts):
        shaped = reshape_cases(cases, chunk_tokens, chunk_count)
        notify("storing chunks")
        Bench(engine, shaped, max_tokens).store_chunks()
        for batch in axes.batches:
            setting = Setting(codec, speed, chunk_tokens, chunk_count, batch)
            rows += _measure_setting(Bench(engine, shaped, max_tokens, batch), setting, axes, notify)
    return rows


def _measure_setting(bench: Bench, setting: Setting, axes: Axes, notify: Notify) -> list[EvaluationRow]:
    everything = range(len(bench.cases))
    # Warm up: an engine's first prompts include the time to compile kernels.
    Bench(bench.engine, bench.cases[:2], bench.max_tokens, bench.batch).full(range(min(2, len(everything))))
    notify(FULL)
    full = bench.full(everything)
    rows = [row_of(FULL, None, setting, Scores(Selection(1.0), bench.cases, full, full))]
    for method, selection in _blends(axes.selections):
        notify(method)
        rows.append(row_of(method, selection, setting, measure_selection(bench, selection, everything)))
    return rows


def _blends(selections: Sequence[Selection]) -> list[tuple[str, Selection]]:
    """Return full KV reuse and the selections, with their names."""
    return [(REUSE, REUSE_SELECTION), *((describe_selection(one), one) for one in selections)]


def row_of(method: str, selection: Selection | None, setting: Setting, scores: Scores) -> EvaluationRow:
    exact = scores.score_cases(metrics.exact_match)
    losses = [
        before - after
        for before, after in zip(scores.score_cases(metrics.exact_match, of_blend=False), exact, strict=True)
    ]
    tasks = sorted({case.question.task for case in scores.cases})
    return EvaluationRow(
        setting,
        method,
        selection,
        scores.cost,
        metrics.bootstrap([answer.ttft_s for answer in scores.blend]),
        len(scores.cases),
        scores.kl_mean,
        scores.kl_p99,
        scores.top1_agreement,
        _interval(exact),
        _interval(scores.score_cases(metrics.f1)),
        _interval(scores.score_cases(metrics.rouge_l)),
        _interval(losses),
        {task: _task_row(scores.of_task(task)) for task in tasks} if len(tasks) > 1 else {},
    )


def _interval(values: Sequence[float]) -> Interval | None:
    return metrics.bootstrap(values) if values else None


def _task_row(scores: Scores) -> dict[str, float]:
    exact = scores.score_cases(metrics.exact_match)
    values = {"kl_mean": scores.kl_mean, "top1_agreement": scores.top1_agreement}
    return {**values, "exact_match": metrics.mean(exact)} if exact else values


def best_by_selector(rows: Sequence[EvaluationRow]) -> list[Selection]:
    """Return each selector's best selection in the first setting: the one closest to full prefill among those
    that cost at most `RATE_COST_MAX`."""
    best: dict[str, EvaluationRow] = {}
    for row in rows:
        if row.selection is None or row.method == REUSE or row.setting != rows[0].setting:
            continue
        name = row.selection.selector
        if name not in best or _preference(row) < _preference(best[name]):
            best[name] = row
    return [row.selection for row in best.values() if row.selection is not None]


def _preference(row: EvaluationRow) -> tuple[float, float]:
    return max(0.0, row.cost - RATE_COST_MAX), row.kl_mean


def measure_rates(
    engine: LocalEngine,
    bench: Bench,
    selections: Sequence[Selection],
    rates_per_s: Sequence[float],
    notify: Notify,
) -> list[RateRow]:
    """Measure TTFT under Poisson arrivals, which are the same for every method. The bench's chunks must be
    stored."""
    rows = []
    count = min(RATE_PROMPTS_MAX, len(bench.cases))
    methods: list[tuple[str, Selection | None]] = [(FULL, None), *_blends(selections)]
    for rate in rates_per_s:
        picks = random.Random(1)
        arrivals_s = list(itertools.accumulate(picks.expovariate(rate) for _ in range(count)))
        for method, selection in methods:
            notify(f"{method} at {rate:g} requests per second")
            engine.reset_prefix_cache()
            prompts = [bench.prompt(index, selection) for index in range(count)]
            ttfts = [answer.ttft_s for answer in engine.generate(prompts, arrivals_s=arrivals_s)]
            rows.append(
                RateRow(method, rate, metrics.bootstrap(ttfts), metrics.percentile(ttfts, 0.95), count)
            )
    return rows
