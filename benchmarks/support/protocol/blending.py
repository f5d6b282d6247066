"""One prompt under full prefill and under blends: KL, agreement and answers, with the fusor's passes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.support.protocol.decoder import KV, Decoder, PlainStack
from kintsugi.core.exchange import ChunkLost, LayerFrame
from kintsugi.core.layout import ChunkManifest, Codec, digests_of
from kintsugi.core.plan import BlendPlan, ChunkHit, RagPrompt, Selection
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.fusor.blend import BlendPass, PassRegion
from kintsugi.fusor.codecs import encode_frame
from kintsugi.fusor.control.cost import PassWorkload, configuration_cost
from kintsugi.fusor.loader import PREFETCH_LAYERS, LayerLoader, placements_of
from kintsugi.fusor.question import QuestionPass
from kintsugi.fusor.sliced import PassStatus

SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "protocol")
CODEC = Codec.INT8
UNIT_TOKENS_MAX = 4096
STEPS_MAX = 1_000_000


@dataclass(frozen=True)
class FullRun:
    """A prompt's full prefill and the greedy answer that follows."""

    answer: tuple[int, ...]
    log_probs: Tensor
    """fp32 `[answer tokens, vocabulary]`."""


@dataclass(frozen=True)
class SavedChunk:
    """A chunk as the store holds it."""

    manifest: ChunkManifest
    frames: tuple[memoryview, ...]


@dataclass(frozen=True)
class Blended:
    """How a blend differs from full prefill along its answer."""

    kl: float
    """Nats per token."""
    agreement: float
    """Share of tokens with the same most likely token."""
    cost: float
    """Token-layers ÷ those of a full prefill, as the pass counted them."""
    answer: tuple[int, ...]
    """The blend's own greedy answer."""


def save(decoder: Decoder, token_ids: Sequence[int], lead: Sequence[int], kv: KV) -> SavedChunk:
    """Encode a chunk's KV. `lead`: what it was prefilled after, which tells copies apart."""
    frames = tuple(
        encode_frame(key.bfloat16(), value.bfloat16(), CODEC)
        for key, value in zip(kv.key, kv.value, strict=True)
    )
    head_bytes = decoder.layout.head_bytes(CODEC, len(token_ids))
    digests = b"".join(digests_of(frame, head_bytes) for frame in frames)
    key = ChunkKey.of(SPACE, [len(lead), *lead, *token_ids])
    manifest = ChunkManifest(
        key=key,
        space_digest=SPACE.digest,
        fingerprint=SPACE.fingerprint,
        namespace=SPACE.namespace,
        num_tokens=len(token_ids),
        layout=decoder.layout,
        codec=CODEC,
        anchors=(),
        digests=digests,
    )
    return SavedChunk(manifest, frames)


@torch.inference_mode()
def prefill_fully(decoder: Decoder, prompt: RagPrompt, answer_tokens_max: int) -> tuple[FullRun, PlainStack]:
    """Answer greedily, up to and including the first stop token. Returns the cache, too."""
    ids = torch.tensor(prompt.token_ids)
    stack = PlainStack(decoder, len(ids) + answer_tokens_max)
    state, answer, rows = stack.forward(ids, 0)[-1:], list[int](), []
    while True:
        rows.append(decoder.logits(state)[0].log_softmax(-1))
        answer.append(int(rows[-1].argmax()))
        if answer[-1] in decoder.stops or len(answer) == answer_tokens_max:
            return FullRun(tuple(answer), torch.stack(rows)), stack
        state = stack.forward(torch.tensor(answer[-1:]), len(ids) + len(answer) - 1)


