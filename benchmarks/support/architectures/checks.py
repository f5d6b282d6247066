"""The checks of one architecture. All comparisons but one are with vLLM alone, without our plugin."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.support.architectures.catalogue import Architecture
from benchmarks.support.architectures.checkpoints import make_checkpoint_once
from benchmarks.support.architectures.declines import decide_without_engine, is_clear
from benchmarks.support.architectures.rows import (
    BATCHED_MAX,
    R1_MAX,
    REFERENCE_MAX,
    Outcome,
    Row,
    without_paths,
)
from benchmarks.support.architectures.tiny_engine import (
    ANSWER_TOKENS,
    NotBlended,
    ask_cold,
    blend_cold,
    greedy,
    require_blended,
    running,
    save,
)
from benchmarks.support.exactness import SELECTIONS, max_dlogprob
from benchmarks.support.prompts import PREFIX, ChunkPrompt
from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import Generation, LocalEngine
from kintsugi.models.passages import BUNDLED_QUESTIONS, read_bundled_passages
from tests.stepwise import prefill_like_a_blend

SIZES = (257, 1, 33, 100, 64)
"""Chunk lengths, on both sides of the borders between blocks, longer than the windows of these models. The
first is exact after its own prefix, so its blocks can be found by a plain prompt's."""
CHUNKED_TOKENS = 64
"""Tokens per step in the check of chunked prefill."""
DISTINCT_TOKENS_MIN = 6
"""Minimum number of different tokens in an answer: a model that repeats itself cannot show an error."""
BFLOAT16_SHARE_MAX = 2.0
"""Where vLLM computes bfloat16 alone: a blend's difference from the reference, which computes float32, ÷ that
of vLLM's own prefill."""
BEFORE_TIE_MIN = 8
"""Minimum number of equal tokens before a tie."""


@dataclass(frozen=True)
class _Plain:
    """The answers of vLLM alone."""

    whole: Generation
    """The prompt in one step, as plain prompts are computed."""
    again: Generation
    others: list[Generation]
    """The prompts of `_others`, each in one step."""
    full: Generation
    """The prompt with the steps of a blend: where vLLM computes a recurrence in bfloat16, the same as `whole`
    up to rounding alone (`tests.stepwise`); elsewhere `whole`."""
    chunked: Generation
    """The same where prefill is chunked."""
    alone: Generation
    """The first of `_others` with the steps of a blend."""


@dataclass(frozen=True)
class _Subject:
    """The inputs of one row."""

    architecture: Architecture
    folder: Path
    prompt: ChunkPrompt
    row: Row


def check_one_rank(architecture: Architecture) -> Row:
    """Run every check except tensor parallelism. Never raises: an error becomes the row's result."""
    return _noted(architecture, _check_one_rank)


def check_two_ranks(architecture: Architecture) -> Row:
    """Ratio 1 on two tensor-parallel ranks, against the same engine's full prefill. Never raises."""
    return _noted(architecture, _check_two_ranks)


def _noted(architecture: Architecture, check: Callable[[_Subject], None]) -> Row:
    row, started_s = Row(architecture.name), time.monotonic()
    try:
        folder = make_checkpoint_once(architecture)
        check(_Subject(architecture, folder, _make_prompt(architecture, folder), row))
    except NotBlended as given_up:
        row.reason = str(given_up)
        if row.outcome is not Outcome.WRONG:
            row.outcome = Outcome.DECLINED if is_clear(row.reason) else Outcome.UNCLEAR
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's result
        row.outcome = Outcome.UNCLEAR
        row.reason = _describe(error)
    row.reason = without_paths(row.reason)
    row.seconds = round(time.monotonic() - started_s, 1)
    return row


def _describe(error: Exception) -> str:
    """One sentence; the traceback goes to the row's log. An error without a message is described by its
    place."""
    traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split()) or f"{where.line} ({where.filename}, line {where.lineno})"
    return f"{type(error).__name__}: {words[:400]}"


