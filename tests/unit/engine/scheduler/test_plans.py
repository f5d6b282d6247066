"""When the scheduler's side plans a blend, plans it again, or loads nothing any more."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.layout import DIGEST_BYTES, FORMAT, ChunkManifest, Codec, KVLayout
from kintsugi.core.plan import ChunkSource, SelectorName
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, Span
from kintsugi.engine.protocol import WorkerReport
from kintsugi.engine.scheduler.side import SchedulerSide
from kintsugi.fusor.priors import PRIOR
from kintsugi.store.protocol.interface import Found
from tests.unit.engine.scheduler import test_side
from tests.unit.engine.scheduler.test_side import (
    BLOCK,
    CLAIMED,
    LONG,
    StubStore,
    blend_of,
    considered,
    hold_chunks,
    request_of,
    said,
)

side, store = test_side.side, test_side.store  # fixtures

FIRST, SECOND = Span(32, 64), Span(64, 96)
"""Neither is exact, because they stand behind other text."""


def hold(side: SchedulerSide, store: StubStore, span: Span, has_prior: bool) -> None:
    """Let the store find a chunk."""
    layout = KVLayout(1, 1, 8, "float32")
    space = side._space("acme")
    key = ChunkKey.of(space, LONG[span.start : span.end])
    of = (key, space.digest, space.fingerprint, "acme", span.num_tokens, layout, Codec.RAW, None)
    manifest = (
        ChunkManifest(*of, digests=bytes(DIGEST_BYTES + layout.digests_bytes), format=FORMAT, priors=(PRIOR,))
        if has_prior
        else ChunkManifest(*of, digests=bytes(layout.digests_bytes))
    )
    store.held[key] = Found(manifest, ChunkSource())


def blend_with_priors(side: SchedulerSide) -> Any:
    """A request that the selector `prior` is named in; its lookup is answered."""
    params = KintsugiParams("acme", spans=(FIRST, SECOND), ratio=0.2, selector=SelectorName.PRIOR)
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params.to_mapping()})
    request = Request("a", LONG, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))
    side.on_new_request(request)
    lookup = side._states["a"].lookup
    assert lookup is not None
    lookup.future.result(10)
    return request


def loaded_by(side: SchedulerSide, request: Any, num_cached: int) -> list[int]:
    """Where the chunks start that the request's blend loads."""
    assert considered(side, request, num_cached) == (len(LONG) - 1 - num_cached, True)
    return [hit.start for hit in side._metadata.blends[-1].plan.hits]


def preempt(side: SchedulerSide, request: Any) -> None:
    """vLLM takes the blocks of a request that was blended."""
    side.update(WorkerReport({"a": Accounting(Outcome.BLENDED)}))
    request.status = RequestStatus.PREEMPTED


def test_a_chunk_that_was_computed_for_want_of_a_prior_is_computed_again(
    side: SchedulerSide, store: StubStore
) -> None:
    """Nothing is left to load once the chunk with a prior is cached."""
    hold(side, store, FIRST, has_prior=True)
    hold(side, store, SECOND, has_prior=False)
    request = blend_with_priors(side)
    assert loaded_by(side, request, 0) == [FIRST.start]
    preempt(side, request)
    assert loaded_by(side, request, 0) == [FIRST.start]
    preempt(side, request)
    assert considered(side, request, FIRST.end) == (0, False)
    assert said(side, request)["outcome"] == "blended", "its first tokens came of that"


def test_a_prompt_whose_only_loaded_chunk_was_cached_meanwhile_is_a_prefix_hit(
    side: SchedulerSide, store: StubStore
) -> None:
    """vLLM asks again for want of cache blocks. A declined prompt would not be blended again once it is
    preempted, and its answer would change midway."""
    hold(side, store, FIRST, has_prior=True)
    hold(side, store, SECOND, has_prior=False)
    request = blend_with_priors(side)
    assert side.get_num_new_matched_tokens(request, 0) == (len(LONG) - 1, True)
    assert considered(side, request, FIRST.end) == (0, False)
    request.status = RequestStatus.PREEMPTED
    assert loaded_by(side, request, 0) == [FIRST.start]
    assert said(side, request)["outcome"] == "prefix_hit"


def test_a_prompt_without_any_prior_is_declined_with_that_reason(
    side: SchedulerSide, store: StubStore
) -> None:
    hold(side, store, FIRST, has_prior=False)
    request = blend_with_priors(side)
    assert considered(side, request) == (0, False)
    accounting = said(side, request)
    assert accounting["outcome"] == "declined"
    assert accounting["reason"].startswith("no_priors: ")


def test_a_cached_chunk_without_a_prior_is_computed_once_it_is_cached_no_more(
    side: SchedulerSide, store: StubStore
) -> None:
    hold(side, store, FIRST, has_prior=False)
    hold(side, store, SECOND, has_prior=True)
    request = blend_with_priors(side)
    assert loaded_by(side, request, FIRST.end) == [SECOND.start]
    preempt(side, request)
    assert loaded_by(side, request, 0) == [SECOND.start]


def test_a_prompt_that_was_looked_up_before_the_store_hung_loads_nothing(
    side: SchedulerSide, store: StubStore
) -> None:
    hold_chunks(side, store)
    first, second = (blend_of(side, name, ratio=ratio) for name, ratio in (("a", 0.1), ("b", 0.2)))
    assert considered(side, first) == CLAIMED
    store.is_down = True
    side.update(WorkerReport({"a": Accounting(Outcome.FAILED, reason="load_timeout: layer 3")}))
    assert considered(side, second) == (0, False)
    assert said(side, second)["reason"].startswith("store_unavailable: it failed lately")
    later = request_of("later")
    side.on_new_request(later)
    assert said(side, later)["reason"].startswith("store_unavailable: it failed lately")
