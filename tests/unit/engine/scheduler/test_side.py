"""What the scheduler's side does where something under it breaks: nobody else's request may notice."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.errors import ForeignChunkKey
from kintsugi.core.gate import GateState
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.plan import ChunkSource, Selection
from kintsugi.core.report import Cell
from kintsugi.core.request import PARAMS_KEY, KintsugiParams, Op
from kintsugi.core.spaces import ChunkKey, ModelFingerprint, Span, TokenIds
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.local import save_request
from kintsugi.engine.protocol import LoadSample, WorkerReport
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.scheduler.discovery import Discovery, IdleSaves
from kintsugi.engine.scheduler.gate import Gate
from kintsugi.engine.scheduler.hashing import Salts
from kintsugi.engine.scheduler.requests import Parking, add_span_keys, parking_of_saves
from kintsugi.engine.scheduler.side import SchedulerSide
from kintsugi.fusor.control.controller import LoadingController
from kintsugi.fusor.control.forecast import EngineShape
from kintsugi.store.protocol.interface import Found
from tests.fakes.reports import BINDING, ENOUGH_PAIRS, measured_state, tally_of
from tests.unit.engine.scheduler.stubs import BLOCK, PROMPT, BrokenPlanner, StubStore, trial_of


@pytest.fixture
def store() -> StubStore:
    return StubStore()


@pytest.fixture
def side(store: StubStore) -> Iterator[SchedulerSide]:
    side = side_of(store)
    yield side
    side.close()


def side_of(store: StubStore) -> SchedulerSide:
    init_none_hash(sha256)
    salts = Salts(store)
    salts.refresh()
    discovery = Discovery("", salts)
    return SchedulerSide(
        config=EngineConfig(),
        store=store,
        planner=LoadingController(Selection(0.15)),
        gate=Gate.fixed(BINDING, GateState()),
        salts=salts,
        fingerprint=ModelFingerprint.of({"model": "toy"}),
        prefix_token_ids=(),
        hash_block_size=BLOCK,
        declined_because=None,
        engine=EngineShape(num_layers=4, projection_share=0.25, step_tokens_max=512),
        parking=Parking(places=2, cache_tokens=10_000),
        discovery=discovery,
        idle_saves=IdleSaves(discovery, EngineConfig(), [BLOCK], length_max=4096),
    )


def request_of(name: str) -> Any:
    params = KintsugiParams("acme", spans=(Span(0, 32), Span(32, 64)))
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params.to_mapping()})
    return Request(name, PROMPT, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def asked(side: SchedulerSide, name: str) -> Any:
    """A request that was considered until it was decided."""
    request = request_of(name)
    side.on_new_request(request)
    for _ in range(10_000):
        tokens, is_claimed = side.get_num_new_matched_tokens(request, 0)
        if tokens is not None:
            assert (tokens, is_claimed) == (0, False)
            return request
        side._lookups.step_began()
    raise AssertionError("parked for ever")


def said(side: SchedulerSide, request: Any) -> dict[str, Any]:
    answer = side.request_finished(request)
    assert answer is not None
    accounting: dict[str, Any] = answer[PARAMS_KEY]
    return accounting


def test_what_the_store_lacks_is_a_full_prefill(side: SchedulerSide) -> None:
    assert said(side, asked(side, "one"))["reason"].startswith("no_chunk_cached")


def test_a_prompt_longer_than_what_layers_attend_within_is_prefilled(side: SchedulerSide) -> None:
    side.local_chunk = len(PROMPT)
    assert said(side, asked(side, "within"))["reason"].startswith("no_chunk_cached")
    side.local_chunk = len(PROMPT) - 1
    reason = said(side, asked(side, "beyond"))["reason"]
    assert reason.startswith("attention_chunk: 100 tokens exceed the 99 tokens within which")


def test_a_defect_of_the_planner_costs_a_full_prefill(side: SchedulerSide) -> None:
    side.planner = BrokenPlanner(Selection(0.15))
    accounting = said(side, asked(side, "one"))
    assert accounting["outcome"] == "declined"
    assert accounting["reason"] == "defect: ZeroDivisionError: by the test"


def test_a_pass_is_over_even_if_nothing_can_be_learnt_from_it(side: SchedulerSide) -> None:
    request = request_of("one")
    side.on_new_request(request)
    broken: Any = LoadSample(transfers=(None,), decode_s=0.0, decode_bytes=0)  # type: ignore[arg-type]
    side.update(WorkerReport({"one": Accounting(Outcome.BLENDED)}, loads=[broken]))
    assert said(side, request)["outcome"] == "blended"


@pytest.mark.parametrize(
    ("codec", "restores_keys", "shared"),
    [("raw", True, 2), ("raw", False, 0), ("int8", True, 0), ("fp8_sinks", True, 0)],
)
def test_only_what_is_restored_exactly_has_a_plain_prompts_names(
    side: SchedulerSide, codec: str, restores_keys: bool, shared: int
) -> None:
    """The first chunk stands where it was prefilled."""
    side.config, side.restores_keys = EngineConfig(codec=codec), restores_keys
    plain, blended = request_of("plain"), request_of("blended")
    hashing.set_salt(plain, "acme")
    side.on_new_request(blended)
    assert len(plain.block_hashes) == len(blended.block_hashes)
    assert plain.block_hashes[:shared] == blended.block_hashes[:shared]
    assert not set(plain.block_hashes[shared:]) & set(blended.block_hashes[shared:])


CONTEXT = list(range(500, 540))


class Blocks:
    """vLLM's, of one group."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([1, 2, 3, 4],)


