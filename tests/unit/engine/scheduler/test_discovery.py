"""What a scheduler makes of segments that recur, and how saves use an idle engine; without one."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from kintsugi.core.namespaces import SALT, narrow
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span, TokenIds
from kintsugi.discovery.backlog import SEGMENT_TOKENS_MIN
from kintsugi.discovery.sightings import BYTES_MAX
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.engine.scheduler.discovery import QUESTION_TOKENS_MIN, Discovery
from kintsugi.engine.scheduler.hashing import Salts
from kintsugi.engine.scheduler.matching import Match, chunks_of
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import Anchored
from tests.contracts.store_contract import make_chunk

FINGERPRINT = ModelFingerprint.of({"model": "toy"})
BLANK = 2
CLASSES = TokenClasses.of_texts(["<s>", "</s>", "\n\n"], special_ids=[0, 1])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store() -> RamStore:
    return RamStore()


@pytest.fixture
def salts(store: RamStore) -> Salts:
    salts = Salts(store)
    salts.refresh()
    return salts


def discovery_of(salts: Salts, clock: Clock | None = None, namespace: str = "") -> Discovery:
    discovery = Discovery(namespace, salts, lambda: CLASSES, clock or Clock())
    discovery.backlog.share = 10.0
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
    store: RamStore | None = None,
    space: ChunkSpace | None = None,
) -> Match:
    """One request, which has ended unless it has a name."""
    space, ids = space or space_of(namespace), TokenIds.of(prompt)
    match = discovery.match(store or RamStore(), space, ids, None, True)
    params = KintsugiParams(namespace, discover=True)
    found = discovery.sight(name or "one", params, space, ids, match)
    if not name:
        discovery.request_ended("one")
    return found


def test_a_segment_is_queued_at_its_second_sight(salts: Salts) -> None:
    discovery = discovery_of(salts)
    first = sight(discovery, [0, *passage(1), *passage(2)])
    assert (first.segments_counted, first.segments_queued) == (2, 0)
    second = sight(discovery, [0, *passage(3), *passage(1)])
    assert (second.segments_counted, second.segments_queued) == (2, 1)
    (segment,) = discovery.take(1)
    assert segment is not None
    assert segment.token_ids.to_list() == passage(1)
    assert discovery.take(1) == []


LABEL, ROLE = [5] * (QUESTION_TOKENS_MIN - 1), [1, 9, 9, 9, 9, 9, 9]
"""An answer's label behind the question, and markup that opens the answer in a chat form."""


@pytest.mark.parametrize(
    ("behind", "is_chunk"),
    [
        ([5] * QUESTION_TOKENS_MIN, True),
        ([*[5] * QUESTION_TOKENS_MIN, *ROLE], True),
        ([], False),
        (LABEL, False),
        (ROLE, False),
        ([*LABEL, *ROLE], False),
    ],
)
def test_the_last_segment_is_no_question_where_one_stands_behind_it(
    salts: Salts, behind: list[int], is_chunk: bool
) -> None:
    prompt = TokenIds.of([0, *passage(1), *passage(2), *behind])
    match = discovery_of(salts).match(RamStore(), space_of(), prompt, None, True)
    chunks = [range(1, 201), range(201, 401)]
    assert chunks_of(match, len(prompt)) == tuple(chunks if is_chunk else chunks[:1])


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


def test_beside_named_chunks_the_text_between_them_is_cut_and_looked_through(
    salts: Salts, store: RamStore
) -> None:
    """Each text is cut by itself, so it is the same segment wherever it stands."""
    discovery, space = discovery_of(salts), space_of()
    before, named, stored, behind = (passage(seed) for seed in range(4))
    for one in (named, stored):
        store.put(*make_chunk(one, space))
    prompt = TokenIds.of([0, *before[:-1], *named[:-1], *stored, *behind, *named])
    spans = tuple(
        Span(start, end, ChunkKey.of(space, prompt[start:end])) for start, end in ((200, 399), (799, 999))
    )
    match = discovery.match(store, space, prompt, None, True, named=spans)
    assert match.spans == (spans[0], Span(399, 599, ChunkKey.of(space, TokenIds.of(stored))), spans[1])
    assert [match.manifests[span.key].num_tokens for span in match.spans[1:] if span.key] == [200, 200]
    assert spans[0].key not in match.manifests, "nothing else is taken for a named chunk that is not stored"
    assert [(one.start, one.end) for one in match.segments] == [(1, 200), (599, 799)]


def test_what_overlaps_a_named_chunk_is_not_used_beside_it(salts: Salts, store: RamStore) -> None:
    space = space_of()
    text = passage(1, 300)
    store.put(*make_chunk(text, space))
    prompt = TokenIds.of([0, *text, *passage(2)])
    named = (Span(201, 401, ChunkKey.of(space, prompt[201:401])),)
    assert discovery_of(salts).match(store, space, prompt, None, True, named=named).spans == named


def test_what_stands_before_another_prefix_is_left_to_the_prefix_cache(salts: Salts) -> None:
    discovery = discovery_of(salts)
    match = sight(discovery, [5, *passage(1), *passage(2)])
    assert [span.start for span in match.segments] == [201]


def test_namespaces_do_not_count_together(salts: Salts) -> None:
    discovery = discovery_of(salts)
    secret = [0, *passage(1)]
    assert [sight(discovery, secret, name).segments_queued for name in ("a", "b", "a/u", "a")] == [0, 0, 0, 1]


