"""What the scheduler's side does with chunks that it finds by their content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kintsugi.core.accounting import TICKET, TOLD
from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import BlendPlan, Selection
from kintsugi.core.report import Cell
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import ChunkKey, Span, TokenIds
from kintsugi.discovery.segments import find_segments
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.engine.scheduler.discovery import Discovery
from kintsugi.engine.scheduler.matching import Match
from kintsugi.engine.scheduler.side import SchedulerSide
from kintsugi.fusor.control.controller import Planner, PlanRequest
from tests.contracts.store_contract import make_chunk
from tests.fakes.reports import ENOUGH_PAIRS, measured_state, tally_of
from tests.unit.engine.scheduler.test_side import BLOCK, PROMPT, StubStore, request_of, said, side_of

HASHER = get_request_block_hasher(BLOCK, sha256)


@pytest.fixture
def store() -> StubStore:
    return StubStore()


@pytest.fixture
def side(store: StubStore) -> Iterator[SchedulerSide]:
    side = side_of(store)
    yield side
    side.close()


def content_request(name: str, prompt: list[int], **more: Any) -> Any:
    params = KintsugiParams("acme", **more)
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params.to_mapping()})
    return Request(name, prompt, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def plan(side: SchedulerSide, request: Any, num_computed: int = 0) -> tuple[int | None, bool]:
    """What the connector claims once the store has answered."""
    side.on_new_request(request)
    return plan_of(side, request, num_computed)


def plain_names(prompt: list[int]) -> list[Any]:
    sampling = SamplingParams(max_tokens=4)
    request = Request("plain", prompt, sampling, None, cache_salt="acme", block_hasher=HASHER)
    return list(request.block_hashes)


def plan_of(side: SchedulerSide, request: Any, num_computed: int = 0) -> tuple[int | None, bool]:
    """As `plan`, for a request that is known already."""
    for _ in range(10_000):
        claim = side.get_num_new_matched_tokens(request, num_computed)
        if claim[0] is not None:
            return claim
        side._lookups.step_began()
    raise AssertionError("parked for ever")


def store_content(side: SchedulerSide, store: StubStore, tokens: list[int]) -> None:
    store.put(*make_chunk(tokens, side._space("acme")))


@dataclass(frozen=True)
class Refusing(Planner):
    """Finds every blend too slow."""

    def plan(self, request: PlanRequest) -> BlendPlan:
        raise NotBlendable("blending_is_slower", "by the test")


def test_what_is_not_blended_gets_its_exact_names(side: SchedulerSide, store: StubStore) -> None:
    store_content(side, store, PROMPT[32:80])
    side.planner = Refusing(Selection(0.15))
    request = content_request("one", PROMPT)
    assert plan(side, request) == (0, False)
    assert said(side, request)["reason"].startswith("blending_is_slower")
    plain = Request("two", PROMPT, SamplingParams(max_tokens=4), None, cache_salt="acme", block_hasher=HASHER)
    assert request.block_hashes == plain.block_hashes


def test_a_passage_that_will_be_saved_is_no_store_that_never_helps(side: SchedulerSide) -> None:
    for name, queued in (("one", False), ("two", True)):
        request = content_request(name, [*range(2000), ord(name[0])], discover=True)
        plan(side, request)
        found = said(side, request)
        counts = f"{found['segments_counted']} passages are not stored; those that recur ("
        assert found["reason"].startswith(f"not_saved_yet: {counts}{found['segments_queued']})")
        assert bool(found["segments_queued"]) is queued


def test_a_discovered_request_says_what_was_counted_and_found(side: SchedulerSide, store: StubStore) -> None:
    side.planner = Refusing(Selection(0.15))
    long = list(range(2000))
    store_content(side, store, long[1000:1100])
    for name, queued in (("one", False), ("two", True)):
        request = content_request(name, [*long, ord(name[0])], discover=True)
        plan(side, request)
        accounting = said(side, request)
        assert accounting["segments_counted"] > 0
        assert bool(accounting["segments_queued"]) is queued
        assert accounting["tokens_discovered"] == accounting["tokens_hit"] == 100


@pytest.mark.parametrize("salt", [None, "acme", "mine"])
def test_beside_a_namespace_a_salt_of_ones_own_is_refused(
    side: SchedulerSide, store: StubStore, salt: str | None
) -> None:
    store_content(side, store, PROMPT[32:80])
    params = KintsugiParams("acme").to_mapping()
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    request = Request("one", PROMPT, sampling, None, cache_salt=salt, block_hasher=HASHER)
    is_refused = salt == "mine"
    assert plan(side, request) == ((0, False) if is_refused else (len(PROMPT) - 1, True))
    accounting = said(side, request)
    assert ("cache_salt: must be the namespace 'acme' or omitted" in accounting["reason"]) is is_refused
    assert request.cache_salt == ("mine" if is_refused else "acme"), "its blocks stay its own"


def test_a_defect_while_a_request_is_named_costs_its_blend_alone(
    side: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cache_salt: str | None) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(side.discovery, "name_params", fail)
    sampling = SamplingParams(max_tokens=4)
    request = Request("one", list(range(200)), sampling, None, block_hasher=HASHER)
    assert plan(side, request) == (0, False)


def named_request(name: str, prompt: list[int], *named: Span) -> Any:
    return content_request(name, prompt, discover=True, spans=named)


def store_spans(side: SchedulerSide, store: StubStore, prompt: list[int], *spans: Span) -> None:
    for span in spans:
        store_content(side, store, prompt[span.start : span.end])


def spans_of(side: SchedulerSide, name: str) -> tuple[Span, ...]:
    """The chunks that a request's blend may use."""
    lookup = side._states[name].lookup
    assert lookup is not None
    assert lookup.answer is not None
    return lookup.answer.spans


