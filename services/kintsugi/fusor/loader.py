"""Loads layer i + 1 while layer i is computed, a bounded number of layers ahead of the device.

Threads do everything that does not need the model: wait for the store, move bytes to the device, decode them,
select the wanted tokens, and rotate keys to their positions (`fusor.staging`). The blend pass receives
finished layers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kintsugi.core.errors import Corrupted, KintsugiError
from kintsugi.core.exchange import ChunkLost, LayerFrame
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.plan import BlendPlan
from kintsugi.core.spaces import ChunkKey
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.staging import ChunkRows, LayerStaging, Staging

log = logging.getLogger(__name__)

PREFETCH_LAYERS = 4
"""Number of layers that loading may run ahead of computing. Bounds the host's memory per pass."""
CLOSE_TIMEOUT_S = 0.1
"""How long `close` waits for the threads. The engine's thread calls it while every request waits. A loader
thread that the store blocks for longer ends later, and owns everything that it still uses."""


class LoadFailed(Exception):
    """Some chunks cannot be loaded. The chunks with these `keys` count as missed."""

    def __init__(self, keys: frozenset[ChunkKey], reason: str) -> None:
        super().__init__(reason)
        self.keys = keys
        self.reason = reason


def describe_shortage(error: torch.OutOfMemoryError) -> str:
    """Return `device_memory: detail` with a remedy, without torch's description of its allocator."""
    what = ". ".join(str(error).split(". ")[:2]).rstrip(".")
    return f"device_memory: {what}; lower gpu_memory_utilization, so that vLLM leaves more to passes"


@dataclass(frozen=True)
class LoadedLayer:
    """One layer of all placements, concatenated: K after RoPE and V, `[rows, heads, head_dim]`."""

    layer: int
    key: Tensor
    value: Tensor
    num_bytes: int
    started_s: float
    finished_s: float
    on_device: torch.cuda.Event | None
    """Recorded after the copy and the rotation were queued on the loader's stream; None on a CPU."""

    def without_kv(self) -> LoadedLayer:
        """Return the layer without K and V, to free their memory."""
        nothing = torch.empty(0)
        return replace(self, key=nothing, value=nothing)


def placements_of(
    plan: BlendPlan, manifests: Mapping[ChunkKey, ChunkManifest], start: int, end: int
) -> list[ChunkRows]:
    """Return the placement of each hit's tokens inside the region `[start, end)` of the prompt."""
    placements = []
    for hit in plan.hits:
        first, last = max(hit.start, start), min(hit.end, end)
        placements.append(ChunkRows(manifests[hit.key], first - hit.start, torch.arange(first, last)))
    return placements


Frames = Iterator[LayerFrame | ChunkLost]


OpenFrames = Callable[[slice], Frames]
"""Opens the stream of a slice of the placements. Chunks are numbered from 0 within the slice."""


@dataclass
class _Filling:
    """A layer that threads are filling."""

    staging: LayerStaging
    shares_left: int
    started_s: float
    num_bytes: int = 0
    lost: dict[ChunkKey, str] = field(default_factory=dict)


