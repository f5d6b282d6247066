"""Chunks of a `ToyModel` as a store would hold them, and streams of their frames that tests can hold up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kintsugi.core.exchange import ChunkLost, LayerFrame
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout, digests_of
from kintsugi.core.plan import BlendPlan, ChunkHit, Selection
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.fusor.codecs import encode_frame
from kintsugi.fusor.loader import Frames, LayerLoader, placements_of
from tests.fakes.toy_stack import HEAD_DIM, ToyModel

SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "toy")


def manifest_of(
    token_ids: Sequence[int],
    layout: KVLayout,
    frames: Sequence[memoryview],
    codec: Codec = Codec.RAW,
) -> ChunkManifest:
    head_bytes = layout.head_bytes(codec, len(token_ids))
    digests = [digests_of(frame, head_bytes) for frame in frames]
    return ChunkManifest(
        key=ChunkKey.of(SPACE, token_ids),
        space_digest=SPACE.digest,
        fingerprint=SPACE.fingerprint,
        namespace=SPACE.namespace,
        num_tokens=len(token_ids),
        layout=layout,
        codec=codec,
        anchors=(),
        digests=b"".join(digests),
    )


@dataclass
class ToyPrompt:
    """A prompt with chunks at `spans`, each prefilled alone behind the first `prefix` tokens."""

    model: ToyModel
    token_ids: Tensor
    spans: tuple[tuple[int, int], ...]
    prefix: int = 2
    lost: frozenset[tuple[int, ChunkKey]] = frozenset()
    """(layer, key) where the stream says `ChunkLost`."""
    gate: Callable[[int], None] = lambda layer: None
    """Called by the stream before it yields anything of a layer: a test may block there."""
    opened: list[BlendPlan] = field(default_factory=list)
    loaders: list[LayerLoader] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = KVLayout.uniform(self.model.layers, self.model.kv_heads, HEAD_DIM, "float32")
        self.frames: dict[ChunkKey, list[memoryview]] = {}
        self.manifests: dict[ChunkKey, ChunkManifest] = {}
        self.hits: list[ChunkHit] = []
        self.isolated: list[tuple[Tensor, Tensor]] = []
        """Per span: K before RoPE and V, `[layers, tokens, kv_heads, head_dim]`, as stored: fp32."""
        for start, end in self.spans:
            run = self.model.dense(torch.cat((self.token_ids[: self.prefix], self.token_ids[start:end])))
            raw = run.keys_before_rope[:, self.prefix :].float()
            value = run.values[:, self.prefix :].float()
            frames = [encode_frame(raw[i], value[i], Codec.RAW) for i in range(self.model.layers)]
            manifest = manifest_of(self.token_ids[start:end].tolist(), layout, frames)
            self.frames[manifest.key], self.manifests[manifest.key] = frames, manifest
            self.hits.append(ChunkHit(start, end, manifest.key))
            self.isolated.append((raw, value))

    def plan(
        self,
        ratio: float,
        selector: SelectorName = SelectorName.HKVD,
        check_layer: int = 1,
        query_layers: tuple[int, ...] = (),
        exact_end: int = 0,
    ) -> BlendPlan:
        selection = Selection(ratio, selector, check_layer, query_layers)
        return BlendPlan(tuple(self.hits), selection, exact_end)

    def open_loader(self, plan: BlendPlan, start: int, end: int, depth: int = 2) -> LayerLoader:
        self.opened.append(plan)
        loader = LayerLoader(
            lambda share: self.stream(plan, share),
            placements_of(plan, self.manifests, start, end),
            [self.model.rotary] * self.model.layers,
            torch.device("cpu"),
            self.model.kv_heads,
            depth=depth,
            patience_s=20.0,
        )
        self.loaders.append(loader)
        return loader

    def stream(self, plan: BlendPlan, share: slice = slice(None)) -> Frames:
        return self._stream([hit.key for hit in plan.hits[share]], 0)

    def _stream(
        self, keys: Sequence[ChunkKey], first_layer: int
    ) -> Generator[LayerFrame | ChunkLost, None, None]:
        gone: set[ChunkKey] = set()
        for layer in range(first_layer, self.model.layers):
            self.gate(layer)
            for chunk, key in enumerate(keys):
                if (layer, key) in self.lost:
                    gone.add(key)
                    yield ChunkLost(chunk, layer, "the test lost it")
                elif key not in gone:
                    yield LayerFrame(chunk, layer, self.frames[key][layer])

    def loaded(self, layer: int) -> tuple[Tensor, Tensor]:
        """What is loaded at a layer in prompt order, after RoPE; zero outside the hits."""
        shape = (len(self.token_ids), self.model.kv_heads, HEAD_DIM)
        key, value = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        for (start, end), (raw, stored) in zip(self.spans, self.isolated, strict=True):
            key[start:end] = self.model.rotate(raw[layer].double(), torch.arange(start, end))
            value[start:end] = stored[layer]
        return key, value


class Gate:
    """Lets a stream through layer by layer."""

    def __init__(self) -> None:
        self._events: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def event(self, layer: int) -> threading.Event:
        with self._lock:
            return self._events.setdefault(layer, threading.Event())

    def __call__(self, layer: int) -> None:
        assert self.event(layer).wait(20), "the test never opened the gate"