def test_what_was_discovered_is_used_beside_named_chunks(side: SchedulerSide, store: StubStore) -> None:
    prompt, named = list(range(1000)), Span(600, 700)
    store_spans(side, store, prompt, Span(0, 600), named)
    request = named_request("one", prompt, named)
    assert plan(side, request) == (999, True)
    assert [(one.start, one.end) for one in spans_of(side, "one")] == [(0, 600), (600, 700)]


def test_what_is_found_before_named_chunks_has_names_of_its_own(
    side: SchedulerSide, store: StubStore
) -> None:
    """Unless the prefix cache holds it: that may be a blend of the named ones, which other names would not
    find. A later turn finds as exact what stands before the first that is approximate, and gives the same."""
    prompt, named = list(range(1000)), Span(600, 700)
    first, second = find_segments(TokenIds.of(prompt), TokenClasses.none(), 0, 600)[:2]
    store_spans(side, store, prompt, first, second, named)
    exact = second.start // BLOCK
    seen = []
    for turn, num_computed in enumerate((0, exact * BLOCK, 608)):
        request = named_request(str(turn), prompt, named)
        side.on_new_request(request)
        named_only = list(request.block_hashes)
        assert plan_of(side, request, num_computed) == (999 - num_computed, True)
        seen.append(list(request.block_hashes))
        side.request_finished(request)
    assert seen[0] == seen[1]
    assert seen[0][:exact] == plain_names(prompt)[:exact]
    assert not set(seen[0][exact:]) & {*plain_names(prompt), *named_only}
    assert seen[2] == named_only


@pytest.mark.parametrize("named", [Span(0, 100), Span(300, 400)])
def test_what_is_found_behind_named_chunks_changes_no_name(
    side: SchedulerSide, store: StubStore, named: Span
) -> None:
    """A later turn finds this blend, whatever was stored meanwhile. Of a request that takes no other chunks
    the names are others, also where the named one is exact and all behind it could be."""
    prompt = list(range(1000))
    requests = [named_request("one", prompt, named), content_request("two", prompt, spans=(named,))]
    for request in requests:
        side.on_new_request(request)
    takes, alone = (list(request.block_hashes) for request in requests)
    shared = (named.end if named.start == 0 else named.start) // BLOCK
    assert takes[:shared] == alone[:shared] == plain_names(prompt)[:shared]
    assert not set(takes[shared:]) & {*alone, *plain_names(prompt)}
    side.request_finished(requests[0])
    for span in (named, Span(named.end, 1000)):
        store_content(side, store, prompt[span.start : min(span.end, 990)])
    request = named_request("three", prompt, named)
    assert plan(side, request) == (999, True)
    assert [one.start for one in spans_of(side, "three")] == [named.start, named.end]
    assert request.block_hashes == takes


def test_no_blend_with_others_is_found_where_the_evidence_holds_for_the_named_alone(
    side: SchedulerSide, store: StubStore
) -> None:
    """What a turn before has cached under its names may hold others: its chunks were like the measured."""
    prompt, named = list(range(1000)), Span(0, 100)
    store_spans(side, store, prompt, named, Span(100, 990))
    short = tally_of(ENOUGH_PAIRS, chunk_tokens=100)
    seen = []
    for name, tally in (("both", short + tally_of(ENOUGH_PAIRS, chunk_tokens=500)), ("named", short)):
        side.gate.state = measured_state(tally, Cell.of(True, 1000))
        request = named_request(name, prompt, named)
        side.on_new_request(request)
        plan_of(side, request, num_computed=0 if name == "both" else 512)
        seen.append(list(request.block_hashes))
        assert [one.start for one in spans_of(side, name)] == ([0, 100] if name == "both" else [0])
        side.request_finished(request)
    shared = named.end // BLOCK
    assert seen[0][:shared] == seen[1][:shared] == plain_names(prompt)[:shared]
    assert not set(seen[0][shared:]) & set(seen[1])


