"""When discovered segments are saved, in which batches, and what that may take."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm")

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, ChunkSpace, TokenIds
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.protocol import SaveJob, StepMetadata
from kintsugi.engine.scheduler.discovery import AWAKE_S, BATCH_TOKENS_MAX, HOLD_S, TTL_S, Discovery, IdleSaves
from kintsugi.engine.scheduler.hashing import Salts
from kintsugi.engine.scheduler.stats import BlendStats
from kintsugi.store.client.ram import RamStore
from tests.unit.engine.scheduler import test_discovery
from tests.unit.engine.scheduler.test_discovery import Clock, discovery_of, passage, sight, space_of

store, salts = test_discovery.store, test_discovery.salts

BLOCK = 16


class Pool:
    """vLLM's block pool, as far as saves use it."""

    num_gpu_blocks = 1000

    def __init__(self) -> None:
        self.free = list(range(1, self.num_gpu_blocks))

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[Any]:
        taken, self.free = self.free[:count], self.free[count:]
        return [type("Block", (), {"block_id": one}) for one in taken]

    def free_blocks(self, blocks: list[Any]) -> None:
        self.free += [block.block_id for block in blocks]


def saves_of(
    discovery: Discovery,
    clock: Clock | None = None,
    length_max: int = 4096,
    **settings: Any,
) -> tuple[IdleSaves, Pool]:
    config = EngineConfig(**settings)
    saves, pool = IdleSaves(discovery, config, [BLOCK], length_max, clock or Clock()), Pool()
    saves.pool = pool  # type: ignore[assignment]
    return saves, pool


def queue(discovery: Discovery, *passages: list[int], space: ChunkSpace | None = None) -> None:
    for end in range(2):
        sight(discovery, [0, *(token for one in passages for token in one), end], space=space)


def begin(
    saves: IdleSaves, is_idle: bool = True, is_store_suspended: bool = False
) -> tuple[list[SaveJob], int]:
    metadata = StepMetadata()
    saves.step(not is_idle, is_idle, metadata, is_store_suspended)
    return metadata.discovered, metadata.idle_tokens


