"""Evaluation: measures quality, cost and time of configurations over several shapes of prompts.

A grid varies selector, ratio and check layer, codec, tokens per chunk, number of chunks, prompts per batch
and speed of the tier. Each combination of codec and tier speed runs in its own engine, one after the other. A
row holds one configuration in one setting; each setting also has rows for full prefill and full KV reuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.core.plan import PromptChunk, RagPrompt, Selection
from kintsugi.core.report import describe_selection
from kintsugi.core.request import parse_selector
from kintsugi.core.schema import STRICT
from kintsugi.engine.local import LocalEngine
from kintsugi.fusor.selectors import make_selector
from kintsugi.quality import metrics
from kintsugi.quality.measure import Bench, Case, Notify, Scores, measure_selection
from kintsugi.quality.metrics import Interval

FULL = "full prefill"
REUSE = "full KV reuse"
REUSE_SELECTION = Selection(0.0)
DEPTHS = (0.0, 0.125, 0.25, 0.375)
"""Default check layers, as shares of the model's depth. Deeper ones cost too much."""


@dataclass(frozen=True)
class EvaluationGrid:
    """What to vary: every combination of the values is measured. It is the content of the `--grid` file."""

    __pydantic_config__: ClassVar = STRICT

    selectors: tuple[str, ...] = ("hkvd", "hkvd_gradual", "chunk_head", "query", "hybrid")
    """Selectors."""
    ratios: tuple[float, ...] = (0.05, 0.15, 0.3)
    """Shares of the chunks' tokens to recompute."""
    check_layers: tuple[int, ...] = ()
    """Layers whose KV deviation selects tokens; empty: a few layers that depend on the model's depth."""
    codecs: tuple[str, ...] = ("raw",)
    """Encodings of chunk KV."""
    chunk_tokens: tuple[int | None, ...] = (None,)
    """Chunk sizes in tokens; null: chunks keep their sizes."""
    chunks: tuple[int | None, ...] = (None,)
    """Numbers of leading chunks per prompt; null: all chunks of a question."""
    batches: tuple[int, ...] = (32,)
    """Numbers of prompts that are submitted together; TTFT includes the time for which prompts wait for each
    other."""
    tiers: tuple[float | None, ...] = (None,)
    """Speeds of slower tiers, in bytes per second; null: as fast as memory."""
    limit: int | None = None
    """Number of questions to use, from the start of the file; None: all."""
    max_tokens: int | None = None
    """Maximum tokens in an answer; None: the length of the longest expected answer."""

    def __post_init__(self) -> None:
        for name in self.selectors:
            parse_selector(name)
        for codec in self.codecs:
            codec_named(codec)
        for name in ("chunk_tokens", "chunks", "batches"):
            if any(value is not None and value < 1 for value in getattr(self, name)):
                raise InvalidField(f"grid.{name}", "must be at least 1")
        for name in ("limit", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidField(f"grid.{name}", f"{value} must be at least 1")
        if any(value is not None and not value > 0 for value in self.tiers):
            raise InvalidField("grid.tiers", "must be above 0")
        for name in ("selectors", "ratios", "codecs", "chunk_tokens", "chunks", "batches", "tiers"):
            if not getattr(self, name):
                raise InvalidField(f"grid.{name}", "must not be empty; leave it out for its default")

    def engines(self) -> list[tuple[str, float | None]]:
        """Return the codec and tier speed of each engine to start."""
        return list(itertools.product(self.codecs, self.tiers))

    def selections(self, num_layers: int) -> list[Selection]:
        """Return every selector at every ratio, and at every check layer if it uses one, for a model of this
        depth."""
        # At least layer 1: the KV of layer 0 does not depend on the context, so nothing deviates there.
        usual = {max(1, min(round(depth * num_layers), num_layers - 1)) for depth in DEPTHS}
        layers = self.check_layers or sorted(usual)
        return [
            Selection(ratio, name, layer)
            for name in self.selectors
            for layer in (layers if _uses_check_layer(name, num_layers) else layers[:1])
            for ratio in self.ratios
        ]


def _uses_check_layer(name: str, num_layers: int) -> bool:
    """Return whether the selector's choice depends on its check layer."""
    selector = make_selector(Selection(0.15, name), num_layers)
    return any(selector.signal_at(layer) for layer in range(num_layers))


@dataclass(frozen=True)
class Setting:
    """A point of the grid, apart from the configuration."""

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
    selections: Sequence[Selection],
    grid: EvaluationGrid,
    codec: str,
    speed: float | None,
    max_tokens: int,
    notify: Notify = lambda text: None,
) -> list[EvaluationRow]:
    """Measure the selections in every setting of the grid that this engine can run."""
    rows: list[EvaluationRow] = []
    for chunk_tokens, chunk_count in itertools.product(grid.chunk_tokens, grid.chunks):
        shaped = reshape_cases(cases, chunk_tokens, chunk_count)
        notify("storing chunks")
        Bench(engine, shaped, max_tokens).store_chunks()
        for batch in grid.batches:
            setting = Setting(codec, speed, chunk_tokens, chunk_count, batch)
            rows += _measure_setting(Bench(engine, shaped, max_tokens, batch), setting, selections, notify)
    return rows


def _measure_setting(
    bench: Bench, setting: Setting, selections: Sequence[Selection], notify: Notify
) -> list[EvaluationRow]:
    everything = range(len(bench.cases))
    # Warm up: an engine's first prompts include the time to compile kernels.
    Bench(bench.engine, bench.cases[:2], bench.max_tokens, bench.batch).full(range(min(2, len(everything))))
    notify(FULL)
    full = bench.full(everything)
    rows = [row_of(FULL, None, setting, Scores(Selection(1.0), bench.cases, full, full))]
    named = [(describe_selection(one), one) for one in selections]
    for method, selection in [(REUSE, REUSE_SELECTION), *named]:
        notify(method)
        rows.append(row_of(method, selection, setting, measure_selection(bench, selection, everything)))
    return rows


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
