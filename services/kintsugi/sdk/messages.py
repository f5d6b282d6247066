"""Converts the SDK's types to and from the gateway's messages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.sdk.types import (
    Answer,
    Delta,
    DocumentChunk,
    ErasedPlace,
    ErasureReceipt,
    Key,
    PlacedSegment,
    Plain,
    PutChunk,
    Sampling,
    Segment,
    ServedModel,
    StoredChunk,
    Tokens,
    Usage,
)

BATCH_CHUNKS = 128
BATCH_BYTES = 2 << 20
"""Maximum size of one `PutChunks` call, because a gateway holds it in memory."""

_STATES = {
    pb.PUT_STATE_PRESENT: "present",
    pb.PUT_STATE_STORED: "stored",
    pb.PUT_STATE_ACCEPTED: "accepted",
    pb.PUT_STATE_FAILED: "failed",
}


def segment_to_wire(segment: Segment, where: str) -> pb.Segment:
    """Convert a segment. Raises `InvalidField`."""
    match segment:
        case str():
            return pb.Segment(text=segment)
        case Plain():
            return pb.Segment(text=segment.text, plain=True)
        case Tokens():
            return pb.Segment(tokens=pb.TokenIds(ids=segment.ids))
        case Key():
            return pb.Segment(chunk_key=segment.hex)
        case PutChunk():
            return pb.Segment(chunk_key=segment.key)
        case DocumentChunk():
            return pb.Segment(document=pb.DocumentChunk(**dataclasses.asdict(segment)))
        case _:
            raise InvalidField(
                where,
                f"a {type(segment).__name__} is not a segment; give a string, or one of kintsugi.sdk's types",
            )


def segments_to_wire(segments: Iterable[Segment]) -> list[pb.Segment]:
    if isinstance(segments, str):
        raise InvalidField("segments", "is one string; give a list of chunks")
    return [segment_to_wire(segment, f"segments[{index}]") for index, segment in enumerate(segments)]


def content_to_wire(content: str | Tokens | Sequence[int]) -> pb.Content:
    if isinstance(content, str):
        return pb.Content(text=content)
    ids = content.ids if isinstance(content, Tokens) else content
    return pb.Content(tokens=pb.TokenIds(ids=ids))


def sampling_to_wire(sampling: Sampling) -> pb.Sampling:
    values = {
        field.name: value
        for field in dataclasses.fields(sampling)
        if field.name != "extra" and (value := getattr(sampling, field.name)) is not None
    }
    extra = json.dumps(dict(sampling.extra)) if sampling.extra else ""
    return pb.Sampling(**values, extra_json=extra)


def batches(chunks: Iterable[str | Tokens | Sequence[int]]) -> Iterator[list[pb.Content]]:
    """Group chunks into calls of bounded size. A single chunk may exceed the bound."""
    batch: list[pb.Content] = []
    size = 0
    for chunk in chunks:
        content = content_to_wire(chunk)
        if batch and (len(batch) == BATCH_CHUNKS or size + content.ByteSize() > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(content)
        size += content.ByteSize()
    if batch:
        yield batch


def put_of_wire(result: pb.PutResult) -> PutChunk:
    state = _STATES.get(result.state, "unknown")
    return PutChunk(result.key, result.num_tokens, result.new, state, result.reason)


def model_of_wire(model: pb.ServedModel) -> ServedModel:
    return ServedModel(model.id, tuple(model.aliases), model.max_model_len, model.fingerprint, model.blending)


def chunk_of_wire(chunk: pb.ChunkInfo) -> StoredChunk:
    names = (field.name for field in dataclasses.fields(StoredChunk))
    return StoredChunk(**{name: getattr(chunk, name) for name in names})


class Assembled:
    """Assembles an answer from its messages."""

    def __init__(self) -> None:
        self._resolved = pb.Resolved()
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._finished: pb.Finished | None = None

    def take(self, message: pb.GenerateResponse) -> Delta | None:
        """Add a message and return its part of the answer, if any."""
        kind = message.WhichOneof("event")
        if kind == "resolved":
            self._resolved = message.resolved
        elif kind == "finished":
            self._finished = message.finished
        elif kind == "delta":
            self._texts.append(message.delta.text)
            self._token_ids += message.delta.token_ids
            return Delta(message.delta.text, tuple(message.delta.token_ids))
        return None

    def answer(self) -> Answer:
        """Return the whole answer. Raises `Unavailable` if its last message is missing."""
        if self._finished is None:
            raise Unavailable("the answer ended without its last message; send the request again")
        finished, usage = self._finished, self._finished.usage
        return Answer(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=finished.finish_reason,
            outcome=finished.plan.outcome,
            reason=finished.plan.reason,
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            ttft_ms=finished.ttft_ms,
            request_id=self._resolved.request_id,
            segments=tuple(PlacedSegment(s.start, s.end, s.key) for s in self._resolved.segments),
            accounting={name: _value(value) for name, value in finished.accounting.fields.items()},
        )


def _value(value: Any) -> Any:
    """Convert a `google.protobuf.Value` to a JSON value. Whole numbers become integers."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {name: _value(inner) for name, inner in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_value(inner) for inner in value.list_value.values]
    if kind == "number_value" and value.number_value.is_integer():
        return int(value.number_value)
    return None if kind == "null_value" else getattr(value, kind)


def receipt_of_wire(wire: pb.ErasureReceipt, deleted: bool | None = None) -> ErasureReceipt:
    """Convert a receipt. ``deleted`` None: true if any place held data."""
    places = tuple(ErasedPlace(one.place, one.items, one.size_bytes, one.gone_at_s) for one in wire.places)
    there = any(place.items for place in places) if deleted is None else deleted
    return ErasureReceipt(wire.namespace, there, wire.asked_at_s, wire.gone_at_s, places)
