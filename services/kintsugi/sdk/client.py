"""The public SDK: a gateway's chunks and answers, for programs with and without an event loop.

    client = kintsugi.Client("127.0.0.1:7500", namespace="docs")
    chunks = client.put_chunks(["First passage …", "Second passage …"])
    client.prefetch(chunks)
    answer = client.generate(chunks, "\\nQuestion: what follows?\\nAnswer:", max_tokens=64)
    print(answer.text, answer.outcome)

Both clients are one body of coroutines over a transport (see `sdk.transport`). Errors are those of
`kintsugi.core.errors`. A call is sent again only where the gateway cannot be reached or says UNAVAILABLE, and
where nothing can happen twice: puts, deletes and reads are idempotent, and a question is sent again only if
nothing of its answer has arrived. No torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from kintsugi.core.errors import InvalidField, NotFound, Unavailable, UnknownField
from kintsugi.core.spaces import check_namespace
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.sdk import messages
from kintsugi.sdk.transport import ClientOptions as ClientOptions
from kintsugi.sdk.transport import Transport, iterate, run_to_completion
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
"""gRPC refuses a deadline that has passed."""
RETRY_WAIT_S = 0.1
"""Wait before the second attempt, doubled before each further one, plus up to as much at random."""

Answered = TypeVar("Answered")


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate` and `stream`; the engine's calibrated defaults hold for what is left out."""

    max_tokens: int
    """Longest answer, in tokens."""
    sampling: Sampling
    """How tokens are chosen."""
    ratio: float
    """Share of the chunks' tokens to recompute, 0 to 1."""
    selector: str
    """Which tokens to recompute, by the selector's name."""
    adaptive_mass: float
    """Makes the ratio a ceiling: no more tokens are recomputed than hold this share of the selector's
    signal."""
    explain: bool
    """Positions and times per layer in the accounting."""
    no_blend: bool
    """An ordinary full prefill."""
    priority: int
    """vLLM's: lower goes first; below 0 only where the gateway allows it."""
    model: str
    """A name of the model that must answer: the operator's, its folder or its hub name. `NotFound` for any
    other. Default: whichever is served."""
    ttl_s: float
    """How long chunks are kept at most that the gateway stores because this request missed them, in seconds.
    Default: until the store needs their room."""
    timeout_s: float
    """For the whole call with all its attempts, in seconds."""


