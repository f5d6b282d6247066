"""The layer loader: order, bounds, failures, and whose bytes it keeps."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import pytest
import torch
from torch import Tensor

from kintsugi.core.errors import Corrupted, DeadlineExceeded, KintsugiError, Unavailable
from kintsugi.core.exchange import ChunkLost, LayerFrame
from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, KVLayout, LayerGroup, Part, PartKind
from kintsugi.core.spaces import ChunkKey
from kintsugi.fusor import staging
from kintsugi.fusor.codecs import encode_frame
from kintsugi.fusor.loader import Frames, LayerLoader, LoadedLayer, LoadFailed
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.staging import ChunkRows, Staging
from tests.fakes.pretend_cuda import CUDA, PretendCuda
from tests.fakes.toy_chunks import SPACE, Gate, manifest_of
from tests.waiting import wait_until

LAYERS, HEAD_DIM = 5, 8
TIMEOUT_S = 20.0


def rotary_of(layer: int) -> Rotary:
    """Every layer has its own base."""
    angles = torch.arange(64)[:, None] / (10.0 + layer) ** (torch.arange(HEAD_DIM // 2) / 4)
    return Rotary(angles.cos(), angles.sin(), is_neox=True)


class Chunks:
    """Chunks with random KV, streamed as a store would, and what should come out."""

    def __init__(
        self, lengths: Sequence[int], heads: int = 2, layers: int = LAYERS, codec: Codec = Codec.RAW
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.layers = layers
        layout = KVLayout.uniform(layers, heads, HEAD_DIM, "float32")
        self.keys = [torch.randn(layers, n, heads, HEAD_DIM, generator=generator) for n in lengths]
        self.values = [torch.randn(layers, n, heads, HEAD_DIM, generator=generator) for n in lengths]
        self.frames = [
            [encode_frame(key[layer], value[layer], codec) for layer in range(layers)]
            for key, value in zip(self.keys, self.values, strict=True)
        ]
        self.manifests = [
            manifest_of(range(index * 100, index * 100 + n), layout, self.frames[index], codec)
            for index, n in enumerate(lengths)
        ]

    def placement(self, chunk: int, start: int, first_row: int = 0, rows: int | None = None) -> ChunkRows:
        rows = self.manifests[chunk].num_tokens - first_row if rows is None else rows
        return ChunkRows(self.manifests[chunk], first_row, torch.arange(start, start + rows))

    def stream(
        self, order: Sequence[int], wrap: Callable[[memoryview], memoryview] = lambda data: data
    ) -> Iterator[LayerFrame]:
        for layer in range(self.layers):
            for position, chunk in enumerate(order):
                yield LayerFrame(position, layer, wrap(self.frames[chunk][layer]))

    def expected(self, layer: int, placements: Sequence[tuple[int, ChunkRows]]) -> tuple[Tensor, Tensor]:
        keys, values = [], []
        for chunk, placement in placements:
            rows = slice(placement.first_row, placement.first_row + len(placement.positions))
            rotated = rotary_of(layer).rotate(self.keys[chunk][layer, rows], placement.positions)
            keys.append(rotated)
            values.append(self.values[chunk][layer, rows])
        return torch.cat(keys), torch.cat(values)


def loader_of(
    open_frames: Callable[[], Frames], placements: Sequence[ChunkRows], depth: int = 2
) -> LayerLoader:
    rotary = [rotary_of(layer) for layer in range(LAYERS)]
    heads = placements[0].manifest.layout.num_kv_heads
    return LayerLoader(
        lambda _share: open_frames(), placements, rotary, torch.device("cpu"), heads, depth, patience_s=1.0
    )


def taken(loader: LayerLoader, layer: int) -> LoadedLayer:
    loaded = loader.take(layer, TIMEOUT_S)
    assert loaded is not None
    return loaded


def assert_loads(chunks: Chunks, placements: Sequence[tuple[int, ChunkRows]], frames: Frames) -> None:
    loader = loader_of(lambda: frames, [placement for _, placement in placements])
    try:
        for layer in range(LAYERS):
            loaded = taken(loader, layer)
            key, value = chunks.expected(layer, placements)
            assert torch.equal(loaded.key, key)
            assert torch.equal(loaded.value, value)
            assert loaded.layer == layer
            assert loaded.num_bytes == sum(len(chunks.frames[chunk][layer]) for chunk, _ in placements)
            assert loaded.started_s <= loaded.finished_s
    finally:
        loader.close()


def test_layers_arrive_in_order_rotated_by_their_own_table() -> None:
    chunks = Chunks([5, 9, 1])
    placements = [(0, chunks.placement(0, 3)), (1, chunks.placement(1, 20)), (2, chunks.placement(2, 40))]
    assert_loads(chunks, placements, chunks.stream([0, 1, 2]))


def test_only_the_wanted_rows_of_a_chunk() -> None:
    chunks = Chunks([10, 9])
    placements = [(0, chunks.placement(0, 12, first_row=4)), (1, chunks.placement(1, 30, rows=8))]
    assert_loads(chunks, placements, chunks.stream([0, 1]))


def test_a_chunk_that_is_there_twice() -> None:
    chunks = Chunks([6, 4])
    placements = [(0, chunks.placement(0, 0)), (1, chunks.placement(1, 6)), (0, chunks.placement(0, 10))]
    assert_loads(chunks, placements, chunks.stream([0, 1, 0]))


def test_read_only_bytes() -> None:
    chunks = Chunks([6, 4])
    placements = [(0, chunks.placement(0, 0)), (1, chunks.placement(1, 6))]
    assert_loads(chunks, placements, chunks.stream([0, 1], lambda data: memoryview(bytes(data))))


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT8])
def test_a_device_takes_read_only_bytes_without_a_copy(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the interpreter's lock would be held for."""
    chunks = Chunks([6, 4], codec=codec)
    placements = [chunks.placement(0, 0), chunks.placement(1, 6, first_row=1)]

    def staged(device: torch.device) -> list[Tensor]:
        layer = Staging(placements, 2, device).begin_layer(0)
        for index, frames in enumerate(chunks.frames):
            layer.put(index, memoryview(bytes(frames[0])))
        return [getattr(kv, "on_host", kv) for kv in layer.finish(rotary_on(device))[:2]]

    def rotary_on(device: torch.device) -> Rotary:
        rotary = rotary_of(0)
        return Rotary(rotary.cos.to(device), rotary.sin.to(device), is_neox=True)

    expected = staged(torch.device("cpu"))
    monkeypatch.delattr(staging, "as_bytes")
    with PretendCuda():
        for got, one in zip(staged(CUDA), expected, strict=True):
            assert torch.equal(got, one)
        with pytest.raises(Corrupted) if codec is Codec.INT8 else contextlib.nullcontext():
            size = len(chunks.frames[0][0])
            Staging(placements, 2, CUDA).begin_layer(0).put(0, memoryview(b"\xff" * size))


