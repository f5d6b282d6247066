"""The public SDK: a gateway's chunks and answers, for programs with and without an event loop.

    client = kintsugi.Client("127.0.0.1:7500", namespace="docs")
    chunks = client.put_chunks(["First passage …", "Second passage …"])
    client.prefetch(chunks)
    answer = client.generate(chunks, "\\nQuestion: what follows?\\nAnswer:", max_tokens=64)
    print(answer.text, answer.outcome)

Both clients share one set of coroutines over a transport (see `sdk.transport`). Errors are in
`kintsugi.core.errors`. A call is retried only if the gateway cannot be reached or reports UNAVAILABLE, and if
a repetition has no effect: puts, deletes and reads are idempotent, and a question is retried only before its
answer begins. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import aclosing
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack

import grpc
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from kintsugi.core.errors import NotFound, Unavailable, UnknownField
from kintsugi.core.spaces import check_namespace
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.sdk import messages
from kintsugi.sdk.messages import make
from kintsugi.sdk.transport import ClientOptions as ClientOptions
from kintsugi.sdk.transport import Transport, check_timeout, iterate, run_to_completion
from kintsugi.sdk.types import (
    Answer,
    Delta,
    ErasureReceipt,
    Prefetched,
    PutChunk,
    Sampling,
    Segment,
    ServedModel,
    StoredChunk,
    TokenizedText,
    Tokens,
)

PAGE = 1000
ERASE_TIMEOUT_S = 600.0
LAST_ATTEMPT_S = 0.001
"""Minimum time for an attempt, because gRPC refuses a deadline that has passed."""
RETRY_WAIT_S = 0.1
"""Wait before the second attempt. It doubles for each further attempt, and a random time of up to
`RETRY_WAIT_S` is added."""

Answered = TypeVar("Answered")
Given = ParamSpec("Given")


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate` and `stream`. By default the engine chooses how to blend, and the answer is
    greedy: always the most likely token."""

    max_tokens: int
    """Maximum length of the answer, in tokens, at least 1; instead of the one in `sampling`. Default: 16."""
    sampling: Sampling
    """Sampling parameters. `Sampling(temperature=0.7)` samples."""
    ratio: float
    """Share of the chunks' tokens to recompute, 0 to 1."""
    selector: str
    """Name of the selector, which chooses the tokens to recompute."""
    explain: bool
    """Report the recomputed positions and the times of each layer in the accounting."""
    no_blend: bool
    """Run a full prefill."""
    priority: int
    """vLLM's priority, at least 0 (the default): lower values run first."""
    model: str
    """A name of the model that must answer: the operator's, its folder or its hub name. `NotFound` for
    another model. Default: any model."""
    ttl_s: float
    """Maximum lifetime, in seconds, of chunks that are stored because this request missed them. Default:
    until the store needs their space."""
    timeout_s: float
    """Maximum time in seconds for the whole call, including all attempts. Default: the client's."""