class _Calls:
    """The body of both clients, as coroutines."""

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        self._namespace = check_namespace(namespace)

    async def _resend(
        self, call: Callable[..., Awaitable[Answered]], *arguments: Any, timeout_s: float
    ) -> Answered:
        """The call's result. The call is sent again while that is safe and time is left."""
        options = self._transport.options
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
        wait_s = timeout_s or self._transport.options.timeout_s
        return await self._resend(self._transport.unary, name, request, response, timeout_s=wait_s)

    async def put_chunks(
        self,
        chunks: Iterable[str | Tokens],
        *,
        tier: str = "auto",
        wait: bool = True,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> list[PutChunk]:
        """Have chunks prefilled and stored; with `wait`, return once they are committed. A chunk that fails
        says so in its `state`.

        `ttl_s` is how long they are kept at most, in seconds; by default until the store needs their room. A
        chunk that is there already is kept for so long from now at least: a put never shortens a lifetime.
        Raises `InvalidField` for a lifetime that is not above 0, or longer than ten years."""
        if isinstance(chunks, str):
            raise InvalidField("chunks", "is one string; give a list of chunks")
        results: list[PutChunk] = []
        for batch in messages.batches(chunks):
            request = pb.PutChunksRequest(
                namespace=self._namespace, chunks=batch, tier=tier, wait=wait, ttl_s=ttl_s
            )
            response = await self._unary("PutChunks", request, pb.PutChunksResponse, timeout_s)
            results += map(messages.put_of_wire, response.results)
        return results

    async def prefetch(self, segments: Iterable[Segment]) -> Prefetched:
        """Start to bring chunks into RAM: call it when retrieval returns, before the prompt exists."""
        wire = messages.segments_to_wire(segments)
        request = pb.PrefetchChunksRequest(namespace=self._namespace, segments=wire)
        response = await self._unary("Prefetch", request, pb.PrefetchChunksResponse)
        return Prefetched(tuple(response.keys), response.accepted)

    async def tokenize(self, texts: Sequence[str]) -> list[TokenizedText]:
        """Ids and chunk keys of texts, each alone."""
        request = pb.TokenizeRequest(namespace=self._namespace, texts=texts)
        response = await self._unary("Tokenize", request, pb.TokenizeResponse)
        return [TokenizedText(tuple(text.token_ids), text.key) for text in response.texts]

    async def list_models(self) -> list[ServedModel]:
        """The models that are served, each with every name that it answers to."""
        response = await self._unary("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse)
        return [messages.model_of_wire(model) for model in response.models]

    async def get_chunk(self, key: str) -> StoredChunk | None:
        """The chunk that the store holds under a key, or None."""
        request = pb.GetChunkRequest(namespace=self._namespace, key=key)
        try:
            response = await self._unary("GetChunk", request, pb.GetChunkResponse)
        except NotFound:
            return None
        return messages.chunk_of_wire(response.chunk)

    async def delete_chunk(self, key: str) -> bool:
        """Erase a chunk and return whether it was there. Raises `Unavailable` where a shard that may hold it
        does not answer: try again once it does."""
        request = pb.DeleteChunkRequest(namespace=self._namespace, key=key)
        response = await self._unary("DeleteChunk", request, pb.DeleteChunkResponse)
        return bool(response.deleted)

    async def delete_document(
        self, corpus: str, document_id: str, *, timeout_s: float | None = None
    ) -> ErasureReceipt:
        """Erase a document of a precomputed corpus, and every chunk of it that no other document has. Raises
        `NotFound` where the gateway has no ledger, and `Unavailable` as `delete_chunk` does."""
        request = pb.DeleteDocumentRequest(namespace=self._namespace, corpus=corpus, document_id=document_id)
        wait_s = timeout_s or ERASE_TIMEOUT_S
        response = await self._unary("DeleteDocument", request, pb.DeleteDocumentResponse, wait_s)
        return messages.receipt_of_wire(response.receipt, response.deleted)

    async def erase_namespace(self, *, timeout_s: float | None = None) -> ErasureReceipt:
        """Erase everything that is stored of the namespace. Raises `Unavailable` as `delete_chunk` does."""
        request = pb.EraseNamespaceRequest(namespace=self._namespace)
        wait_s = timeout_s or ERASE_TIMEOUT_S
        response = await self._unary("EraseNamespace", request, pb.EraseNamespaceResponse, wait_s)
        return messages.receipt_of_wire(response.receipt)

    def list_chunks(self) -> AsyncGenerator[StoredChunk, None]:
        """Every chunk of the namespace, in key order."""
        return self._list_pages()

    async def _list_pages(self) -> AsyncGenerator[StoredChunk, None]:
        token = ""
        while True:
            request = pb.ListChunksRequest(namespace=self._namespace, page_size=PAGE, page_token=token)
            response = await self._unary("ListChunks", request, pb.ListChunksResponse)
            for chunk in response.chunks:
                yield messages.chunk_of_wire(chunk)
            token = response.next_page_token
            if not token:
                return

    def stream(
        self, segments: Iterable[Segment], question: str | Tokens, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta | Answer, None]:
        """The answer as it comes, and the whole answer last. Closing the generator stops the engine."""
        return self._stream(segments, question, options)

    async def _stream(
        self, segments: Iterable[Segment], question: str | Tokens, options: GenerateOptions
    ) -> AsyncGenerator[Delta | Answer, None]:
        request = self._request(segments, question, options)
        timeout_s = options.get("timeout_s") or self._transport.options.timeout_s
        answer = messages.Assembled()
        first, rest = await self._resend(self._begin_answer, request, timeout_s=timeout_s)
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
        """The first message of an answer and the others."""
        stream = self._transport.stream("Generate", request, pb.GenerateResponse, timeout_s)
        try:
            return await anext(stream), stream
        except StopAsyncIteration:
            raise Unavailable(f"{self._transport.address}: answered nothing") from None

    def _request(
        self, segments: Iterable[Segment], question: str | Tokens, options: GenerateOptions
    ) -> pb.GenerateRequest:
        for name in options:
            if name not in GenerateOptions.__annotations__:
                raise UnknownField(name, GenerateOptions.__annotations__)
        sampling = options.get("sampling") or Sampling()
        if "max_tokens" in options:
            sampling = dataclasses.replace(sampling, max_tokens=options["max_tokens"])
        own = ("max_tokens", "sampling", "timeout_s")
        constraints: dict[str, Any] = {name: value for name, value in options.items() if name not in own}
        return pb.GenerateRequest(
            namespace=self._namespace,
            segments=messages.segments_to_wire(segments),
            question=messages.content_to_wire(question),
            sampling=messages.sampling_to_wire(sampling),
            **constraints,
        )

    async def generate(
        self, segments: Iterable[Segment], question: str | Tokens, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """The whole answer to a question over ordered segments. A question of text is the rest of the user's
        message, which the service's prompt form ends; one of tokens is taken as it is."""
        async with aclosing(self._stream(segments, question, options)) as events:
            async for event in events:
                if isinstance(event, Answer):
                    return event
        raise Unavailable(f"{self._transport.address}: the answer had no end")

    async def close(self) -> None:
        """Idempotent."""
        await self._transport.close()


class AsyncClient(_Calls):
    """A gateway for programs with an event loop. Use `async with`, or `close` it."""

    def __init__(
        self, address: str, namespace: str, *, token: str | None = None, options: ClientOptions | None = None
    ) -> None:
        """``address`` is `host:port`, ``namespace`` the chunks' tenant. Raises `InvalidField`."""
        super().__init__(Transport(address, _options(token, options), is_blocking=False), namespace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client:
    """A gateway for programs without an event loop. Thread-safe. Use `with`, or `close` it."""

    def __init__(
        self, address: str, namespace: str, *, token: str | None = None, options: ClientOptions | None = None
    ) -> None:
        """As `AsyncClient`."""
        transport = Transport(address, _options(token, options), is_blocking=True)
        self._calls = _Calls(transport, namespace)

    def put_chunks(
        self,
        chunks: Iterable[str | Tokens],
        *,
        tier: str = "auto",
        wait: bool = True,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> list[PutChunk]:
        """As `AsyncClient.put_chunks`."""
        return run_to_completion(
            self._calls.put_chunks(chunks, tier=tier, wait=wait, ttl_s=ttl_s, timeout_s=timeout_s)
        )

    def prefetch(self, segments: Iterable[Segment]) -> Prefetched:
        """As `AsyncClient.prefetch`."""
        return run_to_completion(self._calls.prefetch(segments))

    def generate(
        self, segments: Iterable[Segment], question: str | Tokens, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """As `AsyncClient.generate`."""
        return run_to_completion(self._calls.generate(segments, question, **options))

    def stream(
        self, segments: Iterable[Segment], question: str | Tokens, **options: Unpack[GenerateOptions]
    ) -> Iterator[Delta | Answer]:
        """As `AsyncClient.stream`."""
        return iterate(self._calls.stream(segments, question, **options))

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedText]:
        """As `AsyncClient.tokenize`."""
        return run_to_completion(self._calls.tokenize(texts))

    def list_models(self) -> list[ServedModel]:
        """As `AsyncClient.list_models`."""
        return run_to_completion(self._calls.list_models())

    def list_chunks(self) -> Iterator[StoredChunk]:
        """As `AsyncClient.list_chunks`."""
        return iterate(self._calls.list_chunks())

    def get_chunk(self, key: str) -> StoredChunk | None:
        """As `AsyncClient.get_chunk`."""
        return run_to_completion(self._calls.get_chunk(key))

    def delete_chunk(self, key: str) -> bool:
        """As `AsyncClient.delete_chunk`."""
        return run_to_completion(self._calls.delete_chunk(key))

    def delete_document(
        self, corpus: str, document_id: str, *, timeout_s: float | None = None
    ) -> ErasureReceipt:
        """As `AsyncClient.delete_document`."""
        return run_to_completion(self._calls.delete_document(corpus, document_id, timeout_s=timeout_s))

    def erase_namespace(self, *, timeout_s: float | None = None) -> ErasureReceipt:
        """As `AsyncClient.erase_namespace`."""
        return run_to_completion(self._calls.erase_namespace(timeout_s=timeout_s))

    def close(self) -> None:
        """Idempotent."""
        run_to_completion(self._calls.close())

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
    """Whether a call that failed with `error` may be sent again.

    `Unavailable` alone does not decide: failures inside a gateway (INTERNAL, UNKNOWN) and cancelled calls are
    read as `Unavailable` too, and may have had an effect. RESOURCE_EXHAUSTED names no time to wait: further
    attempts would only add to the load.
    """
    status = error.__cause__
    if not isinstance(error, Unavailable) or not isinstance(status, grpc.RpcError):
        return False
    return bool(status.code() is grpc.StatusCode.UNAVAILABLE)