def _make_prompt(architecture: Architecture, folder: Path) -> ChunkPrompt:
    """Random tokens; for a model that can read, passages and a question."""
    if not architecture.pretrained:
        return ChunkPrompt.make(SIZES, question=21, seed=4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    passages = read_bundled_passages()[: len(SIZES)]
    chunks = tuple(tuple(tokenizer.encode(passage.text)[:100]) for passage in passages)
    return ChunkPrompt(chunks, tuple(tokenizer.encode(BUNDLED_QUESTIONS[0])))


def _check_one_rank(subject: _Subject) -> None:
    row, dtype = subject.row, subject.architecture.dtype
    try:
        plain = _ask_alone(subject)
    except Exception as error:  # noqa: BLE001 - vLLM raises many types, when it starts and when it runs
        _decide_without_engine(subject, error)
        return
    try:
        with running(subject.architecture, subject.folder, dtype, "ram://blends") as engine:
            _check_blends(subject, engine, plain)
    except Unavailable as error:
        row.note("plain answers", holds=False, difference=0.0, detail=f"with the plugin, {error}")
        return
    _check_chunked(subject, plain)
    _check_bfloat16(subject)
    _check_that_it_can_tell(row, plain.whole, plain.again)


def _ask_alone(subject: _Subject) -> _Plain:
    prompt, (first, second) = subject.prompt.token_ids, _others(subject.prompt)
    with running(subject.architecture, subject.folder, subject.architecture.dtype) as alone:
        whole, again, *others = (ask_cold(alone, one) for one in (prompt, prompt, first, second))
        if subject.architecture.dtype == "float32":
            return _Plain(whole, again, others, whole, whole, others[0])

        def ask(token_ids: Sequence[int], step_tokens: int | None = None) -> Generation:
            alone.reset_prefix_cache()
            return prefill_like_a_blend(alone, greedy(token_ids), step_tokens)

        full = ask(prompt)
        subject.row.figures["vLLM in other steps"] = max_dlogprob(full, whole)
        return _Plain(whole, again, others, full, ask(prompt, CHUNKED_TOKENS), ask(first))


def _check_blends(subject: _Subject, engine: LocalEngine, plain: _Plain) -> None:
    row, prompt = subject.row, subject.prompt
    _check_presence(row, engine, prompt, plain)
    save(engine, prompt)
    _check_full_ratio(row, engine, prompt, plain)
    _check_prefix_cache(row, engine, prompt, plain)
    _check_mixed(row, engine, prompt, plain)
    if not subject.architecture.stand_in:
        _check_any_ratio(subject, engine, plain.full)


def _decide_without_engine(subject: _Subject, error: Exception) -> None:
    """If vLLM alone does not start or answer, the config decides the outcome."""
    row = subject.row
    reason = decide_without_engine(subject.folder)
    row.outcome, row.reason = Outcome.NOT_SERVED, f"vLLM alone fails: {_describe(error)}"
    if reason is not None and is_clear(reason):
        row.outcome, row.reason = Outcome.DECLINED, reason


def _others(prompt: ChunkPrompt) -> list[list[int]]:
    """Plain prompts that run together with blends and share no beginning with them."""
    return [[*PREFIX, *prompt.chunks[-1], *prompt.question], [*PREFIX, *prompt.question[::-1]]]


def _check_presence(row: Row, engine: LocalEngine, prompt: ChunkPrompt, plain: _Plain) -> None:
    """Plain answers, and those of requests that find no chunk yet, are vLLM's own."""
    asked = prompt.params(1.0)
    for params in (None, asked):
        row.compare("plain answers", plain.whole, ask_cold(engine, prompt.token_ids, params), R1_MAX)


def _check_full_ratio(row: Row, engine: LocalEngine, prompt: ChunkPrompt, plain: _Plain) -> None:
    row.compare("ratio 1", plain.full, blend_cold(engine, prompt, 1.0), R1_MAX)
    alone = ChunkPrompt(prompt.chunks[-1:], prompt.question)
    row.compare("own prefix", plain.alone, blend_cold(engine, alone, 0.0), R1_MAX)


def _check_prefix_cache(row: Row, engine: LocalEngine, prompt: ChunkPrompt, plain: _Plain) -> None:
    """A blend after an exact cached prefix is exact, and a plain prompt finds no blended block."""
    nothing_to_blend = KintsugiParams(prompt.params().namespace, spans=())
    engine.reset_prefix_cache()
    exact_prefix = [*prompt.token_ids[: prompt.spans[0].end], 11, 12]
    engine.generate([greedy(exact_prefix, nothing_to_blend, 1)])
    behind = engine.generate([greedy(prompt.token_ids, prompt.params(1.0))])[0]
    row.figures["tokens_prefix_cached"] = float((behind.accounting or {}).get("tokens_prefix_cached") or 0)
    row.compare("prefix caching", plain.full, require_blended(behind), BATCHED_MAX)
    blend_cold(engine, prompt, 0.0)
    after = engine.generate([greedy(prompt.token_ids, nothing_to_blend)])[0]
    row.compare("prefix caching", plain.whole, after, BATCHED_MAX)


def _check_mixed(row: Row, engine: LocalEngine, prompt: ChunkPrompt, plain: _Plain) -> None:
    """Plain prompts and blends in the same steps do not change each other's answers."""
    engine.reset_prefix_cache()
    one, two = _others(prompt)
    asked = [
        greedy(one),
        greedy(prompt.token_ids, prompt.params(1.0)),
        greedy(two),
        greedy(prompt.token_ids, prompt.params(0.15)),
    ]
    first, blended, second, _ = engine.generate(asked)
    expected = [plain.others[0], plain.full, plain.others[1]]
    for theirs, ours in zip(expected, (first, require_blended(blended), second), strict=True):
        row.compare("mixed batches", theirs, ours, BATCHED_MAX)


def _check_any_ratio(subject: _Subject, engine: LocalEngine, plain: Generation) -> None:
    """Every selector against the reference, given the positions that it selected. Skipped for a model that
    the reference does not support."""
    from tests.oracle import measured_layers

    row, prompt = subject.row, subject.prompt
    reference = _reference_of(subject)
    if reference is None:
        return
    hits = [(span.start, span.end) for span in prompt.spans]
    full, furthest = reference.full(prompt.token_ids), 0.0
    own = max(abs(float(full[token]) - logprob) for token, logprob in plain.top_logprobs[0].items())
    row.figures["vLLM from the reference"] = own
    bound = REFERENCE_MAX if subject.architecture.dtype == "float32" else BFLOAT16_SHARE_MAX * own
    for selector, ratio in SELECTIONS:
        got = blend_cold(engine, prompt, ratio, selector)
        positions: dict[str, Sequence[int]] = (got.accounting or {})["recomputed_positions"]
        active = {int(layer): chosen for layer, chosen in positions.items()}
        measured = measured_layers(selector.value, 1, ratio, len(active))
        expected = reference.blended(prompt.token_ids, PREFIX, hits, active, measured)
        reported = got.top_logprobs[0]
        worst = max(abs(float(expected[token]) - logprob) for token, logprob in reported.items())
        detail = f"{selector.value} at {ratio:g} is {worst:.3g} from the reference"
        row.note("any ratio", worst <= bound, worst, detail)
        furthest = max([furthest, *(abs(float(full[token]) - lp) for token, lp in reported.items())])
    row.figures["furthest_from_full"] = furthest


class _HybridReference:
    """The tests' oracle, which knows recurrent layers, as a `Reference`."""

    def __init__(self, folder: Path, **overrides: Any) -> None:
        from tests.oracle import Oracle

        self._oracle = Oracle(folder, **overrides)

    def blended(self, *arguments: Any) -> Any:
        return self._oracle.blended(*arguments).logprobs[0]

    def full(self, prompt: Sequence[int]) -> Any:
        return self._oracle.full(prompt).logprobs[0]


def _reference_of(subject: _Subject) -> Any:
    """The reference for blends; None for a model that no reference supports."""
    from benchmarks.support.architectures.reference import Reference

    if "hybrid" in subject.architecture.shows:
        return _HybridReference(subject.folder, **subject.architecture.referred)
    try:
        return Reference(subject.folder, **subject.architecture.referred)
    except InvalidField:
        return None


def _check_chunked(subject: _Subject, plain: _Plain) -> None:
    steps = {"max_num_batched_tokens": CHUNKED_TOKENS, "max_num_seqs": 8}
    dtype = subject.architecture.dtype
    with running(subject.architecture, subject.folder, dtype, "ram://chunked", **steps) as engine:
        save(engine, subject.prompt)
        blended = blend_cold(engine, subject.prompt, 1.0)
    subject.row.compare("chunked prefill", plain.chunked, blended, BATCHED_MAX)


def _check_bfloat16(subject: _Subject) -> None:
    """In the dtype in which models are served: the tokens must be equal, and the difference of logprobs is
    recorded. Logits of bfloat16 are coarse: where vLLM's own two best are equal, either token is right, and
    what follows is not compared."""
    with running(subject.architecture, subject.folder, "bfloat16") as alone:
        full = prefill_like_a_blend(alone, greedy(subject.prompt.token_ids))
    with running(subject.architecture, subject.folder, "bfloat16", "ram://bfloat16") as engine:
        save(engine, subject.prompt)
        blended = blend_cold(engine, subject.prompt, 1.0)
    tie = find_tie(full, blended)
    if tie is not None:
        subject.row.figures["bfloat16_tie_at"] = float(tie)
    same = blended.token_ids == full.token_ids or (tie is not None and tie >= BEFORE_TIE_MIN)
    subject.row.note("bfloat16", same, max_dlogprob(full, blended), "the tokens differ")


def find_tie(full: Generation, other: Generation) -> int | None:
    """The step at which `other` first has another token, if that is as likely as the one of `full`."""
    pairs = zip(full.token_ids, other.token_ids, full.top_logprobs, strict=True)
    for step, (token, chosen, likely) in enumerate(pairs):
        if token != chosen:
            return step if likely.get(chosen) == likely[token] else None
    return None


def _check_that_it_can_tell(row: Row, full: Generation, again: Generation) -> None:
    distinct = len(set(full.token_ids))
    row.figures["distinct_tokens"] = float(distinct)
    if row.outcome is not Outcome.EXACT:
        return
    if distinct < DISTINCT_TOKENS_MIN:
        row.outcome, row.reason = (
            Outcome.UNTOLD,
            f"{distinct} distinct tokens in an answer of {ANSWER_TOKENS}",
        )
    elif full.token_ids != again.token_ids or max_dlogprob(full, again) > R1_MAX:
        row.outcome, row.reason = Outcome.UNTOLD, "vLLM alone answers the same prompt in two ways"


def _check_two_ranks(subject: _Subject) -> None:
    """The ranks are processes, so the chunks lie in a shard of this one."""
    from kintsugi.store.shard.server import ShardServer
    from kintsugi.store.shard.shard import Shard
    from kintsugi.store.shard.tiers.ram_tier import RamTier

    # Two workers on one machine: vLLM finds fewer NUMA nodes than workers otherwise, and gives up.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    prompt = subject.prompt
    with (
        ShardServer(Shard(RamTier(64 << 20)), "127.0.0.1:0") as server,
        running(
            subject.architecture, subject.folder, "float32", f"grpc://{server.address}", **ranks
        ) as engine,
    ):
        full = ask_cold(engine, prompt.token_ids)
        save(engine, prompt)
        subject.row.compare("two ranks", full, blend_cold(engine, prompt, 1.0), R1_MAX)