class LayerLoader:
    """Pulls layer-major streams of frames and hands out finished layers in order.

    Each thread streams a share of the chunks; the last one to fill its part of a layer finishes the layer.
    `close` is idempotent. It returns when the threads have released their streams, or after
    `CLOSE_TIMEOUT_S`.
    """

    def __init__(
        self,
        open_frames: OpenFrames,
        placements: Sequence[ChunkRows],
        rotary_of_layer: Sequence[Rotary | None],
        device: torch.device,
        num_heads: int,
        depth: int,
        patience_s: float,
    ) -> None:
        """`num_heads`: the largest number of KV heads that this rank loads of a layer; `depth`: how many
        layers loading may be ahead of `take`, and of the device."""
        self.patience_s = patience_s
        self._open_frames = open_frames
        self._placements = placements
        self._rotary_of_layer = rotary_of_layer
        self._depth = depth
        self._staging = Staging(placements, num_heads, device)
        self._changed = threading.Condition()
        self._filling: dict[int, _Filling] = {}
        self._done: dict[int, LoadedLayer] = {}
        self._failure: LoadFailed | None = None
        self._taken: list[torch.cuda.Event | None] = []
        """For each layer that was taken, an event after the work launched before it: all earlier layers."""
        self._closed = False
        num_threads = self._staging.threads
        self._threads = [
            threading.Thread(
                target=self._run, args=(slice(first, None, num_threads),), name="kintsugi-loader", daemon=True
            )
            for first in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, layer: int, timeout_s: float) -> LoadedLayer | None:
        """Return the next layer; None if it does not arrive within `timeout_s`. Raises `LoadFailed`."""
        assert layer == len(self._taken)
        with self._changed:
            self._changed.wait_for(lambda: layer in self._done or self._failure, timeout_s)
            if layer not in self._done:
                if self._failure is not None:
                    raise self._failure
                return None
            loaded = self._done.pop(layer)
            self._taken.append(self._staging.mark())
            self._changed.notify_all()
        self._staging.consume(loaded.key, loaded.value, loaded.on_device)
        return loaded

    def zeros(self, layer: int) -> LoadedLayer:
        """Return zeros in place of a lost layer."""
        now = time.perf_counter()
        return LoadedLayer(layer, *self._staging.zeros(layer), 0, now, now, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.perf_counter() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.perf_counter()))

    def _run(self, share: slice) -> None:
        try:
            self._pull(share)
        except LoadFailed as failure:
            self._fail(failure)
        except KintsugiError as error:
            self._fail(LoadFailed(self._every_key(), f"{type(error).__name__}: {error}"))
        except torch.OutOfMemoryError as error:
            reason = describe_shortage(error)
            if self._fail(LoadFailed(self._every_key(), reason)):
                log.warning("Failed to load chunks, which are computed instead: %s", reason)
        except BaseException as defect:
            # Pass the error on to the waiting pass; raising it also logs the traceback.
            self._fail(LoadFailed(self._every_key(), f"defect: in loading, {defect!r}"))
            raise

    def _fail(self, failure: LoadFailed) -> bool:
        """Note a failure. Returns whether it is the first one of these threads."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
            return self._failure is failure

    def _pull(self, share: slice) -> None:
        frames = self._open_frames(share)
        indices = range(len(self._placements))[share]
        try:
            with self._staging.on_stream():
                for layer in range(len(self._rotary_of_layer)):
                    filling = self._begin(layer, share)
                    if filling is None:
                        return
                    is_whole = self._fill(layer, filling, indices, frames)
                    self._end(layer, filling)
                    if not is_whole:
                        return  # the thread that completes this layer reports the lost chunks
        finally:
            close = getattr(frames, "close", None)
            if close is not None:
                close()

    def _every_key(self) -> frozenset[ChunkKey]:
        return frozenset(placement.manifest.key for placement in self._placements)

    def _begin(self, layer: int, share: slice) -> _Filling | None:
        """Wait for room. Returns the layer to fill; None if the load is over.

        The host launches layers long before a GPU computes them, and their K and V stay in memory until then.
        So the layer `depth` before this one must have been taken, and the device must have finished the work
        before it. The first share's thread allocates the layer outside the lock: pinned memory can take
        milliseconds, and the engine's thread must not wait for it.
        """
        is_first = share.start == 0
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_over
                    or (layer < len(self._taken) + self._depth if is_first else layer in self._filling)
                )
            )
            if self._is_over or not is_first:
                return None if self._is_over else self._filling[layer]
            launched = self._taken[layer - self._depth] if layer >= self._depth else None
        if launched is not None:
            launched.synchronize()
        filling = _Filling(self._staging.begin_layer(layer), len(self._threads), time.perf_counter())
        with self._changed:
            self._filling[layer] = filling
            self._changed.notify_all()
        return filling

    @property
    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _fill(self, layer: int, filling: _Filling, indices: range, frames: Frames) -> bool:
        """Read this share's frames of a layer, to the end even if some are lost: chunks are often lost
        together, and a pass restarts only once. Returns False if some are lost, because the stream has no
        later frames of lost chunks."""
        num_bytes, lost = 0, {}
        missing = set(range(len(indices)))
        while missing:
            frame = next(frames, None)
            if frame is None:
                raise LoadFailed(self._every_key(), f"stream_ended: before layer {layer} was complete")
            index = indices[frame.chunk]  # the chunks of one shard come before those of the next
            key_lost = self._placements[index].manifest.key
            if isinstance(frame, ChunkLost):
                lost[key_lost] = _lost_because(frame, key_lost, f"at layer {frame.layer}")
                missing.discard(frame.chunk)
                continue
            assert frame.layer == layer, "stores stream layer-major"
            missing.remove(frame.chunk)
            try:
                filling.staging.put(index, frame.data)
            except Corrupted as error:
                lost[key_lost] = f"corrupted: {key_lost} at layer {layer}, {error}"
                continue
            num_bytes += len(frame.data)
        with self._changed:
            filling.num_bytes += num_bytes
            filling.lost |= lost
        return not lost

    def _end(self, layer: int, filling: _Filling) -> None:
        """Note that a share is complete; the last one finishes the layer."""
        with self._changed:
            filling.shares_left -= 1
            if filling.shares_left:
                return
            del self._filling[layer]
        if filling.lost:
            raise _all_lost(filling.lost)
        key, value, on_device = filling.staging.finish(self._rotary_of_layer[layer])
        loaded = LoadedLayer(
            layer, key, value, filling.num_bytes, filling.started_s, time.perf_counter(), on_device
        )
        with self._changed:
            self._done[layer] = loaded
            self._changed.notify_all()


def _lost_because(frame: ChunkLost, key: ChunkKey, where: str) -> str:
    return f"{'shard_silent' if frame.is_unanswered else 'chunk_lost'}: {key} {where}, {frame.reason}"


def _all_lost(lost: Mapping[ChunkKey, str]) -> LoadFailed:
    return LoadFailed(frozenset(lost), "; ".join(lost.values()))
