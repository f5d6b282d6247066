"""Loads layer i + 1 while layer i is computed: one thread, a bounded number of layers ahead.

The thread does everything that needs no model: wait for the store, move bytes to the device, decode them, cut
them to the wanted tokens, and rotate keys to their positions. The blend pass receives finished layers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.core.errors import Corrupted, KintsugiError
from kintsugi.core.layout import ChunkLost, ChunkManifest, LayerFrame
from kintsugi.core.plan import BlendPlan
from kintsugi.core.spaces import ChunkKey
from kintsugi.fusor.codecs import decode_frame
from kintsugi.fusor.rope import Rotary

CLOSE_TIMEOUT_S = 0.1
"""How long `close` waits for the thread. The engine's thread calls it while every request waits; a loader
thread that the store blocks for longer ends by itself, and owns everything that it still touches."""


class LoadFailed(Exception):
    """Some chunks cannot be loaded: treat the chunks with these `keys` as missed."""

    def __init__(self, keys: frozenset[ChunkKey], reason: str) -> None:
        super().__init__(reason)
        self.keys = keys
        self.reason = reason


@dataclass(frozen=True)
class ChunkPlacement:
    """One chunk's stored tokens and where they go in the prompt."""

    manifest: ChunkManifest
    first_row: int
    """First stored token to load; the engine's prefix cache already holds those before it."""
    positions: Tensor
    """int64 `[rows]`: prompt positions of the stored tokens `[first_row, first_row + rows)`."""


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


def placements_of(
    plan: BlendPlan, manifests: Mapping[ChunkKey, ChunkManifest], start: int, end: int
) -> list[ChunkPlacement]:
    """The placement of each hit's tokens that lie inside the region `[start, end)` of the prompt."""
    placements = []
    for hit in plan.hits:
        first, last = max(hit.start, start), min(hit.end, end)
        placements.append(ChunkPlacement(manifests[hit.key], first - hit.start, torch.arange(first, last)))
    return placements


Frames = Iterator[LayerFrame | ChunkLost]


class LayerLoader:
    """Pulls a layer-major stream of frames and hands out finished layers in order.

    `close` is idempotent. It returns when the thread has released the stream, or after `CLOSE_TIMEOUT_S`.
    """

    def __init__(
        self,
        open_frames: Callable[[], Frames],
        placements: Sequence[ChunkPlacement],
        rotary_of_layer: Sequence[Rotary],
        device: torch.device,
        depth: int,
        patience_s: float,
    ) -> None:
        self.patience_s = patience_s
        self._open_frames = open_frames
        self._placements = placements
        self._rotary_of_layer = rotary_of_layer
        self._device = device
        self._positions = torch.cat([placement.positions for placement in placements])
        self._slots = threading.Semaphore(depth)
        self._done: queue.SimpleQueue[LoadedLayer | LoadFailed] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="kintsugi-loader", daemon=True)
        self._thread.start()

    def take(self, layer: int, timeout_s: float) -> LoadedLayer | None:
        """Return the next layer, or None if it does not arrive within `timeout_s`. Raises `LoadFailed`."""
        try:
            item = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, LoadFailed):
            raise item
        assert item.layer == layer
        self._slots.release()
        if item.on_device is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(item.on_device)
            for tensor in (item.key, item.value):
                tensor.record_stream(compute)
        return item

    def close(self) -> None:
        self._closed.set()
        self._slots.release()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._pull()
        except LoadFailed as failure:
            self._done.put(failure)
        except KintsugiError as error:
            self._done.put(LoadFailed(self._every_key(), f"{type(error).__name__}: {error}"))
        except BaseException as defect:
            # The waiting pass must learn that no layer will come; raising also logs the traceback.
            self._done.put(LoadFailed(self._every_key(), f"defect: in loading, {defect!r}"))
            raise

    def _pull(self) -> None:
        frames = self._open_frames()
        try:
            with self._on_stream():
                for layer in range(len(self._rotary_of_layer)):
                    self._slots.acquire()
                    if self._closed.is_set():
                        return
                    self._done.put(self._load(layer, frames))
        finally:
            close = getattr(frames, "close", None)
            if close is not None:
                close()

    def _every_key(self) -> frozenset[ChunkKey]:
        return frozenset(placement.manifest.key for placement in self._placements)

    def _on_stream(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _load(self, layer: int, frames: Frames) -> LoadedLayer:
        started, num_bytes = time.perf_counter(), 0
        keys: list[Tensor] = []
        values: list[Tensor] = []
        lost: dict[ChunkKey, str] = {}
        for expected, placement in enumerate(self._placements):
            frame = next(frames, None)
            if frame is None:
                raise LoadFailed(self._every_key(), f"stream_ended: before layer {layer} was complete")
            if isinstance(frame, ChunkLost):
                # Read the layer to its end: chunks are often lost together, and a pass restarts only once.
                key_lost = self._placements[frame.chunk].manifest.key
                lost[key_lost] = f"chunk_lost: {key_lost} at layer {frame.layer}, {frame.reason}"
                continue
            assert (frame.layer, frame.chunk) == (layer, expected), "stores stream layer-major, in key order"
            try:
                key, value = self._decode(placement, frame)
            except Corrupted as error:
                lost[placement.manifest.key] = (
                    f"corrupted: {placement.manifest.key} at layer {layer}, {error}"
                )
                continue
            keys.append(key)
            values.append(value)
            num_bytes += len(frame.data)
        if lost:
            raise LoadFailed(frozenset(lost), "; ".join(lost.values()))
        key, value = torch.cat(keys), torch.cat(values)
        key = self._rotary_of_layer[layer].rotate(key, self._positions)
        on_device = None if self._stream is None else self._stream.record_event()
        return LoadedLayer(layer, key, value, num_bytes, started, time.perf_counter(), on_device)

    def _decode(self, placement: ChunkPlacement, frame: LayerFrame) -> tuple[Tensor, Tensor]:
        manifest = placement.manifest
        rows = slice(placement.first_row, placement.first_row + len(placement.positions))
        return decode_frame(
            frame.data, manifest.layout, manifest.codec, manifest.num_tokens, rows, self._device
        )
