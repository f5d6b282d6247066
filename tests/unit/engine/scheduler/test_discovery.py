"""What a scheduler makes of segments that recur, and how saves use an idle engine; without one."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.prompt import Domain, LengthRange
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span
from kintsugi.core.tokens import TokenIds
from kintsugi.discovery.sightings import BYTES_MAX
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.engine.config import DiscoveryConfig, EngineConfig
from kintsugi.engine.protocol import SaveJob, StepMetadata
from kintsugi.engine.scheduler.discovery import Discovery
from kintsugi.engine.scheduler.idle_saves import AWAKE_S, HOLD_S, IdleSaves
from kintsugi.engine.scheduler.matching import Match
from kintsugi.engine.scheduler.metrics import BlendStats
from kintsugi.engine.scheduler.salts import Salts
from kintsugi.store.client.ram import RamStore
from tests.contracts.store_contract import make_chunk

FINGERPRINT = ModelFingerprint.of({"model": "toy"})
BLANK = 2
CLASSES = TokenClasses.of_texts(["<s>", "</s>", "\n\n"], special_ids=[0, 1])
BLOCK = 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


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


@pytest.fixture
def store() -> RamStore:
    return RamStore()


@pytest.fixture
def salts(store: RamStore) -> Salts:
    salts = Salts(store)
    salts.refresh()
    return salts


def discovery_of(salts: Salts, clock: Clock | None = None, **settings: Any) -> Discovery:
    config = DiscoveryConfig(**{"share": 10.0, **settings})
    discovery = Discovery(config, salts, lambda: CLASSES, clock or Clock())
    if discovery._classes is not None:
        discovery._classes.result(30)
    return discovery


def space_of(namespace: str = "acme", **more: Any) -> ChunkSpace:
    return ChunkSpace(FINGERPRINT, namespace, (0,), **more)


def passage(seed: int, size: int = 200) -> list[int]:
    generator = random.Random(seed)
    return [*(generator.randrange(3, 1000) for _ in range(size - 1)), BLANK]


def sight(
    discovery: Discovery,
    prompt: list[int],
    namespace: str = "acme",
    name: str = "",
    domain: Domain | None = None,
    store: RamStore | None = None,
    space: ChunkSpace | None = None,
) -> Match:
    """One request, which has ended unless it has a name."""
    space, ids = space or space_of(namespace), TokenIds.of(prompt)
    match = discovery.match(store or RamStore(), space, ids, None, True)
    params = KintsugiParams(namespace, discover=True)
    found = discovery.sight(name or "one", params, space, ids, match, domain)
    if not name:
        discovery.request_ended("one")
    return found


def test_a_segment_is_queued_at_its_second_sight(salts: Salts) -> None:
    discovery = discovery_of(salts)
    first = sight(discovery, [0, *passage(1), *passage(2)])
    assert (first.segments_counted, first.segments_queued) == (2, 0)
    second = sight(discovery, [0, *passage(3), *passage(1)])
    assert (second.segments_counted, second.segments_queued) == (2, 1)
    segment = discovery.take()
    assert segment is not None
    assert segment.token_ids.to_list() == passage(1)
    assert discovery.take() is None


def test_the_number_of_sights_is_configured(salts: Salts) -> None:
    discovery = discovery_of(salts, sights=3)
    queued = [sight(discovery, [0, *passage(1), *passage(seed)]).segments_queued for seed in (2, 3, 4)]
    assert queued == [0, 0, 1]


def test_a_segment_counts_once_in_a_prompt(salts: Salts) -> None:
    discovery = discovery_of(salts)
    assert sight(discovery, [0, *(passage(1) * 5)]).segments_queued == 0


def test_equal_prompts_under_way_count_once(salts: Salts) -> None:
    discovery = discovery_of(salts)
    prompt = [0, *passage(1), *passage(2)]
    assert sight(discovery, prompt, name="a").segments_counted == 2
    assert sight(discovery, prompt, name="b").segments_counted == 0
    discovery.request_ended("a")
    discovery.request_ended("b")
    assert sight(discovery, prompt, name="c").segments_queued == 2


def test_what_is_stored_is_not_counted(salts: Salts, store: RamStore) -> None:
    discovery = discovery_of(salts)
    space = space_of()
    store.put(*make_chunk(passage(1), space))
    match = sight(discovery, [0, *passage(2), *passage(1)], store=store)
    assert [(span.start, span.end) for span in match.spans] == [(201, 401)]
    assert [(span.start, span.end) for span in match.segments] == [(1, 201)]


def test_where_segments_begin_is_enough_to_find_them(salts: Salts, store: RamStore) -> None:
    discovery = discovery_of(salts)
    store.put(*make_chunk(passage(1), space_of()))
    prompt = TokenIds.of([0, *passage(2), *passage(1)])
    match = discovery.match(store, space_of(), prompt, None, False)
    assert [(span.start, span.end) for span in match.spans] == [(201, 401)]


def test_what_stands_before_another_prefix_is_left_to_the_prefix_cache(salts: Salts) -> None:
    discovery = discovery_of(salts)
    match = sight(discovery, [5, *passage(1), *passage(2)])
    assert [span.start for span in match.segments] == [201]


def test_namespaces_do_not_count_together(salts: Salts) -> None:
    discovery = discovery_of(salts)
    secret = [0, *passage(1)]
    assert [sight(discovery, secret, name).segments_queued for name in ("a", "b", "a/u", "a")] == [0, 0, 0, 1]


def test_lengths_that_were_not_calibrated_are_not_counted(salts: Salts) -> None:
    discovery = discovery_of(salts)
    some = LengthRange(1, 10_000)
    domain = Domain("chat", some, some, LengthRange(300, 500), some)
    prompt = [0, *passage(1, 127), *passage(2, 250), *passage(3, 130)]
    assert sight(discovery, prompt, domain=domain).segments_counted == 1


def test_what_a_calibration_leaves_out_is_counted_and_logged_once_per_report(
    salts: Salts, caplog: pytest.LogCaptureFixture
) -> None:
    discovery = discovery_of(salts)
    some = LengthRange(1, 10_000)
    tiny = Domain("chat", some, some, LengthRange(26, 40), some)
    prompts = [[0, *passage(1), *passage(1), *passage(seed, 150)] for seed in (2, 3)]
    found = [sight(discovery, prompt, domain=tiny) for prompt in prompts]
    assert [(one.segments_counted, one.segments_queued, one.segments_outside) for one in found] == [
        (0, 0, 2)
    ] * 2
    (line,) = caplog.messages
    assert "here 150 to 200 tokens; it was measured with chunks of 26 to 40" in line
    assert "kintsugi calibrate --segments" in line
    other = Domain("chat", some, some, LengthRange(160, 200), some)
    assert sight(discovery, prompts[0], domain=other).segments_outside == 0
    assert sight(discovery, [0, *passage(5, 300)], domain=other).segments_outside == 1
    assert len(caplog.messages) == 2
    assert sight(discovery, prompts[0], domain=None).segments_outside == 0


def test_an_erasure_forgets_sightings_and_what_waits(salts: Salts, store: RamStore) -> None:
    discovery = discovery_of(salts)
    salts.refresh()
    for seed in (2, 3):
        sight(discovery, [0, *passage(1), *passage(seed)])
    store.erase("acme", None, 0.0)
    salts.refresh()
    assert discovery.take() is None
    assert sight(discovery, [0, *passage(2), *passage(3)]).segments_queued == 0


@pytest.mark.parametrize(
    ("params", "is_covered"),
    [
        ({"discover": True}, True),
        ({}, False),
        ({"discover": True, "no_store": True}, False),
        ({"discover": True, "spans": (Span(0, 9),)}, False),
        ({"discover": True, "spans": (Span(0, 9),), "op": Op.SAVE}, False),
    ],
)
def test_which_requests_are_discovered(salts: Salts, params: dict[str, Any], is_covered: bool) -> None:
    assert discovery_of(salts).covers(KintsugiParams("acme", **params)) is is_covered
    assert not discovery_of(salts, enabled=False).covers(KintsugiParams("acme", **params))


def test_nothing_waits_for_the_classes_of_tokens(salts: Salts) -> None:
    """A lookup that waited would take the store for silent."""
    is_due, may_end = threading.Event(), threading.Event()

    def load() -> TokenClasses:
        is_due.set()
        assert may_end.wait(30)
        return CLASSES

    discovery, params = Discovery(DiscoveryConfig(), salts, load), KintsugiParams("acme", discover=True)
    assert is_due.wait(30)
    assert not discovery.covers(params)
    may_end.set()
    assert discovery._classes is not None
    discovery._classes.result(30)
    assert discovery.covers(params)


def test_without_classes_nothing_is_discovered_and_a_line_says_so(
    salts: Salts, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> TokenClasses:
        raise ValueError("a tokenizer that nobody has thought of")

    discovery = Discovery(DiscoveryConfig(), salts, load)
    assert discovery._classes is not None
    assert discovery._classes.exception(30) is not None
    assert not discovery.covers(KintsugiParams("acme", discover=True))
    assert "classes are unknown" in caplog.text


def test_segments_have_the_lengths_that_a_namespace_allows(salts: Salts) -> None:
    discovery, space = discovery_of(salts), space_of()
    prompt = TokenIds.of([0, *passage(1, 200), *passage(2, 130)])
    match = discovery.match(RamStore(), space, prompt, None, True, tokens_multiple=128)
    assert [(span.start, span.end) for span in match.segments] == [(1, 129), (201, 329)]
    assert [span.key for span in match.segments] == [
        ChunkKey.of(space, prompt[span.start : span.end]) for span in match.segments
    ]
    assert not discovery.match(RamStore(), space, prompt, None, True, tokens_multiple=256).segments


def test_a_salt_makes_a_namespace_of_its_own(salts: Salts) -> None:
    assert discovery_of(salts).name_params(None) is None
    discovery = discovery_of(salts, namespace="found")
    named = [discovery.name_params(salt) for salt in (None, "", "a", "b", "a")]
    names = [params.namespace for params in named if params is not None]
    assert names[0] == "found"
    assert len(set(names)) == 4
    assert names[2] == names[4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"sights": 0},
        {"share": 0.0},
        {"ttl_s": 0.0},
        {"ttl_s": 60.0, "default_ttl_s": 61.0},
        {"default_ttl_s": 0.0},
        {"namespace": "a b"},
        {"namespace": "a" * 93},
        {"namespace": "a/-"},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        DiscoveryConfig(**wrong)


def test_100_000_distinct_prompts_cost_bounded_memory_and_no_other_namespace_notices(salts: Salts) -> None:
    """As many as a hostile caller sends in a minute; a tenth of them here, each with ten segments."""
    discovery = discovery_of(salts)
    sight(discovery, [0, *passage(1)], "quiet")
    params, space = KintsugiParams("flood", discover=True), space_of("flood")
    generator = random.Random(7)
    for number in range(10_000):
        ids = TokenIds.of([number])
        spans = tuple(Span(0, 64, key=_key(generator)) for _ in range(10))
        discovery.sight("one", params, space, ids, Match((), {}, segments=spans), None)
        discovery.request_ended("one")
    assert discovery._sightings.num_bytes <= BYTES_MAX
    assert len(discovery.backlog) < 100
    assert sight(discovery, [0, *passage(1)], "quiet").segments_queued == 1


def _key(generator: random.Random) -> ChunkKey:
    return ChunkKey(generator.randbytes(32))


def saves_of(
    discovery: Discovery,
    clock: Clock | None = None,
    length_max: int = 4096,
    prior_text: tuple[int, ...] = (),
    **settings: Any,
) -> tuple[IdleSaves, Pool]:
    config = EngineConfig(**settings)
    saves, pool = IdleSaves(discovery, config, [BLOCK], length_max, prior_text, clock or Clock()), Pool()
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
    queue(discovery, passage(1), passage(2))
    free = pool.get_num_free_blocks()
    assert begin(saves, is_idle=False) == ([], 0)
    jobs, tokens = begin(saves)
    assert tokens > 0
    (job,) = jobs
    assert job.tokens.token_ids == [0, *passage(1)]
    assert (job.chunk_start, job.chunk_end, job.tokens.start) == (1, 201, 0)
    assert job.ttl_s == discovery.config.ttl_s
    assert len(job.tokens.block_ids[0]) == -(-201 // BLOCK) == free - pool.get_num_free_blocks()
    assert begin(saves, is_idle=False) == ([], 0)
    assert begin(saves) == ([], tokens), "the one in hand goes on"
    stats = BlendStats()
    saves.end([Accounting(Outcome.SAVED)], stats)
    assert stats.data == {"segments/saved": 1}
    assert pool.get_num_free_blocks() == free
    assert begin(saves)[0]


@pytest.mark.parametrize(
    ("default_s", "asked_s", "kept_s"),
    [
        (None, None, 86_400.0),
        (None, 60.0, 60.0),
        (None, 1e8, 86_400.0),
        (3600.0, None, 3600.0),
        (3600.0, 60.0, 60.0),
        (3600.0, 7200.0, 7200.0),
        (3600.0, 1e8, 86_400.0),
    ],
)
def test_what_a_request_discovers_is_kept_as_long_as_it_asks_and_the_operator_allows(
    salts: Salts, default_s: float | None, asked_s: float | None, kept_s: float
) -> None:
    discovery, space = discovery_of(salts, default_ttl_s=default_s), space_of()
    saves, _ = saves_of(discovery)
    params = discovery.config.with_lifetime(KintsugiParams("acme", discover=True, ttl_s=asked_s))
    for end in range(2):
        prompt = TokenIds.of([0, *passage(1), end])
        match = discovery.match(RamStore(), space, prompt, None, True)
        discovery.sight("one", params, space, prompt, match, None)
        discovery.request_ended("one")
    (job,), _ = begin(saves)
    assert job.ttl_s == kept_s


def test_every_copy_is_saved(salts: Salts) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    space = space_of(context_token_ids=(7, 8, 9))
    queue(discovery, passage(2), passage(1), space=space)
    jobs, _ = begin(saves)
    assert {tuple(job.tokens.token_ids[: job.chunk_start]) for job in jobs} == {(0,), (0, 7, 8, 9)}
    assert len({job.key for job in jobs}) == 2
    taken = [block for job in jobs for block in job.tokens.block_ids[0]]
    assert len(taken) == len(set(taken))
    stats = BlendStats()
    saves.end([Accounting(Outcome.SAVED), Accounting(Outcome.FAILED)], stats)
    assert stats.data == {"segments/failed": 1}
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


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
    assert unread.cursor is discovery.erasures_seen is None
    assert not discovery.covers(params)
    queue(discovery, passage(1))
    assert begin(saves_of(discovery)[0]) == ([], 0)
    unread.refresh()
    assert discovery.covers(params)
    (job,), _ = begin(saves_of(discovery)[0])
    assert job.erasures_seen == unread.cursor != ""


def test_saving_costs_its_share_of_the_prompts(salts: Salts) -> None:
    discovery = discovery_of(salts, share=0.1)
    saves, _ = saves_of(discovery)
    prompts = [[0, *(token for seed in range(10) for token in passage(seed)), end] for end in range(2)]
    for prompt in prompts:
        sight(discovery, prompt)
    saved = 0
    while jobs := begin(saves)[0]:
        saved += sum(len(job.tokens.token_ids) for job in jobs)
        saves.end([Accounting(Outcome.SAVED)], BlendStats())
    assert 0 < saved <= 0.1 * sum(map(len, prompts)) + 201


def test_a_segment_that_does_not_fit_behind_the_context_is_left_out(salts: Salts) -> None:
    """A position behind the model's last one has no rotation, and stops a GPU."""
    discovery = discovery_of(salts)
    space = space_of(context_token_ids=tuple(range(100, 200)))
    for length_max, fits in ((1 + 100 + 200, True), (1 + 100 + 199, False)):
        saves, pool = saves_of(discovery, length_max=length_max)
        queue(discovery, passage(length_max), space=space)
        assert bool(begin(saves)[0]) is fits
        assert (pool.get_num_free_blocks() < pool.num_gpu_blocks - 1) is fits