def save_of(
    side: SchedulerSide,
    name: str,
    lead: Sequence[int],
    key: ChunkKey | None = None,
    op: Op = Op.SAVE,
    context: Sequence[Sequence[int]] = (),
) -> Any:
    """A request that saves or audits 20 tokens behind `lead` and `context`; it has been admitted."""
    token_ids, params = save_request(lead, range(700, 720), "acme", key, context=context)
    params = dataclasses.replace(params, op=op, asked_at_s=0.0)
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params.to_mapping()})
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request(name, token_ids.to_list(), sampling, None, block_hasher=hasher)
    side.on_new_request(request)
    return request


def test_a_save_is_of_the_copy_whose_tokens_stand_before_it(side: SchedulerSide) -> None:
    side.config = EngineConfig(context_token_ids=CONTEXT)
    for lead in (CONTEXT, []):
        request = save_of(side, f"behind {len(lead)}", lead)
        state = side._states[request.request_id]
        assert list(state.space.lead_token_ids) == lead
        assert state.params.spans is not None
        assert state.params.spans[0].key == ChunkKey.of(state.space, list(range(700, 720)))
    foreign = said(side, save_of(side, "foreign", CONTEXT[:-1]))
    assert foreign["reason"].startswith("InvalidSpan: spans[0]")
    assert "with or without its context of 40 tokens" in foreign["reason"]
    plain = ChunkKey.of(side._space("acme").plain, list(range(700, 720)))
    assert said(side, save_of(side, "key", CONTEXT, plain))["reason"].startswith("ForeignChunkKey")


def test_a_save_after_a_context_of_its_own_names_the_passages(side: SchedulerSide) -> None:
    side.config = EngineConfig(context_token_ids=CONTEXT)
    passages = [list(range(300, 330)), list(range(400, 430))]
    for name, given in (("a", passages), ("b", passages), ("c", passages[:1])):
        save_of(side, name, [], context=given)
    first, second, other = (side._states[name] for name in "abc")
    assert first.space.context_token_ids == tuple(CONTEXT)
    assert first.context_name == second.context_name != other.context_name
    assert side.get_num_new_matched_tokens(first.request, 0) == (80, True)
    assert side.get_num_new_matched_tokens(second.request, 0) == (None, False), "the first computes it"
    assert side.get_num_new_matched_tokens(other.request, 0) == (50, True)
    side.update_state_after_alloc(first.request, Blocks(), 80)
    (job,) = side._metadata.saves
    assert job.key == ChunkKey.of(first.space, list(range(700, 720)))
    assert set(job.context_keys) == {
        ChunkKey.of(space, passage) for passage in passages for space in first.space.copies()
    }


def test_a_context_of_its_own_must_fill_the_place_of_the_spaces(side: SchedulerSide) -> None:
    passage = list(range(300, 330))
    without = said(side, save_of(side, "without", [], context=[passage]))
    assert without["reason"].startswith("InvalidField: context: is for services with a context")
    side.config = EngineConfig(context_token_ids=CONTEXT)
    gap = said(side, save_of(side, "gap", [1], context=[passage]))
    assert gap["reason"].startswith("InvalidField: context: must name all text")


