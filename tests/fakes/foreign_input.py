"""Mistakes in any field of the SDK, of gRPC and of HTTP, and what is wrong with the answers.

A field may refuse a value, but only with an error of `kintsugi.core.errors` that names the field.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf.descriptor import FieldDescriptor

from kintsugi import Client, ClientOptions, DocumentChunk, Key, Plain, Sampling, Tokens
from kintsugi.core.errors import DeadlineExceeded, InvalidField, KintsugiError, NotFound
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.sdk.prefetching import Prefetcher
from kintsugi.store.protocol.grpc_status import error_of_call
from tests.integration.serving.gateways import Setup, running

NAMESPACE = "tenant"
SERVICE = "kintsugi.rpc.v1.Kintsugi"
HALF = "\U0001f600".encode("utf-16-le")[:2].decode("utf-16-le", "surrogatepass")
"""The first half of an emoji, which a program that cuts texts by UTF-16 units leaves."""
TIMEOUT_S = 20.0

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**32, 2**40, 2**63, -(2**70), 10**400),
    *(0.0, 0.5, -1.0, 1e308, float("nan"), float("inf"), 1j),
    *("", "text", HALF, f"a{HALF}b", "\0", "é\n", "x" * 300, b"bytes", b"\xff"),
    *([], [None], [5], [-1], [True], [HALF], [[]], ["a", HALF], [0.5], (), {}, {"a": 1}, {HALF: HALF}),
    *(object(), Exception, Tokens([-1]), Tokens("text"), Plain(HALF), Key(5), range(3)),  # type: ignore[arg-type]
)
"""Mistakes that programs make, of every type."""


@dataclass(frozen=True)
class Field:
    """One field of one message or call."""

    name: str
    roots: tuple[str, ...]
    """Fields of which an error may name one, or a part of one."""
    give: Callable[[Any], Any]
    """Sends a value in the field, and otherwise what is valid. Raises the error of the answer."""


def find_problem(field: Field, value: Any) -> str | None:
    """What is wrong with the answer to a value; None: nothing."""
    try:
        field.give(value)
    except InvalidField as error:
        named = error.field.replace("[", ".").split(".")[0]
        return None if named in field.roots else f"{field.name}: names {error.field!r}: {error}"
    except (NotFound, DeadlineExceeded):
        return None
    except KintsugiError as error:
        return f"{field.name}: blames nobody's input: {error!r}"
    except Exception as error:  # noqa: BLE001  # any other is the fault that is looked for
        return f"{field.name}: raw {error!r}"
    return None


@contextmanager
def fields_of_a_service() -> Iterator[list[Field]]:
    """Every field of every message of a gateway over a stub engine, which runs as long as the block."""
    with running(Setup(max_model_len=512)) as service:
        server = HttpServer(HttpFront(service.gateway).app, "127.0.0.1", 0)
        service.run(server.start())
        try:
            with (
                Client(service.address, NAMESPACE) as client,
                grpc.insecure_channel(service.address) as channel,
                httpx.Client(base_url=f"http://{server.address}", timeout=TIMEOUT_S) as http,
            ):
                yield [*sdk_fields(client, service.address), *grpc_fields(channel), *http_fields(http)]
        finally:
            service.run(server.stop(0.0))


Give = Callable[[Any], Any]
"""Sends a value in one field, all others being valid."""
SDK_CALLS: Mapping[str, Mapping[str, Any]] = {
    "put_chunks": {"chunks": ["a b"], "wait": True, "ttl_s": 9.0, "timeout_s": TIMEOUT_S},
    "prefetch": {"segments": ["a b"]},
    "tokenize": {"texts": ["a b"]},
    "get_chunk": {"key": "ab" * 32},
    "delete_chunk": {"key": "ab" * 32},
    "delete_document": {"corpus": "c", "document_id": "d", "timeout_s": TIMEOUT_S},
    "erase_namespace": {"timeout_s": TIMEOUT_S},
    "generate": {
        "segments": ["a b"],
        "question": "why?",
        "max_tokens": 1,
        "sampling": Sampling(),
        "ratio": 0.5,
        "selector": "query",
        "explain": True,
        "no_blend": True,
        "priority": 0,
        "model": "stub",
        "ttl_s": 9.0,
        "timeout_s": TIMEOUT_S,
    },
}
"""Valid arguments of the SDK's methods."""


def _calling(client: Client, call: str, arguments: Mapping[str, Any], name: str) -> Give:
    return lambda value: getattr(client, call)(**{**arguments, name: value})


def _sampling(client: Client, name: str) -> Give:
    return lambda value: client.generate(["a b"], "why?", sampling=Sampling(**{name: value}))


def _generating(client: Client, make: Give) -> Give:
    return lambda value: client.generate(["a b", make(value)], "why?", max_tokens=1)


def _prefetching(client: Client, make: Give) -> Give:
    return lambda value: client.prefetch([make(value)])


def _opening(address: str, name: str) -> Give:
    return lambda value: _ask_once(address, options=ClientOptions(**{name: value}))