def test_it_runs_at_most_depth_layers_ahead_of_the_device_that_the_host_is_ahead_of() -> None:
    """K and V of a layer stay until the device has used them, however early the host launched that."""
    chunks = Chunks([5])
    pulled: list[int] = []

    def stream(_share: slice) -> Frames:
        for frame in chunks.stream([0]):
            pulled.append(frame.layer)
            yield frame

    with PretendCuda() as device:
        rotary = [
            Rotary(one.cos.to(CUDA), one.sin.to(CUDA), is_neox=True) for one in map(rotary_of, range(LAYERS))
        ]
        device.is_behind = True
        loader = LayerLoader(stream, [chunks.placement(0, 7)], rotary, CUDA, 2, depth=2, patience_s=1.0)
        try:
            assert [taken(loader, layer).layer for layer in (0, 1)] == [0, 1]
            wait_until(lambda: device.num_waiting == 1, "it does not wait", within_s=TIMEOUT_S)
            assert pulled == [0, 1]
            device.is_behind = False
            assert [taken(loader, layer).layer for layer in (2, 3, 4)] == [2, 3, 4]
        finally:
            device.is_behind = False
            loader.close()
        assert not device.syncs, "the thread that computes waits for nothing"


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_of_different_shapes_of_which_one_does_not_rotate(codec: Codec, ranks: int) -> None:
    groups = [(4, 8, 8), (2, 12, 8), (4, 8, 16)]
    parts = [(heads, (Part(PartKind.K, key), Part(PartKind.V, value))) for heads, key, value in groups]
    layout = KVLayout.of_groups([LayerGroup(1, *one) for one in parts], "float32")
    generator = torch.Generator().manual_seed(7)
    kv = [
        [torch.randn(5, heads, width, generator=generator) for width in (key, value)]
        for heads, key, value in groups
    ]
    frames = [encode_frame(key, value, codec) for key, value in kv]
    manifest = ChunkManifest.of(SPACE, ChunkKey.of(SPACE, range(5)), (), 5, layout, codec, frames)
    rank = HeadRange.of_rank(layout.num_kv_heads, ranks - 1, ranks)
    own = [layout.heads_of(layer, rank) for layer in range(3)]

    def stream() -> Iterator[LayerFrame]:
        for layer, heads in enumerate(own):
            size = layout.head_bytes(codec, 5, layer)
            yield LayerFrame(0, layer, frames[layer][heads.start * size : heads.stop * size])

    rotary = [rotary_of(0), None, rotary_of(2)]
    placement = ChunkRows(manifest, 1, torch.arange(20, 24))
    device = torch.device("cpu")
    loader = LayerLoader(lambda _: stream(), [placement], rotary, device, len(rank), 2, patience_s=1.0)
    try:
        for layer, (key, value) in enumerate(kv):
            heads, turn = slice(own[layer].start, own[layer].stop), rotary[layer]
            plain = key[1:, heads]
            expected = plain if turn is None else turn.rotate(plain, placement.positions)
            loaded, bound = taken(loader, layer), 0.0 if codec is Codec.RAW else 0.05
            assert (loaded.key - expected).abs().max() <= bound
            assert (loaded.value - value[1:, heads]).abs().max() <= bound
            zeros = loader.zeros(layer)
            assert zeros.key.shape == expected.shape
            assert zeros.value.shape == value[1:, heads].shape
    finally:
        loader.close()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("lengths", [[6, 4], [1, 1], [5]])
