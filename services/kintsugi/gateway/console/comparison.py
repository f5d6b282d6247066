"""Answers one question by full prefill and then by a blend, and compares the two answers.

Concurrent comparisons would distort each other's times, so `ComparisonTurns` runs one at a time in a gateway,
each for at most `TURN_S`. Neither answer uses the engine's prefix cache: a repeated question takes as long as
the first time. Afterwards the tokens of the full prefill's answer are scored in both ways: their
probabilities show what the blend lost even if the two texts are equal.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kintsugi.core.errors import DeadlineExceeded, InvalidField, ResourceExhausted
from kintsugi.core.exchange import EngineDelta
from kintsugi.core.plan import end_line
from kintsugi.core.request import BlendOptions, parse_selector
from kintsugi.core.schema import STRICT
from kintsugi.core.spaces import Span, TokenIds
from kintsugi.gateway.fronts.errors import grpc_status_of
from kintsugi.gateway.fronts.identity import needs_credentials
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.prompts import Finished, GenerateCall, PromptAsk, Resolved
from kintsugi.gateway.requests import ServedRequest
from kintsugi.gateway.texts.segments import Segment
from kintsugi.gateway.tracing import TraceSpan
from kintsugi.store.protocol.access import Caller, Verb

DOCUMENTS_MAX = 128
TITLE_CHARS_MAX = 200
ANSWER_TOKENS_MAX = 256
SCORED_TOKENS_MAX = 16
"""Maximum number of the answer's first tokens that are scored, each by one request in either way."""
WAITING_MAX = 16
"""Maximum number of waiting comparisons; further ones are refused."""
TURN_S = 600.0
"""Maximum duration of a comparison, because others wait for their turn."""

_SEGMENT = re.compile(r"(?:segments|chunks)\[(\d+)\]")
Message = dict[str, Any]
"""One line of the stream: `event`, and the fields of this kind of event."""
Send = Callable[[Message], None]
DecodeToken = Callable[[int], str]
"""Maps a token id to its text."""
Authenticate = Callable[[], Caller]
"""Authenticates the caller again. Raises `Unauthenticated`."""


@dataclass(frozen=True)
class ConsoleDocument:
    """One chunk of the prompt."""

    __pydantic_config__ = STRICT

    title: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """The request for a comparison."""

    __pydantic_config__ = STRICT

    question: str
    documents: tuple[ConsoleDocument, ...]
    namespace: str = "console"
    selector: str | None = None
    ratio: float | None = None
    max_tokens: int = 48
    score: bool = True
    """Whether to score the answer in both ways."""

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise InvalidField("question", "is empty; write what you want to know about the documents")
        if not self.documents:
            raise InvalidField("documents", "is empty; add a sample document or drop a text file first")
        if len(self.documents) > DOCUMENTS_MAX:
            raise InvalidField(
                "documents", f"has {len(self.documents)}; at most {DOCUMENTS_MAX} are allowed: remove some"
            )
        for index, document in enumerate(self.documents):
            if not document.text.strip():
                raise InvalidField(f"documents[{index}]", "has no text; write some or remove it")
            if len(document.title) > TITLE_CHARS_MAX:
                raise InvalidField(
                    f"documents[{index}].title", f"is longer than {TITLE_CHARS_MAX} characters"
                )
        if not 1 <= self.max_tokens <= ANSWER_TOKENS_MAX:
            raise InvalidField("max_tokens", f"{self.max_tokens} is outside [1, {ANSWER_TOKENS_MAX}]")
        _ = self.options  # validates them

    @property
    def options(self) -> BlendOptions:
        """Raises `InvalidField`."""
        return BlendOptions(self.ratio, None if self.selector is None else parse_selector(self.selector))

    @property
    def chunks(self) -> tuple[Segment, ...]:
        return tuple(Segment(text=end_line(document.text)) for document in self.documents)

    def name_documents(self, error: InvalidField) -> InvalidField:
        """Return the error of the prompt or of the chunks in the page's terms."""

        def name(found: re.Match[str]) -> str:
            index = int(found[1])
            return f"document {index + 1} ({self.documents[index].title!r})"

        problem, count = _SEGMENT.subn(name, str(error))
        whole = problem.removeprefix("segments: ").removeprefix("chunks: ")
        return InvalidField("documents", whole) if count or whole != problem else error

    def call(self, *, no_blend: bool, explain: bool) -> GenerateCall:
        """Return the request for one of the two answers, which uses no prefix cache."""
        return GenerateCall(
            self.namespace,
            self.chunks,
            Segment(text=f"\n{self.question.strip()}", plain=True),
            {"max_tokens": self.max_tokens, "temperature": 0.0},
            BlendOptions() if no_blend else self.options,
            explain=explain,
            no_blend=no_blend,
            measurement=uuid.uuid4().hex,
        )