def test_with_windows_no_cached_prefix_is_given_up_for_what_is_found(
    side: SchedulerSide, store: StubStore
) -> None:
    side.has_windows = True
    prompt, named = list(range(1000)), Span(300, 400)
    store_spans(side, store, prompt, named, Span(400, 990))
    request = named_request("one", prompt, named)
    assert plan(side, request, num_computed=512) == (0, False)
    assert said(side, request)["outcome"] == "prefix_hit"


def test_what_is_stored_in_another_codec_is_not_used_beside_named_chunks(
    side: SchedulerSide, store: StubStore
) -> None:
    named = (Span(0, 10, ChunkKey(bytes(32))),)
    found = Span(10, 90, ChunkKey(bytes([1]) * 32))
    match = Match((*named, found), {})
    assert match.beside(frozenset(named), 0).spans == named


def test_where_only_the_named_chunks_are_like_the_measured_they_are_blended_alone(
    side: SchedulerSide, store: StubStore
) -> None:
    side.gate.state = measured_state(tally_of(ENOUGH_PAIRS, chunk_tokens=100), Cell.of(True, 1000))
    prompt, named = list(range(1000)), Span(600, 700)
    store_spans(side, store, prompt, Span(0, 600), named)
    request = named_request("one", prompt, named)
    assert plan(side, request) == (999, True)
    assert [one.start for one in spans_of(side, "one")] == [600]


def test_a_request_that_names_nothing_keeps_its_salt_and_is_told_nothing(
    side: SchedulerSide, store: StubStore
) -> None:
    side.discovery = Discovery("found", side.salts)
    long = list(range(2000))
    sampling = SamplingParams(max_tokens=4)
    request = Request("one", long, sampling, None, cache_salt="mine", block_hasher=HASHER)
    assert plan(side, request) == (0, False)
    assert request.cache_salt == "mine"
    assert side.request_finished(request) is None
    stats = side.end_step()
    assert stats is not None
    assert stats.data["segments/counted"] > 0


def test_the_accounting_is_told_with_the_first_token_to_who_gave_a_ticket(
    side: SchedulerSide, store: StubStore
) -> None:
    """Once, and it is counted when the request ends."""
    asks, silent = content_request("one", list(range(200))), content_request("two", list(range(200)))
    asks.sampling_params.extra_args[TICKET] = "ticket"
    for request in (asks, silent):
        plan(side, request)
    assert side.end_step() is None
    for request in (asks, silent):
        request.append_output_token_ids(1)
    stats = side.end_step()
    assert stats is not None
    ((ticket, told),) = stats.data.pop(TOLD).items()
    assert (ticket, told["reason"].split(":")[0]) == ("ticket", "no_chunk_cached")
    assert told["ttft_ms"] > 0
    assert not stats.data
    asks.append_output_token_ids(2)
    assert side.end_step() is None
    assert said(side, asks) == told


def test_the_accounting_of_a_refused_request_is_told_at_once(side: SchedulerSide, store: StubStore) -> None:
    refused = content_request("one", list(range(200)), op=Op.AUDIT, spans=(Span(0, 2),))
    refused.sampling_params.extra_args[TICKET] = "ticket"
    side.on_new_request(refused)
    stats = side.end_step()
    assert stats is not None
    told = stats.data[TOLD]["ticket"]
    assert told["outcome"] == "declined"
    assert said(side, refused) == told


def test_an_engine_with_requests_is_not_idle(side: SchedulerSide) -> None:
    request = request_of("one")
    side.on_new_request(request)
    side.idle_saves = spy = IdleSpy()  # type: ignore[assignment]
    side.begin_step(SchedulerOutput.make_empty())
    side.get_num_new_matched_tokens(request, 0)
    side.request_finished(request)
    side.begin_step(SchedulerOutput.make_empty())
    side.declined_because = "lora: by the test"
    side.begin_step(SchedulerOutput.make_empty())
    assert spy.may_begin == [False, True, False]
    assert spy.computes == [False] * 3, "a request that waits for blocks computes nothing"


class IdleSpy:
    def __init__(self) -> None:
        self.computes: list[bool] = []
        self.may_begin: list[bool] = []
        self.is_store_suspended: list[bool] = []

    def step(self, computes: bool, may_begin: bool, metadata: Any, is_store_suspended: bool) -> None:
        self.is_store_suspended.append(is_store_suspended)
        self.computes.append(computes)
        self.may_begin.append(may_begin)