def test_nothing_is_kept_of_a_frame_once_the_next_is_taken(heads: int, lengths: list[int]) -> None:
    """A store may reuse a frame's bytes; one head, or one token, makes a view look contiguous already."""
    chunks = Chunks(lengths, heads=heads)
    order = list(range(len(lengths)))
    buffer = bytearray(max(len(frames[0]) for frames in chunks.frames))

    def reusing(data: memoryview) -> memoryview:
        buffer[: len(data)] = data
        return memoryview(buffer)[: len(data)]

    placements = [(chunk, chunks.placement(chunk, 10 * chunk)) for chunk in order]
    assert_loads(chunks, placements, chunks.stream(order, reusing))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_it_runs_at_most_depth_layers_ahead(depth: int) -> None:
    chunks = Chunks([3])
    finished = 0
    pulled: list[tuple[int, int]] = []
    lock = threading.Lock()

    def frames() -> Iterator[LayerFrame]:
        for frame in chunks.stream([0]):
            with lock:
                pulled.append((frame.layer, finished))
            yield frame

    loader = loader_of(frames, [chunks.placement(0, 0)], depth)
    try:
        for layer in range(LAYERS):
            with lock:
                finished = layer + 1  # while `take` runs, the loader may begin one more
            taken(loader, layer)
    finally:
        loader.close()
    assert [layer for layer, _ in pulled] == list(range(LAYERS))
    assert all(layer < taken_by_then + depth for layer, taken_by_then in pulled)


def test_a_full_pipeline_stops_pulling_and_closes() -> None:
    chunks = Chunks([3])
    pulled: list[int] = []
    reached = threading.Event()
    let_go = threading.Event()

    def frames() -> Iterator[LayerFrame]:
        try:
            for frame in chunks.stream([0]):
                pulled.append(frame.layer)
                if frame.layer == 1:
                    reached.set()
                yield frame
        finally:
            let_go.set()

    loader = loader_of(frames, [chunks.placement(0, 0)], depth=2)
    assert reached.wait(TIMEOUT_S)
    began = time.perf_counter()
    loader.close()
    loader.close()
    assert time.perf_counter() - began < 5
    assert let_go.wait(TIMEOUT_S)
    loader._threads[0].join(TIMEOUT_S)
    assert pulled == [0, 1]
    assert not loader._threads[0].is_alive()