@pytest.mark.parametrize("lead", [CONTEXT, []])
def test_an_audit_is_a_save_that_stores_nothing(side: SchedulerSide, lead: list[int]) -> None:
    side.config = EngineConfig(context_token_ids=CONTEXT, audits=True)
    jobs = []
    for op in (Op.SAVE, Op.AUDIT):
        request = save_of(side, op.value, lead, op=op)
        assert side.get_num_new_matched_tokens(request, 0) == (len(lead) + 20, True)
        side.update_state_after_alloc(request, Blocks(), len(lead) + 20)
        jobs.append(side._metadata.saves.pop())
        side.update(WorkerReport({op.value: Accounting(Outcome.SAVED)}))
        side.request_finished(request)
    save, audit = jobs
    assert (save.is_audit, audit.is_audit) == (False, True)
    tokens = dataclasses.replace(audit.tokens, request_id=save.tokens.request_id)
    assert dataclasses.replace(audit, tokens=tokens, is_audit=False) == save
    foreign = said(side, save_of(side, "foreign", CONTEXT[:-1], op=Op.AUDIT))
    assert foreign["reason"].startswith("InvalidSpan: spans[0]: op=audit needs the chunk directly after")


def test_an_engine_that_anybody_may_ask_audits_nothing(side: SchedulerSide) -> None:
    refused = said(side, save_of(side, "audit", [], op=Op.AUDIT))
    assert (refused["outcome"], refused["reason"].split(":")[0]) == ("declined", "no_audits")


def test_one_save_computes_the_context_and_the_others_wait_for_it(side: SchedulerSide) -> None:
    side.config = EngineConfig(context_token_ids=CONTEXT)
    first, second, third = (save_of(side, name, CONTEXT) for name in ("a", "b", "c"))
    plain = save_of(side, "plain", [])
    assert side.get_num_new_matched_tokens(first, 0) == (60, True)
    assert side.get_num_new_matched_tokens(second, 0) == (None, False)
    assert side.get_num_new_matched_tokens(plain, 0) == (20, True)
    assert side.get_num_new_matched_tokens(first, 0) == (60, True), "it had no blocks"
    side.request_finished(first)
    assert side.get_num_new_matched_tokens(second, 32) == (28, True), "two blocks of the context are cached"
    assert side.get_num_new_matched_tokens(third, 0) == (60, True), "they are gone again: it computes them"
    side.request_finished(third)
    assert side._context_savers == {}


def test_saves_are_parked_up_to_their_share_of_the_cache(side: SchedulerSide) -> None:
    """Each is 21 tokens long, and a quarter of 200 tokens of cache holds two."""
    side._saves = parking_of_saves(200)
    requests = [save_of(side, str(index), []) for index in range(4)]

    def claimed() -> list[str]:
        side.begin_step(SchedulerOutput.make_empty())
        names = []
        for request in requests:
            if request.request_id in side._saves.request_ids:
                continue
            if side.get_num_new_matched_tokens(request, 0)[0] is not None:
                side.update_state_after_alloc(request, Blocks(), 20)
                names.append(request.request_id)
        return names

    assert claimed() == ["0", "1"]
    assert claimed() == []
    side.update(WorkerReport({"0": Accounting(Outcome.SAVED)}))  # its chunk is stored
    requests.remove(requests[0])
    assert claimed() == ["2"]
    side.request_finished(requests[0])  # aborted
    del requests[0]
    assert claimed() == ["3"]


def test_without_a_prefix_cache_no_save_waits(side: SchedulerSide) -> None:
    side.config = EngineConfig(context_token_ids=CONTEXT)
    side.caches_prefixes = False
    for name in ("a", "b"):
        assert side.get_num_new_matched_tokens(save_of(side, name, CONTEXT), 0) == (60, True)