class Blender:
    """Blends one prompt from the copies of its chunks."""

    def __init__(self, decoder: Decoder, prompt: RagPrompt, full: FullRun, answer_tokens_max: int) -> None:
        self._decoder, self._full, self._answer_tokens_max = decoder, full, answer_tokens_max
        self._ids = torch.tensor(prompt.token_ids)
        self._spans = prompt.spans

    @property
    def workload(self) -> PassWorkload:
        """Without the last token, which the blend leaves to the engine."""
        exact = self._spans[1].start if len(self._spans) > 1 else self._spans[0].end
        hit = sum(span.num_tokens for span in self._spans)
        other = len(self._ids) - 1 - hit
        share = self._decoder.projection_share
        return PassWorkload(hit, other, self._decoder.num_layers, share, exact - self._spans[0].start)

    def selection_at(self, cost: float, selection: Selection) -> Selection:
        """Return `selection` with the ratio that costs `cost` on this prompt; 0 if even that costs more."""
        low, high = 0.0, 0.999
        for _ in range(20):
            middle = (low + high) / 2
            tried = Selection(middle, selection.selector, selection.check_layer, selection.query_layers)
            low, high = (middle, high) if configuration_cost(tried, self.workload) <= cost else (low, middle)
        return Selection(low, selection.selector, selection.check_layer, selection.query_layers)

    @torch.inference_mode()
    def blend(self, chunks: Sequence[SavedChunk], selection: Selection) -> Blended:
        """Blend from `chunks`, the first of which is the plain copy, exact in its place."""
        last = len(self._ids) - 1
        answer = self._full.answer
        stack = PlainStack(self._decoder, last + self._answer_tokens_max)
        hits = self._hits(chunks)
        ranges = tuple(range(span.start, span.end) for span in self._spans)
        exact_end = hits[1].start if len(hits) > 1 else last + 1
        plan = BlendPlan(hits, selection, exact_end, ranges)
        work = BlendPass(
            PassRegion(self._ids[:last], 0, int(self._ids[last])),
            plan,
            stack,
            lambda plan: self._open(plan, chunks, last),
            UNIT_TOKENS_MAX,
        )
        for _ in range(STEPS_MAX):
            if work.status is not PassStatus.RUNNING:
                break
            work.advance(float("inf"))
        work.close()
        assert work.status is PassStatus.DONE, work.tally.failure
        cost = work.tally.token_layers / (self._decoder.num_layers * last)
        forced = torch.cat((self._ids[last:], torch.tensor(answer[:-1], dtype=torch.int64)))
        log_probs = self._decoder.logits(stack.forward(forced, last)).log_softmax(-1)
        full = self._full.log_probs
        kl = (full.exp() * (full - log_probs)).sum(-1).mean()
        agreement = (full.argmax(-1) == log_probs.argmax(-1)).float().mean()
        return Blended(float(kl), float(agreement), cost, self._answer(stack, log_probs.argmax(-1).tolist()))

    def _answer(self, stack: PlainStack, best: Sequence[int]) -> tuple[int, ...]:
        """Return the greedy answer. `best`: the most likely tokens along full prefill's answer, which is the
        blend's, too, up to the first difference."""
        full, last = self._full.answer, len(self._ids) - 1
        same = next(
            (at for at, (one, other) in enumerate(zip(best, full, strict=True)) if one != other), None
        )
        if same is None:
            return full
        answer = [*full[:same], best[same]]
        while answer[-1] not in self._decoder.stops and len(answer) < self._answer_tokens_max:
            state = stack.forward(torch.tensor(answer[-1:]), last + len(answer))
            answer.append(int(self._decoder.logits(state)[0].argmax()))
        return tuple(answer)

    @torch.inference_mode()
    def signals(self, chunks: Sequence[SavedChunk], full: PlainStack) -> dict[str, npt.NDArray[np.float32]]:
        """Return the signals for a selection, each `[layers, candidates]`: the question's attention at
        every layer in full KV reuse, and the squared distance of loaded K and V from the full prefill's."""
        hits = self._hits(chunks)
        last, layers = len(self._ids) - 1, self._decoder.num_layers
        loader = self._open(BlendPlan(hits, Selection(0.0)), chunks, last)
        positions = torch.cat([torch.arange(hit.start, hit.end) for hit in hits])
        is_other = torch.ones(last + 1, dtype=torch.bool)
        is_other[positions] = False
        others = is_other.nonzero()[:, 0]
        stack = PlainStack(self._decoder, last + 1)
        masses, distances = [], []
        question = QuestionPass(
            stack, positions, others, stack.embed(self._ids[others], others), tuple(range(layers)),
            UNIT_TOKENS_MAX, hits[1].start, hits[-1].end, (),
        )  # fmt: skip
        first = hits[0].num_tokens
        for layer in range(layers):
            loaded = None
            while loaded is None:
                loaded = loader.take(layer, 1.0)
            before = question.attention.clone()
            for _ in question.pass_layer(layer, loaded):
                pass
            masses.append((question.attention - before)[first:])
            key, value = full.keys[layer, positions], full.values[layer, positions]
            gap = (loaded.key - key).square().sum((1, 2)) + (loaded.value - value).square().sum((1, 2))
            distances.append(gap[first:])
        loader.close()
        return {"mass": torch.stack(masses).numpy(), "distance": torch.stack(distances).numpy()}

    def _hits(self, chunks: Sequence[SavedChunk]) -> tuple[ChunkHit, ...]:
        return tuple(
            ChunkHit(span.start, span.end, chunk.manifest.key)
            for span, chunk in zip(self._spans, chunks, strict=True)
        )

    def _open(self, plan: BlendPlan, chunks: Sequence[SavedChunk], end: int) -> LayerLoader:
        manifests = {chunk.manifest.key: chunk.manifest for chunk in chunks}
        frames = {chunk.manifest.key: chunk.frames for chunk in chunks}

        def stream(share: slice) -> Generator[LayerFrame | ChunkLost, None, None]:
            for layer in range(self._decoder.num_layers):
                for number, hit in enumerate(plan.hits[share]):
                    yield LayerFrame(number, layer, frames[hit.key][layer])

        return LayerLoader(
            stream,
            placements_of(plan, manifests, 0, end),
            [self._decoder.rotary] * self._decoder.num_layers,
            torch.device("cpu"),
            self._decoder.kv_heads,
            PREFETCH_LAYERS,
            patience_s=600.0,
        )