def test_closing_does_not_wait_for_a_stuck_stream() -> None:
    """The engine's thread closes: an abort beside a slow store must not stop everybody's decoding."""
    chunks, gate = Chunks([3]), Gate()

    def frames() -> Iterator[LayerFrame]:
        gate(0)
        yield from chunks.stream([0])

    loader = loader_of(frames, [chunks.placement(0, 0)])
    assert loader.take(0, 0.01) is None
    began = time.perf_counter()
    loader.close()
    assert time.perf_counter() - began < 2
    assert loader._threads[0].is_alive()
    gate.event(0).set()
    loader._threads[0].join(TIMEOUT_S)
    assert not loader._threads[0].is_alive()


def test_a_lost_chunk_names_its_own_key() -> None:
    chunks = Chunks([3, 4])

    def frames() -> Frames:
        yield LayerFrame(0, 0, chunks.frames[0][0])
        yield LayerFrame(1, 0, chunks.frames[1][0])
        yield LayerFrame(0, 1, chunks.frames[0][1])
        yield ChunkLost(1, 1, "digest mismatch")

    loader = loader_of(frames, [chunks.placement(0, 0), chunks.placement(1, 3)])
    taken(loader, 0)
    with pytest.raises(LoadFailed, match="layer 1, digest mismatch") as caught:
        loader.take(1, TIMEOUT_S)
    assert caught.value.keys == {chunks.manifests[1].key}
    loader.close()


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a GPU's loader has for three chunks."""
    monkeypatch.setattr(Staging, "threads", property(lambda self: len(self.placements)))


def shared_loader(chunks: Chunks, frames: Callable[[int, int], LayerFrame | ChunkLost]) -> LayerLoader:
    """A loader whose thread i streams `frames(i, layer)`."""

    def open_frames(share: slice) -> Frames:
        return map(frames, repeat(share.start), range(LAYERS))

    placements = [chunks.placement(chunk, 10 * chunk) for chunk in range(len(chunks.manifests))]
    rotary = [rotary_of(layer) for layer in range(LAYERS)]
    return LayerLoader(open_frames, placements, rotary, torch.device("cpu"), 2, depth=2, patience_s=1.0)


def frame_of(chunks: Chunks, chunk: int, layer: int) -> LayerFrame:
    return LayerFrame(0, layer, chunks.frames[chunk][layer])


@pytest.mark.usefixtures("three_threads")
def test_threads_fill_a_layer_together() -> None:
    """In any order: the first chunk's thread is a layer ahead of the last one's."""
    chunks, gate = Chunks([5, 9, 1]), Gate()

    def frames(chunk: int, layer: int) -> LayerFrame:
        if chunk == 2:
            gate(layer)
        return frame_of(chunks, chunk, layer)

    loader = shared_loader(chunks, frames)
    placements = [(chunk, chunks.placement(chunk, 10 * chunk)) for chunk in range(3)]
    for layer in range(LAYERS):
        assert loader.take(layer, 0.01) is None
        gate.event(layer).set()
        loaded = taken(loader, layer)
        key, value = chunks.expected(layer, placements)
        assert torch.equal(loaded.key, key)
        assert torch.equal(loaded.value, value)
        assert loaded.num_bytes == sum(len(frames[layer]) for frames in chunks.frames)
    loader.close()
    assert not any(thread.is_alive() for thread in loader._threads)


@pytest.mark.usefixtures("three_threads")
def test_what_several_threads_lose_in_a_layer_is_named_together() -> None:
    chunks = Chunks([3, 4, 5])

    def frames(chunk: int, layer: int) -> LayerFrame | ChunkLost:
        lost = layer == 1 and chunk != 1
        return ChunkLost(0, layer, "absent") if lost else frame_of(chunks, chunk, layer)

    loader = shared_loader(chunks, frames)
    taken(loader, 0)
    with pytest.raises(LoadFailed) as caught:
        loader.take(1, TIMEOUT_S)
    assert caught.value.keys == {chunks.manifests[0].key, chunks.manifests[2].key}
    loader.close()
    assert not any(thread.is_alive() for thread in loader._threads)