def test_only_the_context_of_a_save_is_found_in_the_prefix_cache(side: SchedulerSide) -> None:
    """Its blocks have the names of a plain prompt, the chunk's have not until they are computed."""
    side.config = EngineConfig(context_token_ids=CONTEXT)
    request = save_of(side, "saves", CONTEXT)
    plain = Request(
        "plain",
        request.prompt_token_ids,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    hashing.set_salt(plain, "acme")
    same = [a == b for a, b in zip(plain.block_hashes, request.block_hashes, strict=True)]
    assert same == [True, True, False]
    side.update(WorkerReport({"saves": Accounting(Outcome.SAVED)}))
    assert plain.block_hashes == request.block_hashes


def test_with_a_context_the_first_chunk_has_the_plain_copys_key(side: SchedulerSide) -> None:
    side.config = EngineConfig(context_token_ids=CONTEXT)
    space = side._space("acme")
    names = [ChunkKey.of(space, PROMPT[:32]), ChunkKey.of(space, PROMPT[32:64])]
    for keys in ([None, None], names, [ChunkKey.of(space.plain, PROMPT[:32]), names[1]]):
        spans = (Span(0, 32, keys[0]), Span(32, 64, keys[1]))
        keyed = add_span_keys(spans, space, TokenIds.of(PROMPT))
        assert [span.key for span in keyed] == [ChunkKey.of(space.plain, PROMPT[:32]), names[1]]
    plain_elsewhere = (Span(0, 32), Span(32, 64, ChunkKey.of(space.plain, PROMPT[32:64])))
    with pytest.raises(ForeignChunkKey, match="prefix and context"):
        add_span_keys(plain_elsewhere, space, TokenIds.of(PROMPT))


def hold_chunks(side: SchedulerSide, store: StubStore, namespace: str = "acme") -> None:
    """Let the store find both chunks of `PROMPT`."""
    layout = KVLayout.uniform(1, 1, 8, "float32")
    space = side._space(namespace)
    for tokens in (PROMPT[:32], PROMPT[32:64]):
        key = ChunkKey.of(space, tokens)
        of = (key, space.digest, space.fingerprint, namespace, 32, layout, Codec.RAW, ())
        manifest = ChunkManifest(*of, digests=bytes(layout.digests_bytes))
        store.held[key] = Found(manifest, ChunkSource())


@pytest.mark.parametrize("cached", [48, 96])
def test_a_prompt_with_unmeasured_chunks_uses_no_blended_blocks_of_another(
    side: SchedulerSide, store: StubStore, cached: int
) -> None:
    """Another blend of the same chunks has left its blocks in the prefix cache."""
    hold_chunks(side, store)
    side.gate.state = measured_state(tally_of(ENOUGH_PAIRS, chunk_tokens=200), Cell.of(False, 100))
    request, plain = request_of("longer"), request_of("plain")
    hashing.set_salt(plain, "acme")
    side.on_new_request(request)
    assert request.block_hashes != plain.block_hashes
    for _ in range(10_000):
        side._lookups.step_began()
        assert side.get_num_new_matched_tokens(request, cached) == (None, False)
        if side._states["longer"].accounting is not None:
            break
    assert request.block_hashes == plain.block_hashes
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert said(side, request)["reason"] == "unmeasured: chunks of about 32 tokens were hardly measured yet"


LONG = list(range(200))
"""Both chunks of `PROMPT`, and a question of more than a block."""


def blend_of(
    side: SchedulerSide,
    name: str,
    question: int = 0,
    namespace: str = "acme",
    waits: bool = True,
    **options: Any,
) -> Any:
    """An admitted request for both chunks; `question` is its last token. `waits` for its lookup's answer."""
    params = KintsugiParams(namespace, spans=(Span(0, 32), Span(32, 64)), **options)
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params.to_mapping()})
    tokens = [*LONG, question]
    request = Request(name, tokens, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))
    side.on_new_request(request)
    state = side._states[name]
    if state.lookup is not None and waits:
        state.lookup.future.result(10)
    return request


def considered(side: SchedulerSide, request: Any, num_cached: int = 0) -> tuple[int | None, bool]:
    """What the connector says; a request that it claims gets its blocks."""
    said = side.get_num_new_matched_tokens(request, num_cached)
    if said[1]:
        side.update_state_after_alloc(request, Blocks(), said[0])  # type: ignore[arg-type]
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    return said


WAITS = (None, False)
CLAIMED = (200, True)


def test_blends_beyond_the_places_wait_without_blocks_in_their_order(
    side: SchedulerSide, store: StubStore
) -> None:
    hold_chunks(side, store)
    # Different ratios, so that none waits for another's blocks.
    requests = [blend_of(side, str(index), ratio=index / 10) for index in range(1, 6)]
    assert [considered(side, request) for request in requests] == [CLAIMED, CLAIMED, WAITS, WAITS, WAITS]
    side.parking.step_began()
    side.update(WorkerReport({"1": Accounting(Outcome.BLENDED)}))
    assert [considered(side, request) for request in requests[2:]] == [WAITS] * 3, "it has no seat yet"
    side.parking.step_began()
    requests[0].status = RequestStatus.RUNNING
    assert [considered(side, request) for request in requests[2:]] == [CLAIMED, WAITS, WAITS]
    side.parking.step_began()
    side.request_finished(requests[1])
    assert [considered(side, request) for request in requests[3:]] == [CLAIMED, WAITS], "one was aborted"


