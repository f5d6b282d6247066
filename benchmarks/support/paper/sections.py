"""Quality and time of the paper's methods on the reference model, one figure of the paper after the other."""

from __future__ import annotations

import dataclasses
import json
import statistics
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.paper import forms
from benchmarks.support.real.corpus import drop_overlapping
from kintsugi.core.plan import FormName, Selection
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import REFERENCE
from kintsugi.quality.evaluate import FULL, EvaluationGrid, EvaluationRow, evaluate
from kintsugi.quality.measure import Case, tokenize_questions
from kintsugi.quality.questions import ROUGE_DATASETS, Question
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from kintsugi.store.client.registry import ram_url

PAPER = Selection(0.15, SelectorName.HKVD)
"""CacheBlend as published: 15 %, chosen at layer 1."""
QUERY = Selection(0.15, SelectorName.QUERY)
METHODS = (PAPER, QUERY)
RATIOS = (0.05, 0.15, 0.3, 0.5, 1.0)
CHUNK_TOKENS = (150, 300, 600)
CHUNK_COUNTS = (2, 4, 6)
BATCHES = (1, 2, 4)
BYTES_PER_S = (4e8, 1e8, 2.5e7)
"""Speeds of the device from which chunk KV is loaded. A prompt of 3,600 tokens has 83 MB of KV."""
ANSWER_TOKENS = 32
SUMMARY_TOKENS = 48
MODEL_TOKENS_MAX = 8192


@dataclass
class PaperSetup:
    """The inputs of the sections."""

    quick: bool = False
    model: str = REFERENCE.name
    musique: Path = MUSIQUE
    details: dict[str, Any] = field(default_factory=dict)
    """Rows of every section, for the report's configuration."""

    @property
    def prompts(self) -> int:
        """Number of prompts of each data set."""
        return 2 if self.quick else 12

    @property
    def sensitivity_prompts(self) -> int:
        return 1 if self.quick else 6

    @property
    def form(self) -> PromptForm:
        return load_form(self.model, FormName.CHAT)

    def passages(self) -> list[str]:
        entries = json.loads(self.musique.read_text())
        return drop_overlapping(list(dict.fromkeys(c["text"].strip() for e in entries for c in e["ctxs"])))


def datasets(setup: PaperSetup) -> list[Figure]:
    """Quality and TTFT in the forms of the four data sets (paper, figure 12)."""
    passages, count = setup.passages(), setup.prompts
    figures = []
    with _engine(setup) as running:
        for questions in (
            forms.musique(setup.musique, count),
            forms.two_wiki_form(passages, count),
            forms.samsum_form(count),
            forms.multi_news_form(passages, count),
        ):
            task = questions[0].task
            tokens = SUMMARY_TOKENS if task in ROUGE_DATASETS else ANSWER_TOKENS
            rows = _measure(setup, running, questions, tokens, METHODS, EvaluationGrid(batches=(1,)), task)
            figures += _figures(task, rows)
    return figures


def ratio(setup: PaperSetup) -> list[Figure]:
    """Sensitivity to the share that is recomputed (paper, figure 16)."""
    selections = [dataclasses.replace(one, ratio=share) for one in METHODS for share in RATIOS]
    with _engine(setup) as running:
        rows = _musique(setup, running, selections, EvaluationGrid(batches=(1,)), "ratio")
    return _figures("ratio", rows)


def chunks(setup: PaperSetup) -> list[Figure]:
    """Sensitivity to the length and the number of chunks (paper, figure 15)."""
    with _engine(setup) as running:
        lengths = _musique(
            setup, running, METHODS, EvaluationGrid(chunk_tokens=CHUNK_TOKENS, batches=(1,)), "lengths"
        )
        counts = _musique(
            setup, running, METHODS, EvaluationGrid(chunks=CHUNK_COUNTS, batches=(1,)), "counts"
        )
    return _figures("chunk_tokens", lengths, "chunk_tokens") + _figures("chunks", counts, "chunk_count")


def batch(setup: PaperSetup) -> list[Figure]:
    """Prompts that are submitted together (paper, figure 15)."""
    with _engine(setup) as running:
        rows = _musique(setup, running, METHODS, EvaluationGrid(batches=BATCHES), "batches")
    return _figures("batch", rows, "batch")


def device(setup: PaperSetup) -> list[Figure]:
    """Speed of the device that holds the chunks (paper, figure 17)."""
    rows: list[EvaluationRow] = []
    for speed in BYTES_PER_S[:1] if setup.quick else BYTES_PER_S:
        with _engine(setup, speed) as running:
            rows += _musique(setup, running, METHODS, EvaluationGrid(batches=(1,)), "device", speed)
    return _figures("bytes_per_s", rows, "tier_bytes_per_s")