@dataclass(frozen=True)
class CountRequest:
    """Texts whose tokens are counted."""

    __pydantic_config__ = STRICT

    texts: tuple[str, ...]
    namespace: str = "console"

    async def count(self, gateway: Gateway, caller: Caller) -> list[int]:
        """Return the length of each text as a document of a comparison, in tokens of the served model."""
        written = [end_line(text) for text in self.texts if text.strip()]
        found = iter(await gateway.tokenize(caller, self.namespace, written))
        return [next(found).num_tokens if text.strip() else 0 for text in self.texts]


class ComparisonTurns:
    """Lets one comparison run at a time. For one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._callers: list[str | None] = []
        """Callers of the comparisons that run or wait."""

    @property
    def is_taken(self) -> bool:
        """Whether a comparison is running."""
        return self._lock.locked()

    @asynccontextmanager
    async def take(self, caller: str | None) -> AsyncIterator[None]:
        """Wait for the turn and hold it while the block runs. ``caller``: its name; None if callers cannot be
        told apart. Raises `ResourceExhausted` if the caller has another comparison or too many wait."""
        if caller is not None and caller in self._callers:
            raise ResourceExhausted(
                f"{caller!r} has a comparison already; wait for its end, or stop it in the tab that runs it"
            )
        if len(self._callers) > WAITING_MAX:
            raise ResourceExhausted(f"{WAITING_MAX} comparisons wait for their turn; try again in a minute")
        self._callers.append(caller)
        try:
            async with self._lock:
                yield
        finally:
            self._callers.remove(caller)


class ScoreAsk(PromptAsk):
    """Requests the probability of an answer's last token after the prompt and the answer's other tokens."""

    def __init__(self, gateway: Gateway, caller: Caller, call: GenerateCall, answer: Sequence[int]) -> None:
        super().__init__(gateway.prompts, caller, call)
        self.is_counted = False  # no client sent it
        self._answer = TokenIds.of(answer)
        self.logprob: float | None = None
        """Logarithm of the probability; None if the engine has not reported it."""

    async def prepare(self, trace: TraceSpan) -> Sequence[Resolved]:
        events = await super().prepare(trace)
        before = TokenIds.of([*self._request.prompt_token_ids, *self._answer[:-1]])
        self._request = replace(self._request, prompt_token_ids=before, scored_token=int(self._answer[-1]))
        return events

    def read(self, item: EngineDelta) -> Sequence[EngineDelta]:
        if item.logprob is not None:
            self.logprob = item.logprob
        return super().read(item)


@dataclass
class _Way:
    """One of the two answers while it arrives."""

    name: str
    call: GenerateCall
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished: Finished | None = None
    """None until the answer is complete."""


class Comparer:
    """Runs comparisons for the callers of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._turns = ComparisonTurns()

    async def run(
        self, authenticate: Authenticate, asked: Comparison, served: ServedRequest
    ) -> AsyncGenerator[Message, None]:
        """Stream the comparison's messages. Closing the generator ends the work in the engine. ``served`` is
        the caller's request; the keys of the chunks are added to it. Raises the error that refuses the
        request, and `DeadlineExceeded`, possibly after some messages."""
        # The work does not wait for its reader, because other comparisons wait for their turn.
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        work = asyncio.create_task(self._work(authenticate, asked, served, messages))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _work(
        self,
        authenticate: Authenticate,
        asked: Comparison,
        served: ServedRequest,
        messages: asyncio.Queue[Message | None],
    ) -> None:
        caller = served.caller if needs_credentials(self._gateway.access) else None
        try:
            if self._turns.is_taken:
                messages.put_nowait({"event": "waiting"})
            async with self._turns.take(caller), asyncio.timeout(TURN_S):
                await self._compare(authenticate, asked, served, messages.put_nowait)
        except InvalidField as error:
            raise asked.name_documents(error) from error
        except TimeoutError:
            raise DeadlineExceeded(
                f"the comparison took longer than {TURN_S:.0f} s; compare fewer documents, or ask for a "
                "shorter answer"
            ) from None
        finally:
            messages.put_nowait(None)

    async def _compare(
        self, authenticate: Authenticate, asked: Comparison, served: ServedRequest, send: Send
    ) -> None:
        caller = authenticate()
        explain = caller.may(Verb.LIST) and not self._gateway.hides_chunks(caller, asked.namespace)
        send({"event": "storing", "chunks": len(asked.documents)})
        send(await self._store(authenticate(), asked, served))
        full = _Way("full", asked.call(no_blend=True, explain=False))
        blend = _Way("blend", asked.call(no_blend=False, explain=explain))
        for way in (full, blend):
            # Authenticate again: the token may have expired or been revoked meanwhile.
            await self._answer(authenticate(), asked, way, send)
        if asked.score:
            send({"event": "scoring", "tokens": min(len(full.token_ids), SCORED_TOKENS_MAX)})
            send(await self._score(authenticate(), full, blend))
        send({"event": "done"})

    async def _store(self, caller: Caller, asked: Comparison, served: ServedRequest) -> Message:
        """Store the chunks. If the caller may not, the blend uses the chunks that others have stored."""
        caller.authorize(asked.namespace, Verb.GENERATE)
        if not caller.may(Verb.PUT):
            problem = "chunks were not stored: your token lacks the verb put"
            return {"event": "stored", "chunks": [], "problem": problem}
        # A separate request, with its own verb, in the log and the audit log; metrics do not count it.
        put = ServedRequest("PutChunks", served.headers, None, "OK", audit=served.audit)
        put.request_id, put.caller, put.namespace = served.request_id, caller.name, asked.namespace
        with put.record(grpc_status_of):
            puts = await self._gateway.put_chunks(caller, asked.namespace, asked.chunks)
            put.keys = served.keys = [one.key.hex for one in puts]
        failed = next((put.reason for put in puts if put.reason), "")
        return {
            "event": "stored",
            "chunks": [{"tokens": put.num_tokens, "state": put.state.value} for put in puts],
            "problem": f"a chunk was not stored: {failed}" if failed else "",
        }

    async def _answer(self, caller: Caller, asked: Comparison, way: _Way, send: Send) -> None:
        ask = PromptAsk(self._gateway.prompts, caller, way.call)
        began_s = time.perf_counter()
        async with aclosing(self._gateway.answer(caller, ask)) as events:
            async for event in events:
                if isinstance(event, Resolved):
                    send({"event": "begun", "way": way.name, "prompt_tokens": event.prompt_tokens})
                elif isinstance(event, EngineDelta):
                    way.token_ids += event.token_ids
                    way.texts.append(event.text)
                    send({"event": "text", "way": way.name, "text": event.text})
                else:
                    way.finished = event
        assert way.finished is not None, "a complete answer ends with `Finished`"
        total_ms = (time.perf_counter() - began_s) * 1e3
        send({"event": "answered", "way": way.name, **_figures(way, total_ms)})
        if way.call.explain:
            send(await asyncio.to_thread(self._describe, ask, asked, way.finished))

    def _describe(self, ask: PromptAsk, asked: Comparison, finished: Finished) -> Message:
        """Describe the blend layer by layer. Decodes every token of the prompt."""
        detokenize = self._gateway.detokenize
        decode = (lambda token: f"[{token}]") if detokenize is None else lambda token: detokenize([token])
        titles = [document.title for document in asked.documents]
        parts = parts_of(list(ask.prompt.token_ids), ask.prompt.spans, titles, decode)
        return {"event": "view", "view": view_of(parts, finished.accounting)}

    async def _score(self, caller: Caller, full: _Way, blend: _Way) -> Message:
        """Compare the probabilities of the full prefill's answer in both ways."""
        answer = full.token_ids[:SCORED_TOKENS_MAX]
        scored = [await self._score_under(caller, way.call, answer) for way in (full, blend)]
        rows = [row for row in zip(*scored, strict=True) if None not in row]
        detokenize = self._gateway.detokenize
        return {
            "event": "quality",
            "tokens": [
                {
                    "text": detokenize([token]) if detokenize else f"[{token}]",
                    "full": None if first is None else math.exp(first),
                    "blend": None if second is None else math.exp(second),
                }
                for token, first, second in zip(answer, *scored, strict=True)
            ],
            "full": _mean_probability([first for first, _ in rows]),
            "blend": _mean_probability([second for _, second in rows]),
            "same": full.token_ids == blend.token_ids,
        }

    async def _score_under(
        self, caller: Caller, call: GenerateCall, answer: Sequence[int]
    ) -> list[float | None]:
        """Return the logprob of each token; None where the engine did not report one."""
        one = replace(call, sampling={"max_tokens": 1, "temperature": 0.0}, explain=False)
        # One after the other: a comparison holds one of its tenant's slots, and a failure ends it.
        found: list[float | None] = []
        for length in range(1, len(answer) + 1):
            ask = ScoreAsk(self._gateway, caller, one, answer[:length])
            async with aclosing(self._gateway.answer(caller, ask)) as events:
                async for _ in events:
                    pass
            found.append(ask.logprob)
        return found