def test_what_is_not_blended_needs_no_place(side: SchedulerSide, store: StubStore) -> None:
    hold_chunks(side, store)
    for index in (1, 2):
        assert considered(side, blend_of(side, str(index), ratio=index / 10)) == CLAIMED
    cached = blend_of(side, "cached", ratio=0.3)
    assert considered(side, cached, 64) == (0, False)
    told, length = said(side, cached), len(cached.prompt_token_ids)
    assert (told["outcome"], told["cost"]) == ("prefix_hit", round((length - 64) / length, 4))
    elsewhere = blend_of(side, "elsewhere", namespace="rival")
    assert considered(side, elsewhere) == (0, False)
    told = said(side, elsewhere)
    assert (told["reason"].split(":")[0], told["cost"]) == ("no_chunk_cached", 1.0)


def test_identical_prompts_wait_for_the_first_ones_blocks(side: SchedulerSide, store: StubStore) -> None:
    hold_chunks(side, store)
    leader, *followers = [blend_of(side, name) for name in ("a", "b", "c", "d")]
    assert considered(side, leader) == CLAIMED
    assert [considered(side, follower) for follower in followers] == [WAITS] * 3
    assert considered(side, blend_of(side, "other question", question=7)) == WAITS, "it has the same blocks"
    side.update(WorkerReport({"a": Accounting(Outcome.BLENDED)}))
    for follower in followers:
        assert considered(side, follower, 192) == (0, False)
        assert said(side, follower)["outcome"] == "prefix_hit"


@pytest.mark.parametrize("cached", [49, 48])
def test_a_follower_computes_what_is_left_of_a_block(
    side: SchedulerSide, store: StubStore, cached: int
) -> None:
    """The last chunk ends at 64. Who followed nobody loads the rest, and answers as the first time."""
    hold_chunks(side, store)
    leader, follower, later = (blend_of(side, name) for name in ("a", "b", "c"))
    assert considered(side, leader) == CLAIMED
    assert considered(side, follower) == WAITS
    side.update(WorkerReport({"a": Accounting(Outcome.BLENDED)}))
    rest = (201 - 1 - cached, True)
    assert considered(side, follower, cached) == ((0, False) if cached == 49 else rest)
    if cached == 49:
        assert said(side, follower)["outcome"] == "prefix_hit"
        assert considered(side, later, cached) == rest