def prefix(setup: PaperSetup) -> list[Figure]:
    """Prefix caching, which reuses the head and the first chunk alone (paper, figure 12)."""
    questions = forms.musique(setup.musique, setup.sensitivity_prompts)
    times: dict[str, list[float]] = {"full": [], "prefix": []}
    arguments = {"dtype": "bfloat16", "max_model_len": MODEL_TOKENS_MAX, "enable_prefix_caching": True}
    with LocalEngine.start(setup.model, extra_config=None, **arguments, disable_log_stats=True) as running:
        cases = _cases(questions, setup.form, running, 1)
        for number, case in enumerate((cases[0], *cases)):
            first = case.prompt.token_ids[: case.prompt.spans[0].end]
            for method in times:
                running.reset_prefix_cache()
                if method == "prefix":
                    running.generate([Prompt(first, None, 1)])
                (answer,) = running.generate([Prompt(case.prompt.token_ids, None, 1)])
                if number:  # the first of each prepares kernels
                    times[method].append(answer.ttft_s)
    speedup = statistics.median(times["full"]) / statistics.median(times["prefix"])
    setup.details["prefix"] = times
    return [
        Figure("paper_prefix_ttft_speedup", speedup, "×", detail=f"n={len(questions)}, answers unchanged")
    ]


SECTIONS = {
    "datasets": datasets,
    "ratio": ratio,
    "chunks": chunks,
    "batch": batch,
    "device": device,
    "prefix": prefix,
}


@contextmanager
def _engine(setup: PaperSetup, bytes_per_s: float | None = None) -> Iterator[LocalEngine]:
    say(f"starting {setup.model}" + ("" if bytes_per_s is None else f", chunks at {bytes_per_s:g} bytes/s"))
    spec = MeasuringEngineSpec(
        setup.model,
        store=ram_url(f"paper-{uuid.uuid4().hex[:8]}", bytes_per_s),
        form=setup.form,
        vllm_args={"dtype": "bfloat16", "max_model_len": MODEL_TOKENS_MAX},
    )
    with start_measuring_engine(spec) as running:
        yield running


def _musique(
    setup: PaperSetup,
    running: LocalEngine,
    selections: Sequence[Selection],
    grid: EvaluationGrid,
    section: str,
    speed: float | None = None,
) -> list[EvaluationRow]:
    questions = forms.musique(setup.musique, setup.sensitivity_prompts)
    return _measure(setup, running, questions, ANSWER_TOKENS, selections, grid, section, speed)


def _measure(
    setup: PaperSetup,
    running: LocalEngine,
    questions: Sequence[Question],
    tokens: int,
    selections: Sequence[Selection],
    grid: EvaluationGrid,
    section: str,
    speed: float | None = None,
) -> list[EvaluationRow]:
    cases = _cases(questions, setup.form, running, tokens)
    rows = evaluate(
        running, cases, selections, grid, "raw", speed, tokens, lambda text: say(f"{section}: {text}")
    )
    setup.details.setdefault(section, []).extend(dataclasses.asdict(row) for row in rows)
    return rows


def _cases(questions: Sequence[Question], form: PromptForm, running: LocalEngine, tokens: int) -> list[Case]:
    cases, warnings = tokenize_questions(questions, form, running.max_model_len, tokens)
    for warning in warnings:
        say(warning)
    return cases


def _figures(section: str, rows: Sequence[EvaluationRow], axis: str | None = None) -> list[Figure]:
    """Return each method's speed-up of TTFT over full prefill in the same setting; quality is in the
    detail."""
    full = {row.setting: row for row in rows if row.method == FULL}
    figures = []
    for row in rows:
        if row.method == FULL:
            continue
        place = "" if axis is None else f"_{getattr(row.setting, axis):g}"
        detail = f"{_quality(row)}; full prefill {_quality(full[row.setting])}"
        speedup = full[row.setting].ttft.mean / row.ttft.mean
        name = f"paper_{section}{place}_{row.method.replace(' ', '_')}"
        figures.append(Figure(name, speedup, "×", detail=f"{detail}; n={row.num_prompts}"))
    return figures


def _quality(row: EvaluationRow) -> str:
    scores = {"EM": row.exact_match, "F1": row.f1, "Rouge-L": row.rouge_l}
    parts = [f"{name} {score.mean:.2f}" for name, score in scores.items() if score is not None]
    return ", ".join(
        [f"cost {row.cost:.2f}", f"KL {row.kl_mean:.3f}", f"top-1 {row.top1_agreement:.2f}", *parts]
    )