@pytest.mark.usefixtures("three_threads")
def test_a_thread_that_has_lost_its_only_chunk_waits_for_the_others_to_name_it() -> None:
    """Its stream ends with the chunk, and that is no reason to give the other chunks up."""
    chunks, gate = Chunks([3, 4, 5]), Gate()

    def frames(chunk: int, layer: int) -> LayerFrame | ChunkLost:
        if chunk == 1 and layer:
            raise StopIteration
        if chunk == 2:
            gate(layer)
        return ChunkLost(0, layer, "absent") if chunk == 1 else frame_of(chunks, chunk, layer)

    loader = shared_loader(chunks, frames)
    loader._threads[1].join(TIMEOUT_S)
    assert not loader._threads[1].is_alive()
    gate.event(0).set()
    with pytest.raises(LoadFailed) as caught:
        loader.take(0, TIMEOUT_S)
    assert caught.value.keys == {chunks.manifests[1].key}
    gate.event(1).set()
    loader.close()


def test_chunks_lost_in_one_layer_are_named_together() -> None:
    chunks = Chunks([3, 4, 5])

    def frames() -> Frames:
        yield ChunkLost(0, 0, "absent")
        yield LayerFrame(1, 0, chunks.frames[1][0])
        yield ChunkLost(2, 0, "absent")

    loader = loader_of(frames, [chunks.placement(chunk, 10 * chunk) for chunk in range(3)])
    with pytest.raises(LoadFailed) as caught:
        loader.take(0, TIMEOUT_S)
    assert caught.value.keys == {chunks.manifests[0].key, chunks.manifests[2].key}
    assert caught.value.reason.count("absent") == 2
    loader.close()


def test_a_chunk_of_a_silent_shard_is_told_from_one_that_is_not_there() -> None:
    chunks = Chunks([3, 4])

    def frames() -> Frames:
        yield ChunkLost(0, 0, "absent")
        yield ChunkLost(1, 0, "down", is_unanswered=True)

    loader = loader_of(frames, [chunks.placement(chunk, 10 * chunk) for chunk in range(2)])
    with pytest.raises(LoadFailed) as caught:
        loader.take(0, TIMEOUT_S)
    reasons = [reason.partition(":")[0] for reason in caught.value.reason.split("; ")]
    assert reasons == ["chunk_lost", "shard_silent"]
    loader.close()


def test_every_chunk_is_decoded_as_it_was_stored() -> None:
    """Whoever stored them: an engine's codec may have been changed in between."""
    lengths = [6, 9, 7]
    same = {codec: Chunks(lengths, codec=codec) for codec in (Codec.RAW, Codec.INT8, Codec.FP8_SINKS)}
    mixed = list(same.values())

    def frames() -> Iterator[LayerFrame]:
        for layer in range(LAYERS):
            for index, chunks in enumerate(mixed):
                yield LayerFrame(index, layer, chunks.frames[index][layer])

    placements = [chunks.placement(index, 10 * index, 1) for index, chunks in enumerate(mixed)]
    loader = loader_of(frames, placements)
    expected = Chunks(lengths)
    try:
        for layer in range(LAYERS):
            loaded = taken(loader, layer)
            key, value = expected.expected(layer, list(enumerate(placements)))
            assert torch.equal(loaded.key[:5], key[:5])
            assert torch.equal(loaded.value[:5], value[:5])
            for got, exact in ((loaded.key, key), (loaded.value, value)):
                error = (got - exact).norm() / exact.norm()
                assert 1e-4 < float(error) < 0.03
            assert loaded.num_bytes == sum(m.manifests[i].frame_bytes for i, m in enumerate(mixed))
    finally:
        loader.close()


