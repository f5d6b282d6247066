"""Measures many requests at once on one engine: blocks held by parked blends, and blends of identical
prompts."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.support.engines import engine, say, store_chunks
from benchmarks.support.figures import Figure
from benchmarks.support.prompts import NAMESPACE, PREFIX, ChunkPrompt
from kintsugi.core.request import PARAMS_KEY, KintsugiParams
from kintsugi.core.spaces import Span
from kintsugi.engine.local import LocalEngine, Prompt

SHAPE = "llama-18m"
REQUESTS, SEATS = 60, 4
BLOCKS, BLOCK = 1536, 32
DOCUMENTS, CHUNKS, CHUNK_TOKENS, QUESTION = 14, 6, 160, 40
SAME, SAME_ROUNDS = 4, 5
ANSWER_TOKENS = 8
SHARE_BAR = 0.5


def parked_blocks_share(quick: bool) -> list[Figure]:
    """The largest share of the cache blocks that waiting requests hold, over the steps of a crowd."""
    documents = ChunkPrompt.make([CHUNK_TOKENS] * DOCUMENTS, QUESTION, seed=3)
    with engine(
        SHAPE, max_num_seqs=SEATS, num_gpu_blocks_override=BLOCKS, block_size=BLOCK, max_model_len=2048
    ) as running:
        store_chunks(running, documents)
        running.reset_prefix_cache()
        generator = random.Random(0)
        started_s = time.perf_counter()
        for index in range(REQUESTS):
            running._submit(f"crowd-{index}", _shuffled(documents, generator))
        with _outcomes(running) as outcomes:
            shares = [_parked_share(running) for _ in _steps(running)]
        took_s = time.perf_counter() - started_s
    assert outcomes == {"blended": REQUESTS}, outcomes
    detail = f"{REQUESTS} requests, {SEATS} seats, {BLOCKS} blocks; all blended in {took_s:.1f} s"
    say(f"parked: {max(shares):.3f} of the blocks; {detail}")
    return [Figure.at_most("parked_blocks_share", max(shares), SHARE_BAR, unit="", detail=detail)]


def blends_for_n4(quick: bool) -> list[Figure]:
    """Blends of one request for four answers (`n=4`), the most over some rounds."""
    from vllm import SamplingParams, TokensPrompt

    blended = []
    seconds = []
    with engine(SHAPE, block_size=BLOCK, max_model_len=2048) as running:
        for index in range(2 if quick else SAME_ROUNDS):
            prompt = ChunkPrompt.make([CHUNK_TOKENS] * CHUNKS, QUESTION, seed=40 + index)
            store_chunks(running, prompt)
            running.reset_prefix_cache()
            sampling = SamplingParams(
                n=SAME,
                temperature=1.0,
                max_tokens=ANSWER_TOKENS,
                ignore_eos=True,
                extra_args={"kv_transfer_params": prompt.params().to_mapping()},
            )
            started_s = time.perf_counter()
            tokens = TokensPrompt(prompt_token_ids=prompt.token_ids)
            running.llm.llm_engine.add_request(f"same-{index}", tokens, sampling)
            with _outcomes(running) as outcomes:
                list(_steps(running))
            seconds.append(time.perf_counter() - started_s)
            assert outcomes.total() == SAME, outcomes
            blended.append(outcomes["blended"])
            say(f"identical: {dict(outcomes)}")
    detail = f"{len(blended)} rounds of n = {SAME}; all answers after {statistics.median(seconds):.2f} s"
    return [Figure.at_most("blends_for_n4", max(blended), 1, unit="", detail=detail)]


def _shuffled(documents: ChunkPrompt, generator: random.Random) -> Prompt:
    """Return some of the documents in random order."""
    chosen = generator.sample(documents.chunks, CHUNKS)
    token_ids, spans = list(PREFIX), []
    for chunk in chosen:
        spans.append(Span(len(token_ids), len(token_ids) + len(chunk)))
        token_ids += chunk
    params = KintsugiParams(NAMESPACE, spans=tuple(spans))
    return Prompt([*token_ids, *documents.question], params, ANSWER_TOKENS, ignore_eos=True)


def _steps(running: LocalEngine) -> Iterator[None]:
    """Step until all requests have ended."""
    while running.llm.llm_engine.has_unfinished_requests():
        running.llm.llm_engine.step()
        yield


def _parked_share(running: LocalEngine) -> float:
    scheduler: Any = running.llm.llm_engine.engine_core.engine_core.scheduler
    held = {
        block
        for request in scheduler.kv_holding_waiting
        for group in scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for block in group
    }
    return len(held) / int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks)


@contextmanager
def _outcomes(running: LocalEngine) -> Iterator[Counter[str]]:
    """Counts how requests end, as the scheduler's side accounts for them: vLLM joins the answers of `n`."""
    side = running._scheduler
    outcomes: Counter[str] = Counter()
    finish = side.request_finished

    def counted(request: Any) -> dict[str, Any] | None:
        answer = finish(request)
        if answer is not None:
            outcomes[answer[PARAMS_KEY]["outcome"]] += 1
        return answer

    side.request_finished = counted  # type: ignore[method-assign]
    try:
        yield outcomes
    finally:
        del side.request_finished