def test_who_is_answered_by_the_store_after_the_blend_it_could_use_has_followed_it(
    side: SchedulerSide, store: StubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_chunks(side, store)
    assert considered(side, blend_of(side, "a")) == CLAIMED
    may_answer = threading.Event()
    find = store.find
    monkeypatch.setattr(store, "find", lambda *asked: may_answer.wait(10) and find(*asked))
    side._lookups._has_waited = True
    late = blend_of(side, "late", waits=False)
    assert considered(side, late) == WAITS
    side.update(WorkerReport({"a": Accounting(Outcome.BLENDED)}))
    may_answer.set()
    side._states["late"].lookup.future.result(10)  # type: ignore[union-attr]
    assert considered(side, late, 49) == (0, False)
    assert said(side, late)["outcome"] == "prefix_hit"


@pytest.mark.parametrize("end", ["failed", "aborted", "missed"])
def test_followers_of_a_blend_that_came_to_nothing_go_on_by_themselves(
    side: SchedulerSide, store: StubStore, end: str
) -> None:
    hold_chunks(side, store)
    leader, *followers = [blend_of(side, name) for name in ("a", "b", "c")]
    assert considered(side, leader) == CLAIMED
    assert [considered(side, follower) for follower in followers] == [WAITS] * 2
    if end == "aborted":
        side.request_finished(leader)
    else:
        outcome = Outcome.FAILED if end == "failed" else Outcome.BLENDED
        side.update(WorkerReport({"a": Accounting(outcome)}))
        leader.status = RequestStatus.RUNNING
    # Nothing is cached. The second does not wait for the first one's blend in turn.
    assert [considered(side, follower) for follower in followers] == [CLAIMED] * 2


@pytest.mark.parametrize("other", [{"namespace": "rival"}, {"ratio": 0.4}, {"explain": True}])
def test_nobody_waits_for_blocks_that_it_could_not_use(
    side: SchedulerSide, store: StubStore, other: dict[str, Any]
) -> None:
    hold_chunks(side, store)
    hold_chunks(side, store, "rival")
    assert considered(side, blend_of(side, "a")) == CLAIMED
    assert considered(side, blend_of(side, "b", **other)) == CLAIMED


def test_without_a_prefix_cache_nobody_waits_for_another(side: SchedulerSide, store: StubStore) -> None:
    hold_chunks(side, store)
    side.caches_prefixes = False
    assert [considered(side, blend_of(side, name)) for name in ("a", "b")] == [CLAIMED] * 2


def test_a_lookup_begins_once_answers_hold_fewer_bytes(
    side: SchedulerSide, store: StubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_chunks(side, store)
    first = blend_of(side, "1", ratio=0.1)
    monkeypatch.setattr("kintsugi.engine.scheduler.lookups.ANSWER_BYTES_MAX", 1)
    side._lookups.step_began()
    second = blend_of(side, "2", ratio=0.2)
    assert side._states["2"].lookup is None
    assert considered(side, second) == WAITS
    assert considered(side, first) == CLAIMED
    side._lookups.step_began()
    assert considered(side, second) == WAITS
    lookup = side._states["2"].lookup
    assert lookup is not None
    lookup.future.result(10)
    assert considered(side, second) == CLAIMED


def test_blocks_of_before_an_erasure_are_found_by_nobody(side: SchedulerSide, store: StubStore) -> None:
    """Nobody: neither blends nor requests that ask for none. Other namespaces keep theirs."""

    def names(
        namespace: str, op: Op = Op.BLEND, cache_salt: str | None = None, shared: str = ""
    ) -> list[Any]:
        params = KintsugiParams(namespace, op=op, shared=shared)
        sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params.to_mapping()})
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request("one", PROMPT, sampling, None, block_hasher=hasher, cache_salt=cache_salt)
        side.on_new_request(request)
        side.request_finished(request)
        return list(request.block_hashes)

    side.salts.refresh()
    asked = [(ns, op, salt) for ns in ("acme", "other") for op in (Op.BLEND, Op.OFF) for salt in (None, ns)]
    before = [names(*one) for one in asked]
    shared = names("other", shared="acme")
    store.erase("acme", [ChunkKey(bytes(32))], 1.0)
    side.salts.refresh()
    after = [names(*one) for one in asked]
    assert not {name for some in before[:4] for name in some} & {name for some in after[:4] for name in some}
    assert after[0] == after[1] == after[3], "they still share"
    assert before[4:] == after[4:]
    assert not {*names("other", shared="acme")} & {*shared}, "those who use its chunks, too"
    store.erase("acme", None, 2.0)
    side.salts.refresh()
    assert not {*names("acme")} & {*after[0], *before[0]}
    assert names("acme", cache_salt="mine") != names("acme"), "a salt of its own is left alone"


def test_a_prompt_for_which_nothing_passed_is_prefilled_in_full_and_says_how_far_it_is(
    side: SchedulerSide, store: StubStore
) -> None:
    hold_chunks(side, store)
    side.gate.state = measured_state(tally_of(ENOUGH_PAIRS, chunk_tokens=32), Cell.of(True, 100))
    reason = said(side, asked(side, "one"))["reason"]
    assert reason.startswith("learning: prompts of 1 to 512 tokens with declared chunks: 0 of about ")


def test_what_passed_is_used_by_requests_that_name_nothing(side: SchedulerSide, store: StubStore) -> None:
    hold_chunks(side, store)
    tally = tally_of(ENOUGH_PAIRS, chunk_tokens=32)
    side.gate.state = measured_state(tally, Cell.of(False, 100), selection=Selection(0.4))
    request = request_of("one")
    side.on_new_request(request)
    assert side._states["one"].permit.selection == Selection(0.4)
    assert side._states["one"].planner.selection == Selection(0.4)


def test_a_trial_blends_whatever_passed_and_shares_kv_with_no_other_request(
    side: SchedulerSide, store: StubStore
) -> None:
    hold_chunks(side, store)
    side.config = dataclasses.replace(side.config, audits=True)
    side.gate.state = measured_state(tally_of(1, loss=1.0), Cell.of(False, 100))
    names = []
    for name in ("one", "two"):
        request = trial_of(name, Selection(0.3))
        side.on_new_request(request)
        assert side._states[name].permit.selection == Selection(0.3)
        names.append(tuple(request.block_hashes))
    assert len(set(names)) == 2


def test_an_engine_without_audits_takes_no_trials(side: SchedulerSide, store: StubStore) -> None:
    request = trial_of("one", Selection(0.3))
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert said(side, request)["reason"].startswith("no_audits: this engine accepts no audits and trials")