def test_a_chunk_with_damaged_scales_is_lost_alone() -> None:
    chunks = Chunks([6, 4], codec=Codec.INT8)
    damaged = bytearray(chunks.frames[1][0])
    damaged[2 * 4 * HEAD_DIM : 2 * 4 * HEAD_DIM + 2] = b"\xff\xff"
    frames = [LayerFrame(0, 0, chunks.frames[0][0]), LayerFrame(1, 0, memoryview(damaged))]
    loader = loader_of(lambda: iter(frames), [chunks.placement(0, 0), chunks.placement(1, 6)])
    with pytest.raises(LoadFailed, match=r"corrupted: .* at layer 0, a frame has scales") as caught:
        loader.take(0, TIMEOUT_S)
    assert caught.value.keys == {chunks.manifests[1].key}
    loader.close()


def failing(chunks: Chunks, error: Exception) -> Iterator[LayerFrame]:
    """Layer 0 of every chunk, then `error`."""
    for chunk, frames in enumerate(chunks.frames):
        yield LayerFrame(chunk, 0, frames[0])
    raise error


@pytest.mark.parametrize("error", [DeadlineExceeded("too late"), Unavailable("gone")])
@pytest.mark.parametrize("eager", [False, True])
def test_an_error_of_the_store_loses_every_chunk(error: KintsugiError, eager: bool) -> None:
    chunks = Chunks([3, 4])

    def open_frames() -> Frames:
        if eager:
            raise error
        return failing(chunks, error)

    loader = loader_of(open_frames, [chunks.placement(0, 0), chunks.placement(1, 3)])
    if not eager:
        taken(loader, 0)
    with pytest.raises(LoadFailed, match=f"{type(error).__name__}: {error}") as caught:
        loader.take(0 if eager else 1, TIMEOUT_S)
    assert caught.value.keys == {manifest.key for manifest in chunks.manifests}
    loader.close()


def test_a_stream_that_ends_early_loses_every_chunk() -> None:
    chunks = Chunks([3, 4])
    frames = [LayerFrame(0, 0, chunks.frames[0][0])]
    loader = loader_of(lambda: iter(frames), [chunks.placement(0, 0), chunks.placement(1, 3)])
    with pytest.raises(LoadFailed, match="stream_ended: before layer 0 was complete") as caught:
        loader.take(0, TIMEOUT_S)
    assert caught.value.keys == {manifest.key for manifest in chunks.manifests}
    loader.close()


@pytest.mark.usefixtures("three_threads")
def test_a_device_without_memory_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """No thread dies of it, which would print a traceback."""
    chunks = Chunks([3, 4, 5])

    def frames(chunk: int, layer: int) -> LayerFrame:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB."
        )

    loader = shared_loader(chunks, frames)
    with pytest.raises(LoadFailed, match=r"^device_memory: ") as caught:
        loader.take(0, TIMEOUT_S)
    assert caught.value.keys == {manifest.key for manifest in chunks.manifests}
    loader.close()
    (record,) = (record for record in caplog.records if record.name == "kintsugi.fusor.loader")
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert record.getMessage() == (
        "Failed to load chunks, which are computed instead: device_memory: CUDA out of memory. Tried to "
        "allocate 2.00 GiB; lower gpu_memory_utilization, so that vLLM leaves more to passes"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("problem", ["short frame", "wrong order", "foreign error"])
def test_a_defect_fails_the_load_rather_than_hang_it(problem: str) -> None:
    """The thread dies with its traceback; whoever waits for it is told."""
    chunks = Chunks([3])
    frames: Iterator[LayerFrame] = {
        "short frame": iter([LayerFrame(0, 0, chunks.frames[0][0][:-4])]),
        "wrong order": iter([LayerFrame(0, 1, chunks.frames[0][1])]),
        "foreign error": failing(chunks, RuntimeError("a bug")),
    }[problem]
    loader = loader_of(lambda: frames, [chunks.placement(0, 0)])
    if problem == "foreign error":
        taken(loader, 0)
    with pytest.raises(LoadFailed, match="defect") as caught:
        taken(loader, 1 if problem == "foreign error" else 0)
    assert caught.value.keys == {chunks.manifests[0].key}
    loader.close()