class _Calls:
    """The calls of both clients, as coroutines."""

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        self._namespace = check_namespace(namespace)

    async def _resend(
        self, call: Callable[..., Awaitable[Answered]], *arguments: Any, timeout_s: float | None
    ) -> Answered:
        """Return the call's result. Retries the call while this is safe and time is left. ``timeout_s`` None:
        the client's."""
        options = self._transport.options
        timeout_s = check_timeout(options.timeout_s if timeout_s is None else timeout_s)
        deadline_s = time.monotonic() + timeout_s

        async def once() -> Answered:
            return await call(*arguments, max(deadline_s - time.monotonic(), LAST_ATTEMPT_S))

        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_safe_to_resend),
            stop=stop_after_attempt(options.attempts) | stop_before_delay(timeout_s),
            wait=wait_exponential(multiplier=RETRY_WAIT_S, max=options.retry_wait_s_max)
            + wait_random(0, RETRY_WAIT_S),
            sleep=self._transport.pause,
            reraise=True,
        )
        return await retrying(once)

    async def _unary(self, name: str, request: Any, response: Any, timeout_s: float | None = None) -> Any:
        return await self._resend(self._transport.unary, name, request, response, timeout_s=timeout_s)

    async def put_chunks(
        self,
        chunks: Iterable[str | Tokens],
        *,
        wait: bool = True,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> list[PutChunk]:
        """Prefill and store chunks. With `wait`, return when they are committed. The `state` of a chunk
        reports whether it failed.

        `ttl_s` is the maximum lifetime in seconds; by default, chunks stay until the store needs their space.
        A chunk that is already stored is kept for at least this time: a put never shortens a lifetime. Raises
        `InvalidField` for a lifetime that is not above 0, or longer than ten years.
        """
        results: list[PutChunk] = []
        for batch in messages.batches(chunks):
            request = make(
                pb.PutChunksRequest, namespace=self._namespace, chunks=batch, wait=wait, ttl_s=ttl_s
            )
            response = await self._unary("PutChunks", request, pb.PutChunksResponse, timeout_s)
            results += map(messages.put_of_wire, response.results)
        return results

    async def prefetch(self, segments: Iterable[Segment]) -> Prefetched:
        """Start to load chunks into RAM. Call it when retrieval returns, before the prompt is written."""
        wire = messages.segments_to_wire(segments)
        request = make(pb.PrefetchChunksRequest, namespace=self._namespace, segments=wire)
        response = await self._unary("Prefetch", request, pb.PrefetchChunksResponse)
        return Prefetched(tuple(response.keys), response.accepted)

    async def tokenize(self, texts: Iterable[str]) -> list[TokenizedText]:
        """Return the token ids and the chunk key of each text, tokenised alone."""
        request = make(pb.TokenizeRequest, namespace=self._namespace, texts=texts)
        response = await self._unary("Tokenize", request, pb.TokenizeResponse)
        return [TokenizedText(tuple(text.token_ids), text.key) for text in response.texts]

    async def list_models(self) -> list[ServedModel]:
        """Return the served models with all their names."""
        response = await self._unary("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse)
        return [messages.model_of_wire(model) for model in response.models]

    async def get_chunk(self, key: str) -> StoredChunk | None:
        """Return the stored chunk with a key, or None."""
        request = make(pb.GetChunkRequest, namespace=self._namespace, key=key)
        try:
            response = await self._unary("GetChunk", request, pb.GetChunkResponse)
        except NotFound:
            return None
        return messages.chunk_of_wire(response.chunk)

    async def delete_chunk(self, key: str) -> bool:
        """Erase a chunk and return whether it was stored. Raises `Unavailable` if a shard that may hold it
        does not answer; try again later."""
        request = make(pb.DeleteChunkRequest, namespace=self._namespace, key=key)
        response = await self._unary("DeleteChunk", request, pb.DeleteChunkResponse)
        return bool(response.deleted)

    async def delete_document(
        self, corpus: str, document_id: str, *, timeout_s: float | None = None
    ) -> ErasureReceipt:
        """Erase a document of a precomputed corpus, and its chunks that no other document has. Raises
        `NotFound` if the gateway has no ledger, and `Unavailable` as `delete_chunk`."""
        request = make(
            pb.DeleteDocumentRequest, namespace=self._namespace, corpus=corpus, document_id=document_id
        )
        wait_s = ERASE_TIMEOUT_S if timeout_s is None else timeout_s
        response = await self._unary("DeleteDocument", request, pb.DeleteDocumentResponse, wait_s)
        return messages.receipt_of_wire(response.receipt, response.deleted)

    async def erase_namespace(self, *, timeout_s: float | None = None) -> ErasureReceipt:
        """Erase all data of the namespace. Raises `Unavailable` as `delete_chunk`."""
        request = pb.EraseNamespaceRequest(namespace=self._namespace)
        wait_s = ERASE_TIMEOUT_S if timeout_s is None else timeout_s
        response = await self._unary("EraseNamespace", request, pb.EraseNamespaceResponse, wait_s)
        return messages.receipt_of_wire(response.receipt)

    async def list_chunks(self) -> AsyncGenerator[StoredChunk, None]:
        """Yield every chunk of the namespace, in key order."""
        token = ""
        while True:
            request = pb.ListChunksRequest(namespace=self._namespace, page_size=PAGE, page_token=token)
            response = await self._unary("ListChunks", request, pb.ListChunksResponse)
            for chunk in response.chunks:
                yield messages.chunk_of_wire(chunk)
            token = response.next_page_token
            if not token:
                return

    async def stream(
        self, segments: Iterable[Segment], question: str | Tokens, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta | Answer, None]:
        """Yield the answer's parts as they arrive, and then the whole answer. Closing the generator stops the
        engine."""
        request = self._request(segments, question, options)
        answer = messages.Assembled()
        first, rest = await self._resend(self._begin_answer, request, timeout_s=options.get("timeout_s"))
        async with aclosing(rest):
            answer.take(first)
            async for message in rest:
                delta = answer.take(message)
                if delta is not None:
                    yield delta
        yield answer.answer()

    async def _begin_answer(
        self, request: pb.GenerateRequest, timeout_s: float
    ) -> tuple[pb.GenerateResponse, AsyncGenerator[Any, None]]:
        """Return the first message of an answer, and a generator of the others."""
        stream = self._transport.stream("Generate", request, pb.GenerateResponse, timeout_s)
        try:
            return await anext(stream), stream
        except StopAsyncIteration:
            raise Unavailable(f"{self._transport.address}: the answer was empty") from None

    def _request(
        self, segments: Iterable[Segment], question: str | Tokens, options: GenerateOptions
    ) -> pb.GenerateRequest:
        for name in options:
            if name not in GenerateOptions.__annotations__:
                raise UnknownField(name, GenerateOptions.__annotations__)
        own = ("max_tokens", "sampling", "timeout_s")
        constraints: dict[str, Any] = {name: value for name, value in options.items() if name not in own}
        return make(
            pb.GenerateRequest,
            namespace=self._namespace,
            segments=messages.segments_to_wire(segments),
            question=messages.content_to_wire(question, "question"),
            sampling=messages.sampling_to_wire(options.get("sampling"), options.get("max_tokens")),
            **constraints,
        )

    async def generate(
        self, segments: Iterable[Segment], question: str | Tokens, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """Return the whole answer to a question over ordered segments. A question that is a text is the rest
        of the user's message, and the service's prompt form completes it. Token ids are used unchanged."""
        async with aclosing(self.stream(segments, question, **options)) as events:
            async for event in events:
                if isinstance(event, Answer):
                    return event
        raise Unavailable(f"{self._transport.address}: the answer is incomplete")

    async def close(self) -> None:
        """Idempotent."""
        await self._transport.close()


class AsyncClient(_Calls):
    """A gateway for programs with an event loop. Use `async with`, or `close` it."""

    def __init__(
        self, address: str, namespace: str, *, token: str | None = None, options: ClientOptions | None = None
    ) -> None:
        """``address``: `host:port`. ``namespace``: the chunks' namespace. Raises `InvalidField`."""
        super().__init__(Transport(address, _options(token, options), is_blocking=False), namespace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _blocking(
    call: Callable[Concatenate[_Calls, Given], Coroutine[Any, Any, Answered]],
) -> Callable[Concatenate[Client, Given], Answered]:
    """Return a method of `Client` that runs a coroutine of `_Calls` to its end."""

    def run(self: Client, /, *arguments: Given.args, **options: Given.kwargs) -> Answered:
        return run_to_completion(call(self._calls, *arguments, **options))

    functools.update_wrapper(run, call)
    return run


class Client:
    """A gateway for programs without an event loop. Thread-safe. Use `with`, or `close` it."""

    def __init__(
        self, address: str, namespace: str, *, token: str | None = None, options: ClientOptions | None = None
    ) -> None:
        """As `AsyncClient`."""
        transport = Transport(address, _options(token, options), is_blocking=True)
        self._calls = _Calls(transport, namespace)

    put_chunks = _blocking(_Calls.put_chunks)
    prefetch = _blocking(_Calls.prefetch)
    generate = _blocking(_Calls.generate)
    tokenize = _blocking(_Calls.tokenize)
    list_models = _blocking(_Calls.list_models)
    get_chunk = _blocking(_Calls.get_chunk)
    delete_chunk = _blocking(_Calls.delete_chunk)
    delete_document = _blocking(_Calls.delete_document)
    erase_namespace = _blocking(_Calls.erase_namespace)
    close = _blocking(_Calls.close)

    def stream(
        self, segments: Iterable[Segment], question: str | Tokens, **options: Unpack[GenerateOptions]
    ) -> Generator[Delta | Answer, None, None]:
        """As `AsyncClient.stream`."""
        return iterate(self._calls.stream(segments, question, **options))

    def list_chunks(self) -> Iterator[StoredChunk]:
        """As `AsyncClient.list_chunks`."""
        return iterate(self._calls.list_chunks())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _options(token: str | None, options: ClientOptions | None) -> ClientOptions:
    chosen = options or ClientOptions()
    return chosen if token is None else dataclasses.replace(chosen, token=token)


def _is_safe_to_resend(error: BaseException) -> bool:
    """Return whether a call that failed with `error` may be retried.

    Not every `Unavailable` may: failures inside a gateway (INTERNAL, UNKNOWN) and cancelled calls become
    `Unavailable` too, and may have had an effect. RESOURCE_EXHAUSTED is not retried, because it names no
    waiting time and retries would add to the load.
    """
    status = error.__cause__
    if not isinstance(error, Unavailable) or not isinstance(status, grpc.RpcError):
        return False
    return bool(status.code() is grpc.StatusCode.UNAVAILABLE)
