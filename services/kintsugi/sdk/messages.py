"""Converts the SDK's types to and from the gateway's messages. `make` converts every value of a caller."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.schema import check_flag, check_items, check_number, check_text, check_whole
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

Made = TypeVar("Made", bound=Message)

_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
"""The numbers that a field holds, by its type."""
_STATES = {
    pb.PUT_STATE_PRESENT: "present",
    pb.PUT_STATE_STORED: "stored",
    pb.PUT_STATE_ACCEPTED: "accepted",
    pb.PUT_STATE_FAILED: "failed",
}


def make(kind: type[Made], where: str = "", **values: Any) -> Made:
    """Make a message from a caller's values; None leaves a field unset. ``where``: the message's field in the
    caller's request. Raises `InvalidField`, which names the field."""
    fields = kind.DESCRIPTOR.fields_by_name
    checked = {
        name: _check(fields[name], value, f"{where}.{name}" if where else name)
        for name, value in values.items()
        if value is not None
    }
    return kind(**checked)


def _check(field: Any, value: Any, where: str) -> Any:
    if field.is_repeated:
        items = list(check_items(value, where))
        if field.cpp_type == field.CPPTYPE_UINT32:
            with suppress(TypeError, ValueError):  # thousands of token ids: protobuf's own check is faster
                return pb.TokenIds(ids=items).ids
        return [_check_one(field, item, f"{where}[{index}]") for index, item in enumerate(items)]
    return _check_one(field, value, where)


def _check_one(field: Any, value: Any, where: str) -> Any:
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            return check_text(value, where)
        case field.CPPTYPE_BOOL:
            return check_flag(value, where)
        case field.CPPTYPE_DOUBLE:
            return check_number(value, where)
        case field.CPPTYPE_MESSAGE:
            return value  # made by `make`
    return check_whole(value, where, *_WHOLE[field.cpp_type])


def segment_to_wire(segment: Segment, where: str) -> pb.Segment:
    """Convert a segment. Raises `InvalidField`."""
    match segment:
        case str():
            return make(pb.Segment, where, text=segment)
        case Plain():
            return make(pb.Segment, where, text=segment.text, plain=True)
        case Tokens():
            return make(pb.Segment, where, tokens=make(pb.TokenIds, where, ids=segment.ids))
        case Key():
            return make(pb.Segment, where, chunk_key=segment.hex)
        case PutChunk():
            return make(pb.Segment, where, chunk_key=segment.key)
        case DocumentChunk():
            document = make(pb.DocumentChunk, where, **vars(segment))
            return make(pb.Segment, where, document=document)
    raise InvalidField(
        where,
        f"a {type(segment).__name__} is not a segment; give a string, or one of kintsugi.sdk's types",
    )


def segments_to_wire(segments: Iterable[Segment]) -> list[pb.Segment]:
    """Convert segments. Raises `InvalidField`."""
    items = enumerate(check_items(segments, "segments"))
    return [segment_to_wire(segment, f"segments[{index}]") for index, segment in items]


def content_to_wire(content: str | Tokens, where: str) -> pb.Content:
    """Convert a text or token ids. Raises `InvalidField`."""
    match content:
        case str():
            return make(pb.Content, where, text=content)
        case Tokens():
            return make(pb.Content, where, tokens=make(pb.TokenIds, where, ids=content.ids))
    raise InvalidField(where, f"must be a string or Tokens, not a {type(content).__name__}")


def sampling_to_wire(sampling: Sampling | None, max_tokens: int | None = None) -> pb.Sampling:
    """Convert sampling parameters; None: the default. ``max_tokens`` replaces theirs. Raises
    `InvalidField`."""
    if not isinstance(sampling, Sampling | None):
        raise InvalidField("sampling", f"must be a kintsugi.Sampling, not a {type(sampling).__name__}")
    values = dict(vars(sampling or Sampling()))
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    extra = values.pop("extra")
    try:
        text = json.dumps(dict(extra), allow_nan=False) if extra else None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField("sampling.extra", f"cannot be written as a JSON object: {error}") from None
    return make(pb.Sampling, "sampling", **values, extra_json=text)


def batches(chunks: Iterable[str | Tokens]) -> Iterator[list[pb.Content]]:
    """Group chunks into calls of bounded size. A single chunk may exceed the bound."""
    batch: list[pb.Content] = []
    size = 0
    for index, chunk in enumerate(check_items(chunks, "chunks")):
        content = content_to_wire(chunk, f"chunks[{index}]")
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