def _mean_probability(logprobs: Sequence[float | None]) -> float | None:
    """Return the geometric mean of the probabilities; None without any."""
    known = [one for one in logprobs if one is not None]
    return math.exp(sum(known) / len(known)) if known else None


def _figures(way: _Way, total_ms: float) -> Message:
    finished = way.finished
    assert finished is not None
    accounting = finished.accounting
    names = ("outcome", "reason", "selector", "ratio", "chunks_hit", "chunks_missed", "tokens_hit")
    more = ("tokens_recomputed", "tokens_question", "bytes_loaded", "transport", "load_wait_ms", "compute_ms")
    return {
        "text": "".join(way.texts),
        "ttft_ms": finished.ttft_ms,
        "total_ms": total_ms,
        "prompt_tokens": finished.usage.prompt_tokens,
        "answer_tokens": finished.usage.completion_tokens,
        "finish_reason": finished.finish_reason,
        "cost": accounting.get("cost", 1.0 if way.call.no_blend else None),
        "accounting": {name: accounting[name] for name in (*names, *more) if name in accounting},
    }


@dataclass(frozen=True)
class ViewPart:
    """A chunk, or the text before, between or after the chunks."""

    title: str
    tokens: list[str]


def parts_of(
    token_ids: Sequence[int], spans: Sequence[Span], titles: Sequence[str], decode: DecodeToken
) -> list[ViewPart]:
    """Split the prompt at the chunks' boundaries. ``titles`` has one title for each span."""
    cuts: list[tuple[str, int, int]] = []
    end = 0
    for index, (span, title) in enumerate(zip(spans, titles, strict=True)):
        cuts.append(("Between chunks" if index else "Prefix", end, span.start))
        cuts.append((f"{index + 1}. {title}", span.start, span.end))
        end = span.end
    cuts.append(("Question", end, len(token_ids)))
    return [
        ViewPart(title, [decode(token) for token in token_ids[start:end]])
        for title, start, end in cuts
        if start < end
    ]


def view_of(parts: Sequence[ViewPart], accounting: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the view as JSON. `layers` has the positions that each layer computed. `layers` and `timeline`
    are empty without a blend, and for an answer that was not explained."""
    found = accounting or {}
    by_layer = found.get("recomputed_positions") or {}
    return {
        "parts": [{"title": part.title, "tokens": part.tokens} for part in parts],
        "cached": int(found.get("tokens_prefix_cached", 0)),
        "layers": [sorted(by_layer[layer]) for layer in sorted(by_layer, key=int)],
        "timeline": [dict(layer) for layer in found.get("timeline") or ()],
    }