def test_priors_are_saved_where_the_connector_wants_them_and_paid_for(salts: Salts) -> None:
    discovery = discovery_of(salts, share=0.5)
    saves, _ = saves_of(discovery, prior_text=(5, 6), priors=True)
    earned = discovery.config.share * (2 * (1 + 200 + 1))
    queue(discovery, passage(1))
    (job,), _ = begin(saves)
    assert job.other_lead == (0, 5, 6)
    assert discovery.backlog._earned == earned - (1 + 200) - (3 + 200)


def test_a_save_knows_which_erasures_were_obeyed(salts: Salts, store: RamStore) -> None:
    discovery = discovery_of(salts)
    saves, _ = saves_of(discovery)
    store.erase("others", None, 0.0)
    salts.refresh()
    queue(discovery, passage(1))
    store.erase("acme", None, 0.0)
    (job,), _ = begin(saves)
    assert [one.namespace for one in store.erasures(job.erasures_seen).erasures] == ["acme"]


def test_a_store_that_fails_is_told_of_once_and_saving_goes_on(
    salts: Salts, caplog: pytest.LogCaptureFixture
) -> None:
    discovery = discovery_of(salts)
    saves, pool = saves_of(discovery)
    queue(discovery, *map(passage, range(5)))
    outcomes = [Accounting(Outcome.FAILED, reason="Unavailable: down")] * 3 + [Accounting(Outcome.SAVED)]
    for outcome in outcomes:
        assert begin(saves)[0]
        saves.end([outcome], BlendStats())
    assert len(caplog.messages) == 1
    assert "Unavailable: down" in caplog.messages[0]
    assert begin(saves)[0]
    saves.end([outcomes[0]], BlendStats())
    assert len(caplog.messages) == 2, "the store was well in between"
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_what_a_store_forgets_is_queued_again(salts: Salts, store: RamStore) -> None:
    discovery = discovery_of(salts)
    space, prompts = space_of(), [[0, *passage(1), *passage(seed)] for seed in range(2, 6)]
    queued = [sight(discovery, prompt, store=store).segments_queued for prompt in prompts[:2]]
    assert queued == [0, 1]
    assert discovery.take() is not None
    store.put(*make_chunk(passage(1), space))
    assert sight(discovery, prompts[2], store=store).segments_queued == 0
    store.delete("acme", [ChunkKey.of(space, passage(1))])
    assert sight(discovery, prompts[3], store=store).segments_queued == 1


def test_what_a_store_makes_up_is_not_used(salts: Salts) -> None:
    """It answers every anchor with a chunk of other tokens."""

    class LyingStore(RamStore):
        def lookup_anchors(
            self, namespace: str, space_digest: bytes, anchors: Sequence[int]
        ) -> dict[int, list[ChunkManifest]]:
            theirs, _ = make_chunk(passage(99), space_of("others"))
            return {anchor: [theirs] for anchor in anchors}

    match = sight(discovery_of(salts), [0, *passage(1), *passage(2)], store=LyingStore())
    assert match.spans == ()
    assert match.segments_counted == 2
