"""What every `ChunkStore` must do. A test module subclasses `StoreContract` and provides `store`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from kintsugi.core.documents import DOCUMENT_BYTES_MAX
from kintsugi.core.errors import Corrupted, InvalidField, NotFound, ResourceExhausted
from kintsugi.core.layout import (
    SIDE_KIND_MAX,
    ChunkManifest,
    Codec,
    HeadRange,
    KVLayout,
    LayerGroup,
    Part,
    PartKind,
    SideKind,
    digests_of,
)
from kintsugi.core.report import Report
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, anchors_of
from kintsugi.store.protocol.interface import (
    ANCHORED_KEYS_MAX,
    Anchored,
    ChunkLost,
    ChunkStore,
    Erasure,
    LayerFrame,
)
from tests.fakes.reports import part_of, report_of

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=4, head_dim=16, dtype="bfloat16")
FINGERPRINT = ModelFingerprint.of({"weights": "contract"})
SPACE = ChunkSpace(FINGERPRINT, "acme")
MIXED = KVLayout.of_groups(
    [
        LayerGroup(1, 2, (Part(PartKind.KV, 16),)),
        LayerGroup(2, 4, (Part(PartKind.K, 24), Part(PartKind.V, 8))),
        LayerGroup(1, 1, (Part(PartKind.LATENT, 32), Part(PartKind.ROTARY, 8))),
    ],
    "bfloat16",
)
"""Layers of every kind, which no model has side by side."""
SCORES = SideKind.SCORES
SIDE_KINDS = (7, SCORES)
EVERY_FRAME = range(-SIDE_KINDS[0], MIXED.num_layers)
Chunk = tuple[ChunkManifest, list[bytes]]


def make_report(created: str, writer: str = "contract") -> Report:
    """A report without evidence."""
    return report_of(part_of(writer=writer), created=created)


def make_chunk(tokens: Sequence[int], space: ChunkSpace = SPACE, seed: int = 0) -> Chunk:
    """A manifest and random frames that agree with each other."""
    generator = np.random.default_rng([seed, len(tokens)])
    size = LAYOUT.frame_bytes(Codec.RAW, len(tokens))
    frames = [generator.bytes(size) for _ in range(LAYOUT.num_layers)]
    head = LAYOUT.head_bytes(Codec.RAW, len(tokens))
    manifest = ChunkManifest(
        key=ChunkKey.of(space, tokens),
        space_digest=space.digest,
        fingerprint=space.fingerprint,
        namespace=space.namespace,
        num_tokens=len(tokens),
        layout=LAYOUT,
        codec=Codec.RAW,
        anchors=anchors_of(tokens),
        digests=b"".join(digests_of(frame, head) for frame in frames),
    )
    return manifest, frames


def make_mixed_chunk(tokens: Sequence[int], space: ChunkSpace = SPACE) -> Chunk:
    """A chunk of `MIXED` with two side frames, of a kind that nobody knows and of scores."""
    count = len(tokens)
    sizes = [9, count, *(MIXED.frame_bytes(Codec.RAW, count, layer) for layer in range(MIXED.num_layers))]
    generator = np.random.default_rng([1, count])
    frames = [generator.bytes(size) for size in sizes]
    key, anchors = ChunkKey.of(space, tokens), anchors_of(tokens)
    return ChunkManifest.of(space, key, anchors, count, MIXED, Codec.RAW, frames, SIDE_KINDS), frames


def make_encrypted_chunk(tokens: Sequence[int]) -> Chunk:
    """A chunk whose digests are tags, which no store can check."""
    manifest, frames = make_chunk(tokens)
    tags = np.random.default_rng(len(tokens)).bytes(len(manifest.digests))
    encrypted = dataclasses.replace(manifest, key_id="acme/1", salt=bytes(range(16)), digests=tags)
    return encrypted, frames


def read_all(
    store: ChunkStore,
    keys: Sequence[ChunkKey],
    heads: HeadRange = HeadRange(0, LAYOUT.num_kv_heads),
    layers: range = range(LAYOUT.num_layers),
    namespace: str = "acme",
) -> list[tuple[int, int, bytes | None]]:
    """`(chunk, layer, bytes)` in arrival order; None for a lost chunk."""
    return [
        (item.chunk, item.layer, bytes(item.data) if isinstance(item, LayerFrame) else None)
        for item in store.stream(namespace, keys, layers, heads, deadline_s=10.0)
    ]


class StoreContract:
    """Subclasses provide a fixture `store`: an empty store with room for a few megabytes."""

    def test_an_erased_chunk_is_gone_and_caches_are_told(self, store: ChunkStore) -> None:
        chunks = [make_chunk(range(8 + i)) for i in range(3)]
        for manifest, frames in chunks:
            store.put(manifest, frames)
        keys = [manifest.key for manifest, _ in chunks]
        cursor = store.erasures("").cursor
        first_s = time.time()
        assert sum(place.items for place in store.erase("acme", keys[:1], first_s)) >= 1
        assert store.lookup("acme", keys) == [None, chunks[1][0], chunks[2][0]]
        page = store.erasures(cursor)
        assert list(page.erasures) == [Erasure("acme", keys[0], first_s)]
        assert not store.erasures(page.cursor).erasures
        assert store.put(*chunks[0]), "it may be stored again"
        second_s = time.time()
        assert sum(place.items for place in store.erase("acme", None, second_s)) >= 3
        assert store.list("acme") == []
        assert list(store.erasures(page.cursor).erasures) == [Erasure("acme", None, second_s)]

    def test_what_was_asked_for_before_an_erasure_is_refused_and_what_came_later_stays(
        self, store: ChunkStore
    ) -> None:
        (before, frames), (after, others) = make_chunk(range(8)), make_chunk(range(9))
        erased_s = time.time() - 1.0
        store.put(replace(after, asked_at_s=erased_s + 0.1), others)
        places = store.erase("acme", None, erased_s)
        assert sum(place.items for place in places) == 0
        for asked_at_s in (erased_s, erased_s - 5.0):
            with pytest.raises(NotFound):
                store.put(replace(before, asked_at_s=asked_at_s), frames)
        assert store.lookup("acme", [before.key, after.key]) == [None, after]
        assert store.put(replace(before, asked_at_s=erased_s + 0.01), frames)

    def test_a_chunk_may_have_a_lifetime(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(8))
        with pytest.raises(InvalidField, match="ttl_s"):
            store.put(manifest, frames, ttl_s=-1.0)
        assert store.put(manifest, frames, ttl_s=3600.0)
        assert store.lookup("acme", [manifest.key]) == [manifest]

    def test_chunks_that_are_there_are_retained(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(8))
        absent, _ = make_chunk(range(9))
        store.put(manifest, frames, ttl_s=3600.0)
        keys = [absent.key, manifest.key]
        for ttl_s in (7200.0, 1.0, 0.0):
            assert store.retain("acme", keys, ttl_s) == [False, True]
        assert store.retain("rival", keys) == [False, False]
        assert store.retain("acme", []) == []
        assert store.lookup("acme", keys) == [None, manifest]
        for wrong in (-1.0, math.nan):
            with pytest.raises(InvalidField, match="ttl_s"):
                store.retain("acme", keys, wrong)

    def test_a_namespace_is_erased_with_its_parts(self, store: ChunkStore) -> None:
        kept = {}
        for namespace in ("acme", "acme/-/a", "acme/-/a/.b", "acme/-/ab", "acme/x", "acme2"):
            manifest, frames = make_chunk(range(8))
            kept[namespace] = replace(manifest, namespace=namespace)
            store.put(kept[namespace], frames)

        def held() -> list[str]:
            return [name for name, one in kept.items() if store.lookup(name, [one.key]) != [None]]

        store.erase("acme/-/a", None, 0.0)
        assert held() == ["acme", "acme/-/ab", "acme/x", "acme2"]
        store.erase("acme", None, 0.0)
        assert held() == ["acme/x", "acme2"]

    def test_a_chunk_reads_back_as_it_was_written(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        assert store.put(manifest, frames) is True
        assert store.lookup("acme", [manifest.key]) == [manifest]
        assert read_all(store, [manifest.key]) == [(0, layer, frames[layer]) for layer in range(3)]

    def test_a_second_put_of_a_key_changes_nothing(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        other, other_frames = make_chunk(range(40), seed=1)
        assert manifest.key == other.key
        assert store.put(manifest, frames)
        assert not store.put(other, other_frames)
        assert read_all(store, [manifest.key])[0] == (0, 0, frames[0])

    def test_absent_and_foreign_keys_look_alike(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        absent = ChunkKey(b"\1" * 32)
        assert store.lookup("acme", [absent]) == [None]
        assert store.lookup("rival", [manifest.key]) == [None]
        assert store.lookup_anchors("rival", SPACE.digest, manifest.anchors) == []
        assert read_all(store, [manifest.key], namespace="rival") == [(0, 0, None)]
        assert store.delete("rival", [manifest.key]) == 0
        assert store.list("rival") == []

    def test_what_is_found_says_where_it_lies(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        found, absent = store.find("acme", [manifest.key, ChunkKey(b"\1" * 32)])
        assert absent is None
        assert found is not None
        assert found.manifest == manifest
        assert found.source.tier == store.tiers("acme", [manifest.key])[0]
        assert store.find("rival", [manifest.key]) == [None]

    def test_a_tier_is_named_for_what_is_there(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        tier, nothing = store.tiers("acme", [manifest.key, ChunkKey(b"\1" * 32)])
        assert tier
        assert nothing is None
        assert store.tiers("rival", [manifest.key]) == [None]
        assert store.tiers("acme", []) == []

    def test_streams_are_layer_major(self, store: ChunkStore) -> None:
        chunks = [make_chunk(range(start, start + 33)) for start in (0, 100, 200)]
        for manifest, frames in chunks:
            store.put(manifest, frames)
        items = read_all(store, [manifest.key for manifest, _ in chunks])
        layers = [layer for _, layer, _ in items]
        assert layers == sorted(layers)
        assert {(chunk, layer): data for chunk, layer, data in items} == {
            (chunk, layer): frames[layer] for chunk, (_, frames) in enumerate(chunks) for layer in range(3)
        }

    @pytest.mark.parametrize("heads", [HeadRange(0, 2), HeadRange(2, 4), HeadRange(3, 4)])
    def test_a_rank_reads_only_its_heads(self, store: ChunkStore, heads: HeadRange) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        start, stop = manifest.head_range_bytes(heads)
        items = read_all(store, [manifest.key], heads=heads, layers=range(1, 3))
        assert items == [(0, layer, frames[layer][start:stop]) for layer in (1, 2)]

    def test_layers_that_differ_read_back_behind_the_side_frames(self, store: ChunkStore) -> None:
        manifest, frames = make_mixed_chunk(range(40))
        assert store.put(manifest, frames)
        assert store.lookup("acme", [manifest.key]) == [manifest]
        expected = [(0, layer, frame) for layer, frame in zip(manifest.layers, frames, strict=True)]
        assert read_all(store, [manifest.key], layers=EVERY_FRAME) == expected
        assert read_all(store, [manifest.key], layers=range(-SIDE_KIND_MAX, 4)) == expected
        assert read_all(store, [manifest.key], layers=range(-SCORES, 4)) == expected[1:]
        assert read_all(store, [manifest.key], layers=range(4)) == expected[2:]
        assert read_all(store, [manifest.key], layers=range(-SCORES, 0)) == expected[1:2]
        assert read_all(store, [manifest.key], layers=range(-1, 1)) == expected[2:3]

    @pytest.mark.parametrize("rank", range(4))
    def test_a_rank_reads_its_share_of_every_layer(self, store: ChunkStore, rank: int) -> None:
        manifest, frames = make_mixed_chunk(range(40))
        store.put(manifest, frames)
        shares = [HeadRange.of_rank(heads, rank, 4) for heads in (2, 4, 4, 1)]
        items = read_all(store, [manifest.key], HeadRange(rank, rank + 1), EVERY_FRAME)
        whole = [(0, -kind, frame) for kind, frame in zip(SIDE_KINDS, frames, strict=False)]
        assert items[:2] == whole, "side frames belong to every head"
        for (_, _, data), frame, heads, share in zip(
            items[2:], frames[2:], (2, 4, 4, 1), shares, strict=True
        ):
            head_bytes = len(frame) // heads
            assert data == frame[share.start * head_bytes : share.stop * head_bytes]

    def test_chunks_without_side_frames_are_read_beside_others(self, store: ChunkStore) -> None:
        sided, plain = make_mixed_chunk(range(40)), make_mixed_chunk(range(50))
        bare = dataclasses.replace(plain[0], side_frames=(), digests=plain[0].digests[32:])
        store.put(*sided)
        store.put(bare, plain[1][2:])
        keys = [ChunkKey(b"\1" * 32), bare.key, sided[0].key]
        items = read_all(store, keys, layers=EVERY_FRAME)
        assert [(chunk, layer) for chunk, layer, data in items if data is not None] == [
            *((2, -kind) for kind in SIDE_KINDS),
            *((chunk, layer) for layer in range(4) for chunk in (1, 2)),
        ]
        assert [item for item in items if item[2] is None] == [(0, EVERY_FRAME.start, None)]

    def test_damaged_side_frames_are_refused(self, store: ChunkStore) -> None:
        manifest, frames = make_mixed_chunk(range(40))
        with pytest.raises(Corrupted):
            store.put(manifest, [bytes(9), *frames[1:]])
        with pytest.raises(InvalidField, match="and 2 side frames"):
            store.put(manifest, frames[1:])
        assert store.lookup("acme", [manifest.key]) == [None]

    def test_nobody_is_given_a_chunk_that_he_has_no_key_for(self, store: ChunkStore) -> None:
        manifest, frames = make_encrypted_chunk(range(40))
        with contextlib.suppress(InvalidField):  # a store that nobody reads with keys takes none
            store.put(manifest, frames)
        assert read_all(store, [manifest.key]) == [(0, 0, None)]

    def test_a_missing_chunk_does_not_disturb_the_others(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        items = list(
            store.stream(
                "acme", [ChunkKey(b"\2" * 32), manifest.key], range(3), HeadRange(0, 4), deadline_s=10.0
            )
        )
        lost = [item for item in items if isinstance(item, ChunkLost)]
        assert [item.chunk for item in lost] == [0]
        assert [i.layer for i in items if isinstance(i, LayerFrame)] == [0, 1, 2]

    def test_first_and_last_anchor_find_a_chunk(self, store: ChunkStore) -> None:
        short, long = make_chunk(range(40)), make_chunk(range(90))
        for manifest, frames in (short, long):
            store.put(manifest, frames)
        (first, last, _), (_, longer, _) = short[0].anchors, long[0].anchors
        own = Anchored(first, last, 40, (short[0].key,))
        assert store.lookup_anchors("acme", SPACE.digest, [last, 12345, first]) == [own]
        found = store.lookup_anchors("acme", SPACE.digest, [first, last, longer])
        assert sorted(found) == sorted([own, Anchored(first, longer, 90, (long[0].key,))])
        assert store.lookup_anchors("acme", SPACE.digest, [first]) == []

    def test_anchors_name_a_few_of_many_chunks_that_begin_and_end_alike(self, store: ChunkStore) -> None:
        ends = list(range(40))
        chunks = [make_chunk([*ends, number, *ends]) for number in range(ANCHORED_KEYS_MAX + 1)]
        for manifest, frames in chunks:
            store.put(manifest, frames)
        stored = {manifest.key for manifest, _ in chunks}
        (found,) = store.lookup_anchors("acme", SPACE.digest, chunks[0][0].anchors)
        assert len(found.keys) == ANCHORED_KEYS_MAX
        assert stored > set(found.keys)
        assert all(map(found.may_hold, stored))

    def test_anchors_of_another_space_are_not_found(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        other = ChunkSpace(FINGERPRINT, "acme", prefix_token_ids=(1,))
        assert manifest.anchors
        assert store.lookup_anchors("acme", other.digest, manifest.anchors) == []

    def test_a_chunk_with_one_anchor_is_found_by_it(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        manifest = dataclasses.replace(manifest, anchors=(12345,))
        store.put(manifest, frames)
        found = store.lookup_anchors("acme", SPACE.digest, manifest.anchors)
        assert found == [Anchored(12345, 12345, 40, (manifest.key,))]
        store.delete("acme", [manifest.key])
        assert store.lookup_anchors("acme", SPACE.digest, manifest.anchors) == []

    def test_what_a_chunk_was_prepared_behind_is_kept(self, store: ChunkStore) -> None:
        space = ChunkSpace(FINGERPRINT, "acme", (1,), context_token_ids=(2, 3))
        manifest, frames = make_chunk(range(40), space)
        manifest = dataclasses.replace(manifest, context_keys=space.context_keys)
        store.put(manifest, frames)
        (held,) = store.lookup("acme", [manifest.key])
        assert held is not None
        assert held.context_keys == (ChunkKey.of(space.plain, (2, 3)),)

    @pytest.mark.parametrize("is_erasure", [False, True])
    def test_chunks_prefilled_after_a_text_go_with_it(self, store: ChunkStore, is_erasure: bool) -> None:
        text, frames_of_text = make_chunk(range(40))
        after, other = (make_chunk(range(start, start + 40)) for start in (100, 200))
        store.put(text, frames_of_text)
        store.put(dataclasses.replace(after[0], context_keys=(text.key,)), after[1])
        store.put(dataclasses.replace(other[0], context_keys=(after[0].key,)), other[1])
        elsewhere = dataclasses.replace(after[0], namespace="other", context_keys=(text.key,))
        store.put(elsewhere, after[1])
        keys = [text.key, after[0].key, other[0].key]
        if is_erasure:
            store.erase("acme", [text.key], 0.0)
        else:
            store.delete("acme", [text.key])
        found = [manifest is not None for manifest in store.lookup("acme", keys)]
        assert found == [False, False, True], "the third was prefilled after the second's text alone"
        assert store.lookup("other", [after[0].key]) != [None], "contexts never cross namespaces"

    def test_a_chunk_whose_context_was_erased_is_refused(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        text = make_chunk(range(100, 140))[0].key
        store.erase("acme", [text], 0.0)
        asked_at_s = time.time() - 60.0
        late = dataclasses.replace(manifest, context_keys=(text,), asked_at_s=asked_at_s)
        with pytest.raises(NotFound):
            store.put(late, frames)
        store.put(dataclasses.replace(manifest, asked_at_s=asked_at_s), frames)

    def test_short_chunks_have_no_anchor(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(5))
        store.put(manifest, frames)
        assert manifest.anchors == ()
        assert store.lookup("acme", [manifest.key]) == [manifest]

    def test_deleted_chunks_are_gone(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        assert store.delete("acme", [manifest.key, ChunkKey(b"\3" * 32)]) == 1
        assert store.lookup("acme", [manifest.key]) == [None]
        assert store.lookup_anchors("acme", SPACE.digest, manifest.anchors) == []

    def test_listing_pages_in_key_order(self, store: ChunkStore) -> None:
        manifests = []
        for start in range(5):
            manifest, frames = make_chunk(range(start, start + 33))
            store.put(manifest, frames)
            manifests.append(manifest)
        expected = sorted(manifests, key=lambda m: m.key)
        assert store.list("acme") == expected
        first = store.list("acme", limit=2)
        assert first + store.list("acme", after=first[-1].key) == expected

    def test_wrong_frames_are_refused_and_leave_nothing(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        with pytest.raises(InvalidField, match="frames"):
            store.put(manifest, frames[:-1])
        with pytest.raises(InvalidField, match=r"frames\[1\]"):
            store.put(manifest, [frames[0], frames[1][:-1], frames[2]])
        damaged = bytearray(frames[2])
        damaged[7] ^= 1
        with pytest.raises(Corrupted):
            store.put(manifest, [frames[0], frames[1], damaged])
        assert store.lookup("acme", [manifest.key]) == [None]

    def test_a_manifest_cannot_lie_about_its_size(self) -> None:
        manifest, _ = make_chunk(range(40))
        with pytest.raises(InvalidField, match="digests"):
            dataclasses.replace(manifest, digests=b"")
        with pytest.raises(InvalidField, match="num_tokens"):
            dataclasses.replace(manifest, num_tokens=1 << 40)

    def test_reports_are_kept_by_fingerprint(self, store: ChunkStore) -> None:
        other = ModelFingerprint.of({"weights": "other"})
        assert store.get_report(FINGERPRINT, "gate") is None
        store.put_report(FINGERPRINT, "gate", b"one")
        store.put_report(FINGERPRINT, "gate", b"two")
        assert store.get_report(FINGERPRINT, "gate") == b"two"
        assert store.get_report(other, "gate") is None
        with pytest.raises(ResourceExhausted, match="at most"):
            store.put_report(FINGERPRINT, "gate", bytes(DOCUMENT_BYTES_MAX + 1))
        assert store.get_report(FINGERPRINT, "gate") == b"two"

    def test_reports_put_in_any_order_end_alike(self, store: ChunkStore) -> None:
        """The latest counts, and of several with one date everybody keeps the same one."""
        latest = [make_report("2026-01-03T00:00:00+00:00", writer) for writer in ("one", "other")]
        dates = ("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00")
        written = [*map(make_report, dates), *latest]
        kept = []
        for name, order in enumerate(itertools.permutations(written)):
            for report in order:
                store.put_report(FINGERPRINT, f"gate-{name}", report.to_bytes())
            kept.append(store.get_report(FINGERPRINT, f"gate-{name}"))
        assert len(set(kept)) == 1
        assert kept[0] in [one.to_bytes() for one in latest]

    def test_what_is_no_report_replaces_none(self, store: ChunkStore) -> None:
        report = make_report("2026-01-01T00:00:00+00:00").to_bytes()
        store.put_report(FINGERPRINT, "gate", report)
        store.put_report(FINGERPRINT, "gate", b"no report")
        assert store.get_report(FINGERPRINT, "gate") == report

    def test_a_report_from_the_future_is_refused(self, store: ChunkStore) -> None:
        soon = (datetime.now(UTC) + timedelta(hours=12)).isoformat(timespec="seconds")
        store.put_report(FINGERPRINT, "gate", make_report(soon).to_bytes())
        future = make_report("9998-01-01T00:00:00+00:00")
        with pytest.raises(InvalidField, match=r"created: 9998-01-01.* more than a day ahead"):
            store.put_report(FINGERPRINT, "gate", future.to_bytes())
        assert store.get_report(FINGERPRINT, "gate") == make_report(soon).to_bytes()

    def test_stats_count_what_is_held(self, store: ChunkStore) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        stats = store.stats()
        assert stats.chunks == 1
        assert stats.bytes_used >= manifest.chunk_bytes
