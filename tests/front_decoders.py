"""Decoders of what clients of a gateway send, and of files that users give.

As in `tests/decoders.py`, which lists these, too: a decoder takes any bytes and returns, or fails.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fsspec
from google.protobuf.message import DecodeError

from kintsugi.core.errors import Corrupted, InvalidField, KintsugiError
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from kintsugi.core.layout import Codec, HeadRange, KVLayout
from kintsugi.core.request import KintsugiParams
from kintsugi.fusor.codecs import decode_frame
from kintsugi.gateway.fronts import grpc_service, limits
from kintsugi.gateway.fronts.openai_request import find_requested_namespace, parse_openai_call
from kintsugi.precompute.sources.files import FileRange, Format
from kintsugi.precompute.sources.parser_process import LENGTH, _read_anything, _send
from kintsugi.precompute.sources.readers import Columns, Document, Failure
from kintsugi.precompute.sources.sandbox import _ParserEnded, parse_answer
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.store.client.chunk_cipher import ChunkCipher, encrypt_chunk
from kintsugi.store.client.key_file import read_entries
from kintsugi.store.protocol.access import read_document
from kintsugi.store.protocol.keys import NamespaceKeys
from kintsugi.store.protocol.tls import first_expiry_s
from tests.contracts.store_contract import make_chunk

SMALL = KVLayout.uniform(2, 2, 8, "bfloat16")
SMALL_TOKENS = 3
PIECE = FileRange("memory://decoded-file", "decoded-file", Format.JSONL, "")
ROOT = "https://docs.example/public"


def generate_request(data: bytes) -> None:
    """A `Generate` of gRPC: a typed call, or `InvalidField`."""
    with contextlib.suppress(DecodeError, InvalidField):
        call = grpc_service.call_of(pb.GenerateRequest.FromString(data), "id", {})
        json.dumps(call.sampling, default=repr)


def put_request(data: bytes) -> None:
    """A `PutChunks` of gRPC: texts or tokens, or `InvalidField`."""
    with contextlib.suppress(DecodeError, InvalidField):
        request = pb.PutChunksRequest.FromString(data)
        assert len(grpc_service.segments_of(request.chunks, "chunks")) == len(request.chunks)


def openai_body(data: bytes) -> None:
    """A body of the HTTP front, for each path that an engine answers: a call, or `InvalidField`."""
    for path in (CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH):
        with contextlib.suppress(InvalidField):
            body = limits.parse_object(data)
            wanted = find_requested_namespace(body, None)
            call = parse_openai_call("id", path, body, wanted or "acme", lambda text: [])
            json.dumps(call.body, ensure_ascii=False).encode()


def request_params(data: bytes) -> None:
    """Our parameters of a request: sound ones say the same after another round."""
    values = _parse_json(data)
    with contextlib.suppress(KintsugiError):
        params = KintsugiParams.from_mapping(values)
        (again,) = params.to_mapping().values()
        assert KintsugiParams.from_mapping(again) == params


def tokens_document(data: bytes) -> None:
    """A tokens file: entries with a name and a namespace, or `InvalidField`."""
    path = _scratch_file()
    path.write_bytes(data)
    with contextlib.suppress(InvalidField):
        document = read_document(path)
        assert all(grant.caller.name and grant.caller.namespaces for grant in document.tokens)


def keys_document(data: bytes) -> None:
    """A file of keys, or `InvalidField`, which repeats nothing of it."""
    path = _scratch_file()
    path.write_bytes(data)
    with contextlib.suppress(InvalidField):
        read_entries(path)


def ciphertext(data: bytes) -> None:
    """A damaged frame of an encrypted chunk: its tags match if it is what was encrypted."""
    cipher, heads, frame = _encrypted()
    at = int.from_bytes(data[:2], "big") % (len(frame) + 1)
    damaged = frame[:at] + data[2:] + frame[at + len(data[2:]) :]
    matches = cipher.decrypt(0, heads, memoryview(damaged), memoryview(bytearray(len(damaged))))
    assert matches == (damaged == frame)


@cache
def _encrypted() -> tuple[ChunkCipher, HeadRange, bytes]:
    manifest, frames = make_chunk(range(4))
    keys = NamespaceKeys(bytes(32), (bytes(range(32)),))
    sealed, encrypted = encrypt_chunk(keys, manifest, frames)
    heads = HeadRange(0, manifest.layout.num_kv_heads)
    return ChunkCipher(keys.by_id[keys.newest_id], sealed), heads, bytes(encrypted[0])


def coded_frame(data: bytes) -> None:
    """A frame of the right size in every codec: KV of the right shape, or `Corrupted`."""
    for codec in Codec:
        size = SMALL.head_bytes(codec, SMALL_TOKENS) * SMALL.num_kv_heads
        frame = (data + bytes(size))[:size]
        with contextlib.suppress(Corrupted):
            key, value = decode_frame(memoryview(frame), SMALL, codec, SMALL_TOKENS)
            assert key.shape == value.shape == (SMALL_TOKENS, SMALL.num_kv_heads, SMALL.head_dim)


def certificate(data: bytes) -> None:
    """A PEM file of any content: when it expires, or `InvalidField`."""
    with contextlib.suppress(InvalidField):
        first_expiry_s(data)


def corpus_file(data: bytes) -> None:
    """A file of a corpus, as its parser's process reads it. The first byte chooses its format, whether its
    suffix is known, and whether it is compressed. What the process sends is what the reader takes."""
    formats = (Format.JSONL, Format.CSV, Format.TEXT, Format.MARKDOWN, Format.HTML)
    kind = formats[data[0] % len(formats)] if data else Format.TEXT
    fsspec.filesystem("memory").pipe_file("/decoded-file", data[1:])
    name = f"{PIECE.name}.gz" if data[:1] >= b"\xc0" else PIECE.name
    piece = FileRange(PIECE.url, name, kind, "", guessed=bool(data and data[0] & 0x20))
    for item in _read_anything(piece, Columns()):
        sent = io.BytesIO()
        values = {name: value for name, value in vars(item).items() if name != "url"}
        _send(sent, {"document" if isinstance(item, Document) else "failure": values})
        received = parse_answer(sent.getvalue()[LENGTH.size :], piece)
        assert type(received) is type(item)
        assert isinstance(item, Failure) or received == item


def parser_answer(data: bytes) -> None:
    """What a parser sends that was taken over: a document that fits the ledger, or nothing more of it."""
    with contextlib.suppress(_ParserEnded):
        item = parse_answer(data, PIECE)
        assert item is None or (item.url == PIECE.url and 0 <= item.place < 1 << 63)
        if isinstance(item, Document):
            for text in (item.text, item.document_id, item.version):
                text.encode()


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


@cache
def _scratch_file() -> Path:
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(prefix="kintsugi-decoders-", dir=folder)) / "file"


FRONT_DECODERS: tuple[Callable[[bytes], None], ...] = (
    generate_request,
    put_request,
    openai_body,
    request_params,
    tokens_document,
    keys_document,
    ciphertext,
    coded_frame,
    certificate,
    corpus_file,
    parser_answer,
)

_TOKEN = {
    "name": "a",
    "sha256": "0" * 64,
    "namespaces": ["a*"],
    "verbs": ["list"],
    "expires": "2027-01-01T00:00Z",
}
_CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "chunk", "text": "b"}]}
    ],
    "documents": [{"text": "c"}],
    "kintsugi": {"namespace": "acme", "ratio": 0.5},
}
_DOCUMENT = {"place": 0, "document_id": "d", "text": "t", "version": "", "metadata": "{}", "markdown": False}
_CERTIFICATE = (
    b"-----BEGIN CERTIFICATE-----\nMIIBIjCBMAAwADAAMAAwHhcNMjYwMTAxMDAwMDAwWhcNMjcwMTAxMDAwMDAwWg==\n"
)

FRONT_SEEDS: MappingProxyType[str, list[bytes]] = MappingProxyType(
    {
        "generate_request": [
            pb.GenerateRequest(
                namespace="acme",
                segments=[pb.Segment(text="a")],
                question=pb.Content(text="b"),
                sampling=pb.Sampling(extra_json='{"top_k": 3}'),
            ).SerializeToString()
        ],
        "put_request": [
            pb.PutChunksRequest(namespace="a", chunks=[pb.Content(text="b")]).SerializeToString()
        ],
        "openai_body": [json.dumps(_CHAT).encode(), b'{"prompt": ["a", "b"], "n": 2, "priority": 1}'],
        "request_params": [
            b'{"namespace": "a", "op": "save", "spans": [[1, 5]], "ratio": 0.5, "tier": "ram"}'
        ],
        "tokens_document": [json.dumps({"tokens": [_TOKEN]}).encode()],
        "keys_document": [
            json.dumps(
                {
                    "namespaces": {
                        "a": {"name_key": "00" * 32, "data_keys": ["11" * 32]},
                        "b": {"destroyed": "2027-01-01T00:00:00+00:00"},
                    }
                }
            ).encode()
        ],
        "ciphertext": [b"\0\0\1\2\3"],
        "coded_frame": [bytes(range(200))],
        "certificate": [_CERTIFICATE + b"-----END CERTIFICATE-----\n"],
        "corpus_file": [
            b'\0{"id": "a", "text": "b", "n": [1]}\n{"text": 3}\n',
            b'\1text,id\n"a\nb",c\n',
            b"\2plain",
            b"\3# Title",
            b"\4<meta charset=latin-1><table><tr><td>a</td></tr></table><ul><li>b</ul><pre>c</pre>",
        ],
        "parser_answer": [
            b'{"end": true}',
            json.dumps({"document": _DOCUMENT}).encode(),
            b'{"failure": {"place": 1, "reason": "r", "document_id": "d"}}',
        ],
    }
)