def test_a_save_begins_when_the_engine_is_idle_and_pauses_when_it_is_not(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    queue(discovery, passage(1))
    free = pool.get_num_free_blocks()
    assert begin(saves, is_idle=False) == ([], 0)
    jobs, tokens = begin(saves)
    assert tokens > 0
    (job,) = jobs
    assert job.tokens.token_ids == [0, *passage(1)]
    assert (job.chunk_start, job.chunk_end, job.tokens.start) == (1, 201, 0)
    assert job.ttl_s == TTL_S
    assert len(job.tokens.block_ids[0]) == -(-201 // BLOCK) == free - pool.get_num_free_blocks()
    assert begin(saves, is_idle=False) == ([], 0)
    assert begin(saves) == ([], tokens), "the one in hand goes on"
    stats = BlendStats()
    saves.end([Accounting(Outcome.SAVED)], stats)
    assert stats.data == {"segments/saved": 1}
    assert pool.get_num_free_blocks() == free
    queue(discovery, passage(2))
    assert begin(saves)[0]


@pytest.mark.parametrize(("asked_s", "kept_s"), [(None, 86_400.0), (60.0, 60.0), (1e8, 86_400.0)])
def test_what_a_request_discovers_is_kept_as_long_as_it_asks_and_the_operator_allows(
    salts: Salts, asked_s: float | None, kept_s: float
) -> None:
    discovery, space = discovery_of(salts), space_of()
    saves, _ = saves_of(discovery)
    params = KintsugiParams("acme", discover=True, ttl_s=asked_s)
    for end in range(2):
        prompt = TokenIds.of([0, *passage(1), end])
        match = discovery.match(RamStore(), space, prompt, None, True)
        discovery.sight("one", params, space, prompt, match)
        discovery.request_ended("one")
    (job,), _ = begin(saves)
    assert job.ttl_s == kept_s


def test_every_copy_is_saved(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    space = space_of(context_token_ids=(7, 8, 9))
    queue(discovery, passage(1), space=space)
    jobs, _ = begin(saves)
    assert {tuple(job.tokens.token_ids[: job.chunk_start]) for job in jobs} == {(0,), (0, 7, 8, 9)}
    assert len({job.key for job in jobs}) == 2
    taken = [block for job in jobs for block in job.tokens.block_ids[0]]
    assert len(taken) == len(set(taken))
    stats = BlendStats()
    saves.end([Accounting(Outcome.SAVED), Accounting(Outcome.FAILED)], stats)
    assert stats.data == {"segments/failed": 1}
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_segments_are_saved_together_and_what_stands_before_them_is_computed_once(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    space = space_of(context_token_ids=tuple(range(100, 150)))
    queue(discovery, passage(1), passage(2), passage(3), space=space)
    earned = discovery.backlog._earned
    jobs, _ = begin(saves)
    lead, whole = 1 + 50, (1 + 50) // BLOCK * BLOCK
    assert [(job.tokens.start, job.chunk_start, job.chunk_end) for job in jobs] == [
        *[(start, lead, lead + 200) for start in (0, whole, whole)],
        *[(0, 1, 201)] * 3,  # the prefix alone fills no block
    ]
    for job in jobs:
        before = (*job.space.lead_token_ids,)[job.tokens.start :]
        chunk = job.tokens.token_ids[len(before) :]
        assert tuple(job.tokens.token_ids[: len(before)]) == before
        assert job.key == ChunkKey.of(job.space, chunk)
    tables = [job.tokens.block_ids[0] for job in jobs]
    shared = whole // BLOCK
    assert tables[0][:shared] == tables[1][:shared] == tables[2][:shared]
    own = [tables[0], *(table[shared:] for table in tables[1:3]), *tables[3:]]
    taken = [block for table in own for block in table]
    assert len(taken) == len(set(taken)) == pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    assert earned - discovery.backlog._earned == sum(len(job.tokens.token_ids) for job in jobs)
    stats = BlendStats()
    saved, failed = Accounting(Outcome.SAVED), Accounting(Outcome.FAILED)
    saves.end([saved, saved, saved, saved, failed, saved], stats)
    assert stats.data == {"segments/saved": 2, "segments/failed": 1}


def test_segments_of_other_requests_rights_wait_for_the_next_batch(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, _ = saves_of(discovery)
    for number, namespace in enumerate(["one", "two", "one"]):
        for end in range(2):
            sight(discovery, [0, *passage(number), end], namespace)
    batches = []
    while jobs := begin(saves)[0]:
        batches.append([job.space.namespace for job in jobs])
        saves.end([Accounting(Outcome.SAVED)] * len(jobs), BlendStats())
    assert batches == [["one"], ["two"], ["one"]]


def test_a_batch_takes_as_many_segments_as_the_cache_has_room_for(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    queue(discovery, passage(1), passage(2), passage(3))
    pool.free = pool.free[: 2 * -(-201 // BLOCK)]
    assert len(begin(saves)[0]) == 2


def test_a_full_cache_is_left_to_requests(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    queue(discovery, passage(1))
    pool.free = pool.free[:5]
    assert begin(saves) == ([], 0)
    assert pool.get_num_free_blocks() == 5
    assert not saves.is_pending


def test_an_engine_without_requests_stays_awake_for_a_while(salts: Salts) -> None:
    clock, discovery = Clock(), discovery_of(salts)
    saves, _ = saves_of(discovery, clock)
    assert not saves.is_pending
    queue(discovery, passage(1), passage(2))
    assert saves.is_pending
    clock.now_s = AWAKE_S
    assert not saves.is_pending
    begin(saves, is_idle=False)
    assert saves.is_pending
    begin(saves)
    assert saves.is_pending
    clock.now_s = AWAKE_S + HOLD_S / 2
    assert saves.is_pending, "nobody else can use the blocks of the save in hand"
    clock.now_s = AWAKE_S + HOLD_S
    assert not saves.is_pending, "also where the store hangs in a put"


def test_a_save_goes_on_beside_a_request_that_waits_for_its_blocks(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, _ = saves_of(discovery)
    queue(discovery, passage(1))
    metadata = StepMetadata()
    saves.step(computes=False, may_begin=False, metadata=metadata, is_store_suspended=False)
    assert (metadata.discovered, metadata.idle_tokens) == ([], 0), "none begins beside a request"
    begin(saves)
    saves.step(computes=False, may_begin=False, metadata=metadata, is_store_suspended=False)
    assert metadata.idle_tokens


def test_no_save_begins_while_the_store_is_suspended_and_none_is_lost(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    queue(discovery, passage(1), passage(2))
    assert saves.is_pending
    free = pool.get_num_free_blocks()
    assert begin(saves, is_store_suspended=True) == ([], 0)
    assert pool.get_num_free_blocks() == free
    assert not saves.is_pending, "an engine that only waits for the store need not step"
    assert begin(saves)[0]
    assert begin(saves, is_store_suspended=True)[1] > 0, "the one in hand goes on: it holds cache blocks"
    assert saves.is_pending


def test_nothing_is_discovered_before_erasures_are_known(store: RamStore) -> None:
    """What is seen before may be erased before the first answer, which names no erasure."""
    unread = Salts(store)
    discovery, params = discovery_of(unread), KintsugiParams("acme", discover=True)
    assert unread.cursor is None
    assert not discovery.covers(params)
    unread.refresh()
    assert discovery.covers(params)


def test_saving_costs_its_share_of_the_prompts(salts: Salts) -> None:
    discovery = discovery_of(salts)
    discovery.backlog.share = 0.1
    saves, _ = saves_of(discovery)
    seen = 0
    for first in range(0, 60, 10):
        for end in range(2):
            prompt = [0, *(token for seed in range(first, first + 10) for token in passage(seed)), end]
            sight(discovery, prompt)
            seen += len(prompt)
    saved = 0
    while jobs := begin(saves)[0]:
        saved += sum(len(job.tokens.token_ids) for job in jobs)
        saves.end([Accounting(Outcome.SAVED)] * len(jobs), BlendStats())
    assert 0 < saved <= 0.1 * seen + 1.01 * BATCH_TOKENS_MAX < 60 * 200


def test_a_segment_that_does_not_fit_behind_the_context_is_left_out(salts: Salts) -> None:
    """A position behind the model's last one has no rotation, and stops a GPU."""
    discovery = discovery_of(salts)
    space = space_of(context_token_ids=tuple(range(100, 200)))
    for length_max, fits in ((1 + 100 + 200, True), (1 + 100 + 199, False)):
        saves, pool = saves_of(discovery, length_max=length_max)
        queue(discovery, passage(length_max), space=space)
        assert bool(begin(saves)[0]) is fits
        assert (pool.get_num_free_blocks() < pool.num_gpu_blocks - 1) is fits


def test_a_save_is_paid_for_with_what_it_computes(salts: Salts) -> None:
    discovery = discovery_of(salts)
    discovery.backlog.share = 0.5
    saves, _ = saves_of(discovery)
    earned = discovery.backlog.share * (2 * (1 + 200 + 1))
    queue(discovery, passage(1))
    begin(saves)
    assert discovery.backlog._earned == earned - (1 + 200)


def test_a_save_counts_as_asked_for_when_its_passage_was_seen(salts: Salts, store: RamStore) -> None:
    discovery = discovery_of(salts)
    saves, _ = saves_of(discovery)
    store.erase("acme", None, erased_s := time.time())
    salts.refresh()
    queue(discovery, passage(1))
    seen_s = time.time()
    (job,), _ = begin(saves)
    assert erased_s < job.asked_at_s <= seen_s


def test_a_store_that_fails_is_told_of_once_and_saving_goes_on(
    salts: Salts, caplog: pytest.LogCaptureFixture
) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    outcomes = [Accounting(Outcome.FAILED, reason="Unavailable: down")] * 3 + [Accounting(Outcome.SAVED)]
    for number, outcome in enumerate(outcomes):
        queue(discovery, passage(number))
        assert begin(saves)[0]
        saves.end([outcome], BlendStats())
    assert len(caplog.messages) == 1
    assert "Unavailable: down" in caplog.messages[0]
    queue(discovery, passage(len(outcomes)))
    assert begin(saves)[0]
    saves.end([outcomes[0]], BlendStats())
    assert len(caplog.messages) == 2, "the store was well in between"
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