def _sending(channel: grpc.Channel, method: str, path: tuple[FieldDescriptor, ...]) -> Give:
    return lambda value: _send(channel, method, path, value)


def _posting(client: httpx.Client, path: str, body: Any, at: tuple[Any, ...]) -> Give:
    return lambda value: _post(client, path, body, at, value)


def sdk_fields(client: Client, address: str) -> Iterator[Field]:
    """Every argument of the SDK's methods, and every field of their arguments' types."""

    def field(name: str, give: Give, *roots: str) -> Field:
        return Field(f"sdk {name}", roots or (name.rsplit(" ", 1)[-1],), give)

    for call, arguments in SDK_CALLS.items():
        for name in arguments:
            # An answer's length is the question of the whole prompt.
            roots = (name, "sampling") if name == "max_tokens" else (name,)
            yield field(
                f"{call} {name}",
                _calling(client, call, arguments, name),
                *roots,
            )
    for one in dataclasses.fields(Sampling):
        yield field(
            f"generate sampling.{one.name}",
            _sampling(client, one.name),
            "sampling",
        )
    segments: Mapping[str, Callable[[Any], Any]] = {
        "Plain.text": Plain,
        "Tokens.ids": Tokens,
        "Key.hex": Key,
        "DocumentChunk.corpus": lambda value: DocumentChunk(value, "d", 0),
        "DocumentChunk.document_id": lambda value: DocumentChunk("c", value, 0),
        "DocumentChunk.index": lambda value: DocumentChunk("c", "d", value),
        "DocumentChunk.version": lambda value: DocumentChunk("c", "d", 0, value),
    }
    for name, make in segments.items():
        yield field(
            f"generate {name}",
            _generating(client, make),
            "segments",
        )
        yield field(f"prefetch {name}", _prefetching(client, make), "segments")
    yield field("put_chunks chunks[1]", lambda value: client.put_chunks(["a b", value]), "chunks")
    yield field("put_chunks Tokens.ids", lambda value: client.put_chunks([Tokens(value)]), "chunks")
    yield field("generate option", lambda value: client.generate(["a"], "why?", optoin=value), "optoin")  # type: ignore[call-arg]
    yield field("Prefetcher ttl_s", lambda value: Prefetcher(client, put=True, ttl_s=value))
    yield field("Prefetcher texts", lambda value: _prefetch(client, value))
    yield field("Prefetcher texts[1]", lambda value: _prefetch(client, ["a b", value]), "texts")
    yield field("Client address", lambda value: Client(value, NAMESPACE).close())
    yield field("Client namespace", lambda value: Client(address, value).close())
    yield field("Client token", lambda value: _ask_once(address, token=value))
    for one in dataclasses.fields(ClientOptions):
        yield field(
            f"ClientOptions {one.name}",
            _opening(address, one.name),
            one.name,
            *(("tls_cert", "tls_key") if one.name in ("tls_cert", "tls_key") else ()),
        )


def _prefetch(client: Client, texts: Any) -> None:
    future = Prefetcher(client).prefetch(texts)
    if future is not None:
        future.result(TIMEOUT_S)


def _ask_once(address: str, **how: Any) -> None:
    options = how.get("options")
    with Client(address, NAMESPACE, **how) as client:
        if options is None or not options.encrypted:  # the gateway has no certificate
            client.tokenize(["a b"])


_REQUESTS: Mapping[str, Any] = {
    "PutChunk": pb.PutChunkRequest(namespace=NAMESPACE, chunk=pb.Content(text="a b"), wait=True),
    "PutChunks": pb.PutChunksRequest(namespace=NAMESPACE, chunks=[pb.Content(text="a b")], wait=True),
    "GetChunk": pb.GetChunkRequest(namespace=NAMESPACE, key="ab" * 32),
    "DeleteChunk": pb.DeleteChunkRequest(namespace=NAMESPACE, key="ab" * 32),
    "DeleteDocument": pb.DeleteDocumentRequest(namespace=NAMESPACE, corpus="c", document_id="d"),
    "EraseNamespace": pb.EraseNamespaceRequest(namespace=NAMESPACE),
    "ListChunks": pb.ListChunksRequest(namespace=NAMESPACE),
    "Prefetch": pb.PrefetchChunksRequest(namespace=NAMESPACE, segments=[pb.Segment(text="a b")]),
    "Generate": pb.GenerateRequest(
        namespace=NAMESPACE,
        segments=[pb.Segment(text="a b")],
        question=pb.Content(text="why?"),
        sampling=pb.Sampling(max_tokens=1),
    ),
    "Tokenize": pb.TokenizeRequest(namespace=NAMESPACE, texts=["a b"]),
    "ListModels": pb.ListModelsRequest(),
}
"""A valid request of each RPC."""
_MARK = "@marked@"
"""Replaced by bytes of the same length, which are not UTF-8."""