def test_an_erasure_forgets_sightings_and_what_waits(salts: Salts, store: RamStore) -> None:
    discovery = discovery_of(salts)
    salts.refresh()
    for seed in (2, 3):
        sight(discovery, [0, *passage(1), *passage(seed)])
    store.erase("acme", None, 0.0)
    salts.refresh()
    assert discovery.take(1) == []
    assert sight(discovery, [0, *passage(2), *passage(3)]).segments_queued == 0


@pytest.mark.parametrize(
    ("params", "is_covered"),
    [
        ({"discover": True}, True),
        ({}, False),
        ({"discover": True, "no_store": True}, False),
        ({"discover": True, "spans": (Span(0, 9),)}, True),
        ({"discover": True, "spans": (Span(0, 9),), "op": Op.SAVE}, False),
    ],
)
def test_which_requests_are_discovered(salts: Salts, params: dict[str, Any], is_covered: bool) -> None:
    assert discovery_of(salts).covers(KintsugiParams("acme", **params)) is is_covered


def test_nothing_waits_for_the_classes_of_tokens(salts: Salts) -> None:
    """A lookup that waited would take the store for silent."""
    is_due, may_end = threading.Event(), threading.Event()

    def load() -> TokenClasses:
        is_due.set()
        assert may_end.wait(30)
        return CLASSES

    discovery, params = Discovery("", salts, load), KintsugiParams("acme", discover=True)
    assert is_due.wait(30)
    assert not discovery.covers(params)
    may_end.set()
    discovery._classes.result(30)
    assert discovery.covers(params)


def test_without_classes_nothing_is_discovered_and_a_line_says_so(
    salts: Salts, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> TokenClasses:
        raise ValueError("a tokenizer that nobody has thought of")

    discovery = Discovery("", salts, load)
    assert discovery._classes.exception(30) is not None
    assert not discovery.covers(KintsugiParams("acme", discover=True))
    assert "the tokens' classes could not be loaded" in caplog.text


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


def test_a_flood_of_distinct_prompts_costs_bounded_memory_and_no_other_namespace_notices(
    salts: Salts, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenth of what a hostile caller sends in a minute, each with ten segments, in thousands of parts of a
    namespace. `test_discovery_floods` sends all of it."""
    discovery = discovery_of(salts)
    sight(discovery, [0, *passage(1)], "quiet")
    generator = random.Random(7)
    for number in range(10_000):
        part = narrow("flood", {SALT: str(number % 5000)})
        params, space = KintsugiParams(part, discover=True), space_of(part)
        spans = tuple(Span(0, 64, key=_key(generator)) for _ in range(10))
        match = Match((), {}, segments=spans)
        discovery.sight("one", params, space, TokenIds.of([number]), match)
        discovery.request_ended("one")
    assert discovery._sightings.num_bytes <= BYTES_MAX
    assert discovery._sightings.num_given_up
    assert len(discovery.backlog) < 100
    assert [record.message for record in caplog.records if "has memory for" in record.message] != []
    assert len(caplog.messages) == 1
    assert sight(discovery, [0, *passage(1)], "quiet").segments_queued == 1


def test_segments_that_find_no_room_to_wait_are_counted_and_told_once(
    salts: Salts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kintsugi.discovery.backlog.NAMESPACE_TOKENS_MAX", 2 * SEGMENT_TOKENS_MIN)
    discovery = discovery_of(salts)
    matches = [
        sight(discovery, [0, *(token for seed in range(5) for token in passage(seed)), end])
        for end in (0, 1, 1)
    ]
    assert [(one.segments_queued, one.segments_refused) for one in matches] == [(0, 0), (2, 3), (0, 3)]
    assert len(caplog.messages) == 1
    assert "has memory for" in caplog.messages[0]


def _key(generator: random.Random) -> ChunkKey:
    return ChunkKey(generator.randbytes(32))


def test_what_a_store_forgets_is_queued_again(salts: Salts, store: RamStore) -> None:
    discovery = discovery_of(salts)
    space, prompts = space_of(), [[0, *passage(1), *passage(seed)] for seed in range(2, 6)]
    queued = [sight(discovery, prompt, store=store).segments_queued for prompt in prompts[:2]]
    assert queued == [0, 1]
    assert discovery.take(1)
    store.put(*make_chunk(passage(1), space))
    assert sight(discovery, prompts[2], store=store).segments_queued == 0
    store.delete("acme", [ChunkKey.of(space, passage(1))])
    assert sight(discovery, prompts[3], store=store).segments_queued == 1


def test_what_a_store_makes_up_is_not_used(salts: Salts) -> None:
    """It answers every pair of anchors with a chunk of other tokens."""

    class LyingStore(RamStore):
        def lookup_anchors(
            self, namespace: str, space_digest: bytes, anchors: Sequence[int]
        ) -> list[Anchored]:
            theirs, _ = make_chunk(passage(99), space_of("others"))
            lengths = (0, 1, 32, len(passage(1)), 1 << 30)
            return [Anchored(anchors[0], last, n, (theirs.key,)) for last in anchors for n in lengths]

    match = sight(discovery_of(salts), [0, *passage(1), *passage(2)], store=LyingStore())
    assert match.spans == ()
    assert match.segments_counted == 2
