"""When the scheduler's side plans a blend, plans it again, or loads nothing any more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.plan import BlendPlan, ChunkSource
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, Span
from kintsugi.engine.protocol import WorkerReport
from kintsugi.engine.scheduler.side import SchedulerSide
from kintsugi.fusor.control.controller import Planner, PlanRequest
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


def hold(side: SchedulerSide, store: StubStore, span: Span) -> None:
    """Let the store find a chunk."""
    layout = KVLayout.uniform(1, 1, 8, "float32")
    space = side._space("acme")
    key = ChunkKey.of(space, LONG[span.start : span.end])
    of = (key, space.digest, space.fingerprint, "acme", span.num_tokens, layout, Codec.RAW, ())
    manifest = ChunkManifest(*of, digests=bytes(layout.digests_bytes))
    store.held[key] = Found(manifest, ChunkSource())


@dataclasses.dataclass(frozen=True)
class LoadsOne(Planner):
    """Has every chunk but one computed, as a loading controller may."""

    start: int = 0

    def plan(self, request: PlanRequest) -> BlendPlan:
        plan = super().plan(request)
        return dataclasses.replace(plan, hits=tuple(hit for hit in plan.hits if hit.start == self.start))


def blend_loading(side: SchedulerSide, span: Span) -> Any:
    """A request of which `span` is loaded alone; its lookup is answered."""
    params = KintsugiParams("acme", spans=(FIRST, SECOND), ratio=0.2)
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params.to_mapping()})
    request = Request("a", LONG, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))
    side.on_new_request(request)
    lookup = side._states["a"].lookup
    assert lookup is not None
    lookup.future.result(10)
    state = side._states["a"]
    state.planner = LoadsOne(state.planner.selection, span.start)
    return request


def loaded_by(side: SchedulerSide, request: Any, num_cached: int) -> list[int]:
    """Where the chunks start that the request's blend loads."""
    assert considered(side, request, num_cached) == (len(LONG) - 1 - num_cached, True)
    return [hit.start for hit in side._metadata.blends[-1].plan.hits]


def preempt(side: SchedulerSide, request: Any) -> None:
    """vLLM takes the blocks of a request that was blended."""
    side.update(WorkerReport({"a": Accounting(Outcome.BLENDED)}))
    request.status = RequestStatus.PREEMPTED


def test_a_chunk_that_was_computed_instead_is_computed_again(side: SchedulerSide, store: StubStore) -> None:
    """Nothing is left to load once the loaded chunk is cached."""
    hold(side, store, FIRST)
    hold(side, store, SECOND)
    request = blend_loading(side, FIRST)
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
    hold(side, store, FIRST)
    hold(side, store, SECOND)
    request = blend_loading(side, FIRST)
    assert side.get_num_new_matched_tokens(request, 0) == (len(LONG) - 1, True)
    assert considered(side, request, FIRST.end) == (0, False)
    request.status = RequestStatus.PREEMPTED
    assert loaded_by(side, request, 0) == [FIRST.start]
    assert said(side, request)["outcome"] == "prefix_hit"


def test_a_prompt_that_was_looked_up_before_the_store_hung_loads_nothing(
    side: SchedulerSide, store: StubStore
) -> None:
    hold_chunks(side, store)
    first, second = (blend_of(side, name, ratio=ratio) for name, ratio in (("a", 0.1), ("b", 0.2)))
    assert considered(side, first) == CLAIMED
    store.is_down = True
    side.update(WorkerReport({"a": Accounting(Outcome.FAILED, reason="load_timeout: layer 3")}))
    assert considered(side, second) == (0, False)
    assert said(side, second)["reason"].startswith("store_unavailable: the store failed recently")
    later = request_of("later")
    side.on_new_request(later)
    assert said(side, later)["reason"].startswith("store_unavailable: the store failed recently")