def grpc_fields(channel: grpc.Channel) -> Iterator[Field]:
    """Every field of every request, also of those within others, as any client can send it."""
    for method, request in _REQUESTS.items():
        for path in _paths(request.DESCRIPTOR):
            names = [one.name for one in path]
            yield Field(
                f"grpc {method} {'.'.join(names)}",
                (names[0], "request"),
                _sending(channel, method, path),
            )


def _paths(descriptor: Any) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in descriptor.fields:
        if field.message_type is None:
            yield (field,)
        else:
            yield from ((field, *rest) for rest in _paths(field.message_type))


def _send(channel: grpc.Channel, method: str, path: tuple[FieldDescriptor, ...], value: Any) -> None:
    request = type(_REQUESTS[method])()
    request.CopyFrom(_REQUESTS[method])
    holder = request
    for field in path[:-1]:
        holder = getattr(holder, field.name)
        if field.is_repeated:
            holder = holder[0]
        elif field.name == "document":
            holder.CopyFrom(pb.DocumentChunk(corpus="c", document_id="d"))
    leaf, is_broken = path[-1], isinstance(value, bytes)
    given = _MARK if is_broken else value
    try:
        if leaf.is_repeated:
            del getattr(holder, leaf.name)[:]
            getattr(holder, leaf.name).extend(given if isinstance(given, list) else [given])
        else:
            setattr(holder, leaf.name, given)
        data = request.SerializeToString()
    except (TypeError, ValueError, OverflowError):
        return  # no protobuf library writes this value
    data = data.replace(_MARK.encode(), b"\xff\xfe" * (len(_MARK) // 2))
    kind = channel.unary_stream if method == "Generate" else channel.unary_unary
    try:
        answer = kind(f"/{SERVICE}/{method}", None, None)(data, timeout=TIMEOUT_S)
        list(answer) if method == "Generate" else answer
    except grpc.RpcError as error:
        raise error_of_call(error, "the gateway") from error


_MESSAGE = {"role": "user", "content": [{"type": "text", "text": "a b", "kintsugi": {"chunk": True}}]}
_OURS = {"namespace": NAMESPACE, "op": "blend", "ratio": 0.5, "selector": "query", "explain": True}
_OURS |= {"timeline": True, "ttl_s": 9.0, "no_store": True, "version": 1}
_COMMON = {"model": "stub", "kintsugi": _OURS, "priority": 0, "prompt_cache_key": "k", "cache_salt": "s"}
_BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {
        **_COMMON,
        "messages": [_MESSAGE],
        "documents": [{"text": "a b"}],
        "n": 1,
        "max_tokens": 1,
        "max_completion_tokens": 1,
    },
    "/v1/completions": {**_COMMON, "prompt": ["a b"], "n": 1, "max_tokens": 1},
    "/v1/responses": {**_COMMON, "input": [_MESSAGE], "instructions": "c", "max_output_tokens": 1},
    "/v1/kintsugi/residency": {"chunks": ["a b"]},
    "/v1/kintsugi/residency ": {"keys": ["ab" * 32]},
    "/console/api/compare": {
        "question": "why?",
        "documents": [{"title": "t", "text": "a b"}],
        "namespace": NAMESPACE,
        "selector": "query",
        "ratio": 0.5,
        "max_tokens": 1,
        "score": False,
    },
    "/console/api/count": {"texts": ["a b"]},
}
"""A valid body of each path, with every field of ours. vLLM validates its own."""


def http_fields(client: httpx.Client) -> Iterator[Field]:
    """Every field of every body, also within others."""
    for path, body in _BODIES.items():
        for at in _places(body):
            yield Field(
                f"http {path} {'.'.join(map(str, at))}",
                # How many answers are asked for is a question of two fields.
                (str(at[0]), *(["n", "prompt"] if at[0] in ("n", "prompt") else []), "body"),
                _posting(client, path.strip(), body, at),
            )


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield (name,)
        yield from ((name, *rest) for rest in _places(one))


def _post(client: httpx.Client, path: str, body: Any, at: tuple[Any, ...], value: Any) -> None:
    changed = json.loads(json.dumps(body))
    holder = changed
    for name in at[:-1]:
        holder = holder[name]
    holder[at[-1]] = value
    try:
        data = json.dumps(changed)
    except (TypeError, ValueError):
        return  # no JSON library writes this value
    response = client.post(path, content=data, headers={"content-type": "application/json"})
    if response.status_code == 200:
        _check_lines(path, response)
        return
    error = response.json()["error"]
    if response.status_code == 404:
        raise NotFound(error["message"])
    if response.status_code == 400 and error["param"]:
        raise InvalidField(error["param"], error["message"])
    raise KintsugiError(f"{response.status_code}: {error}")


def _check_lines(path: str, response: httpx.Response) -> None:
    """Raise the error with which a comparison ended."""
    if not path.endswith("compare"):
        return
    last = json.loads(response.text.splitlines()[-1])
    if last["event"] == "failed":
        kind, message = last["kind"], last["message"]
        raise InvalidField(*message.split(": ", 1)) if kind == "InvalidField" else KintsugiError(message)
