"""Converts gRPC messages to and from the gateway's types. Malformed messages raise `InvalidField`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct

from kintsugi.core.errors import InvalidField
from kintsugi.core.exchange import EngineDelta, EngineInfo
from kintsugi.core.request import BlendOptions
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.erasing import Receipt
from kintsugi.gateway.fronts.limits import parse_object
from kintsugi.gateway.gateway import GatewayChunk, Put
from kintsugi.gateway.prompts import Finished, GenerateCall, Resolved
from kintsugi.gateway.texts.segments import Segment
from kintsugi.precompute.documents import DocumentRef
from kintsugi.rpc.v1 import gateway_pb2 as pb

EXTRA_JSON_BYTES_MAX = 64 << 10
_PLAN_FIELDS = tuple(field.name for field in pb.ExecutedPlan.DESCRIPTOR.fields)


def segments_of(wires: Iterable[pb.Content | pb.Segment], where: str) -> tuple[Segment, ...]:
    return tuple(segment_of(wire, f"{where}[{index}]") for index, wire in enumerate(wires))


def segment_of(wire: pb.Content | pb.Segment, where: str) -> Segment:
    """Convert a segment, or a content, which is a text or token ids."""
    kind, plain = wire.WhichOneof("content"), getattr(wire, "plain", False)
    if kind == "text":
        return Segment(text=wire.text, plain=plain)
    if kind == "tokens":
        return Segment(token_ids=TokenIds.of(wire.tokens.ids), plain=plain)
    if isinstance(wire, pb.Content):
        raise InvalidField(where, "is mandatory; give a text or tokens")
    if kind == "chunk_key":
        return Segment(key=key_of(wire.chunk_key, f"{where}.chunk_key"), plain=plain)
    if kind == "document":
        document = wire.document
        version = document.version if document.HasField("version") else None
        ref = DocumentRef(document.document_id, document.index, version)
        return Segment(document=(document.corpus, ref), plain=plain)
    raise InvalidField(where, "is empty; give a text, tokens, a chunk key or a document's chunk")


def key_of(text: str, where: str) -> ChunkKey:
    try:
        return ChunkKey.from_hex(text)
    except InvalidField as error:
        raise InvalidField(where, error.problem) from None


def call_of(wire: pb.GenerateRequest, request_id: str, trace: Mapping[str, str]) -> GenerateCall:
    return GenerateCall(
        namespace=wire.namespace,
        segments=segments_of(wire.segments, "segments"),
        question=segment_of(wire.question, "question"),
        sampling=sampling_of(wire.sampling),
        # Only fields that were set are listed.
        options=BlendOptions.from_mapping({field.name: value for field, value in wire.ListFields()}),
        explain=wire.explain,
        no_blend=wire.no_blend,
        ttl_s=ttl_of(wire),
        priority=wire.priority,
        model=wire.model,
        request_id=request_id,
        trace=trace,
    )


def ttl_of(wire: pb.GenerateRequest | pb.PutChunkRequest | pb.PutChunksRequest) -> float | None:
    return wire.ttl_s if wire.HasField("ttl_s") else None


def sampling_of(wire: pb.Sampling) -> dict[str, Any]:
    """Return the fields that the client has set, by their names in vLLM's `SamplingParams`."""
    sampling = _extra(wire.extra_json)
    for descriptor, value in wire.ListFields():  # only fields that were set
        if descriptor.name != "extra_json":
            sampling[descriptor.name] = list(value) if descriptor.name.startswith("stop") else value
    return sampling


def _extra(text: str) -> dict[str, Any]:
    if len(text) > EXTRA_JSON_BYTES_MAX:
        raise InvalidField(
            "sampling.extra_json", f"has {len(text)} characters; at most {EXTRA_JSON_BYTES_MAX} are allowed"
        )
    return parse_object(text, "sampling.extra_json") if text else {}


def event_to_wire(event: Resolved | EngineDelta | Finished) -> pb.GenerateResponse:
    if isinstance(event, EngineDelta):
        response = pb.GenerateResponse()  # filled in place, to avoid a copy for every token
        response.delta.token_ids.extend(event.token_ids)
        response.delta.text = event.text
        return response
    if isinstance(event, Resolved):
        segments = [
            pb.ResolvedSegment(start=span.start, end=span.end, key=span.key.hex if span.key else "")
            for span in event.segments
        ]
        resolved = pb.Resolved(
            request_id=event.request_id, segments=segments, prompt_tokens=event.prompt_tokens
        )
        return pb.GenerateResponse(resolved=resolved)
    return pb.GenerateResponse(finished=_finish_to_wire(event))


def _finish_to_wire(event: Finished) -> pb.Finished:
    plan = {name: event.accounting[name] for name in _PLAN_FIELDS if name in event.accounting}
    return pb.Finished(
        finish_reason=event.finish_reason,
        plan=pb.ExecutedPlan(**plan),
        accounting=_struct(event.accounting),
        usage=pb.Usage(**vars(event.usage)),
        ttft_ms=event.ttft_ms,
    )


def _struct(accounting: Mapping[str, Any]) -> Struct:
    """Return the accounting as a `Struct`. `Struct.update` would take three times as long."""
    struct = Struct()
    for name, value in accounting.items():
        if isinstance(value, str):
            struct.fields[name].string_value = value
        elif type(value) in (int, float):  # not a bool
            struct.fields[name].number_value = value
        else:  # through JSON, which turns layer numbers into strings
            struct[name] = json.loads(json.dumps(value))
    return struct


def model_to_wire(info: EngineInfo) -> pb.ServedModel:
    return pb.ServedModel(
        id=info.model,
        aliases=info.aliases,
        max_model_len=info.max_model_len,
        fingerprint=info.fingerprint,
        blending=info.blending,
    )


def put_to_wire(put: Put) -> pb.PutResult:
    return pb.PutResult(
        key=put.key.hex,
        num_tokens=put.num_tokens,
        new=put.new,
        state=pb.PutState.Value(f"PUT_STATE_{put.state.name}"),
        reason=put.reason,
    )


def receipt_to_wire(receipt: Receipt) -> pb.ErasureReceipt:
    return pb.ErasureReceipt(
        namespace=receipt.namespace,
        asked_at_s=receipt.asked_at_s,
        gone_at_s=receipt.gone_at_s,
        places=[pb.ErasedPlace(**vars(place)) for place in receipt.places],
    )


def chunk_to_wire(chunk: GatewayChunk) -> pb.ChunkInfo:
    manifest = chunk.manifest
    return pb.ChunkInfo(
        key=manifest.key.hex,
        num_tokens=manifest.num_tokens,
        size_bytes=manifest.chunk_bytes,
        codec=manifest.codec.name.lower(),
        model=manifest.fingerprint.hex,
        tier=chunk.tier,
        known=chunk.known,
    )
