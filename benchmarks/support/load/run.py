"""Sends an open-loop load to an OpenAI endpoint and measures every answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.support.load.profile import Request
from benchmarks.support.load.report import Sample
from kintsugi.core.accounting import ACCOUNTING_KEY
from kintsugi.core.deploy import PORT_MAX
from kintsugi.core.errors import InvalidField
from kintsugi.core.request import PARAMS_KEY

TIMEOUT_S = 300.0
CONNECT_S = 10.0
_DATA = "data: "
_DONE = "[DONE]"


@dataclass(frozen=True)
class Endpoint:
    """The endpoint of a load, and the form of its requests. Raises `InvalidField` for a bad URL."""

    url: str
    """Includes the version: `http://127.0.0.1:8000/v1`."""
    model: str = ""
    """Empty: the first model that the endpoint lists."""
    api_key: str = ""
    namespace: str = ""
    """Namespace of the chunks, where the endpoint is a Kintsugi gateway."""
    chat: bool = False
    """Whether to ask for chat completions instead of completions."""

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise InvalidField("url", f"{self.url!r} is not a URL ({error})") from None
        if url.scheme not in ("http", "https") or not url.host or (url.port or 1) > PORT_MAX:
            raise InvalidField(
                "url",
                f"{self.url!r} must be http:// or https:// with a host, such as http://127.0.0.1:8000/v1",
            )

    @property
    def headers(self) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return headers | ({"x-kintsugi-namespace": self.namespace} if self.namespace else {})

    def body(self, prompt: str, answer_tokens: int) -> dict[str, Any]:
        content = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return {
            "model": self.model,
            **content,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"


@dataclass
class _Answer:
    """What has arrived of a streamed answer."""

    times_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accounting: Mapping[str, Any] | None = None
    error: str = ""

    def take(self, data: str, now_s: float) -> None:
        """Read one event. Ignores whatever does not have OpenAI's form. Raises `ValueError` for bad JSON."""
        event = _mapping(json.loads(data))
        if "error" in event:
            error = event["error"]
            self.error = str((error if isinstance(error, str) else _mapping(error).get("message")) or "error")
        choices = event.get("choices")
        for choice in map(_mapping, choices if isinstance(choices, list) else ()):
            piece = choice.get("text") or _mapping(choice.get("delta")).get("content")
            if piece or choice.get("finish_reason"):
                self.times_s.append(now_s)
                self.text += piece if isinstance(piece, str) else ""
        usage = _mapping(event.get("usage"))
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
        self.accounting = _mapping(_mapping(event.get(ACCOUNTING_KEY)).get(PARAMS_KEY)) or self.accounting


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def client_of(endpoint: Endpoint) -> httpx.AsyncClient:
    """A client without a limit on connections: a pool that is too small would become the queue."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S, pool=None)
    return httpx.AsyncClient(base_url=endpoint.url, headers=endpoint.headers, limits=limits, timeout=timeout)


async def run(
    endpoint: Endpoint,
    requests: Sequence[Request],
    prompts: Sequence[str],
    answer_tokens: int,
    say: Callable[[int], None] = lambda done: None,
) -> list[Sample]:
    """Send each request when it is due; return the samples in order. Calls `say` with how many have ended."""
    ended = 0

    async def one(client: httpx.AsyncClient, request: Request, prompt: str, began_s: float) -> Sample:
        nonlocal ended
        await asyncio.sleep(max(0.0, began_s + request.at_s - time.perf_counter()))
        sample = await measure_request(client, endpoint, request.at_s, began_s, prompt, answer_tokens)
        ended += 1
        say(ended)
        return sample

    async with client_of(endpoint) as client:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(client, request, prompt, began_s))
                for request, prompt in zip(requests, prompts, strict=True)
            ]
    return [task.result() for task in tasks]


async def measure_request(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    at_s: float,
    began_s: float,
    prompt: str,
    answer_tokens: int,
) -> Sample:
    """Send one request, due `at_s` after `began_s` (`time.perf_counter`). Failures are in the sample."""
    due_s = began_s + at_s
    late_s = time.perf_counter() - due_s
    answer = _Answer()
    try:
        body = endpoint.body(prompt, answer_tokens)
        async with client.stream("POST", endpoint.path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                answer.error = f"HTTP {response.status_code}"
            async for line in response.aiter_lines():
                if line.startswith(_DATA) and not line.endswith(_DONE):
                    answer.take(line.removeprefix(_DATA), time.perf_counter())
    except (httpx.HTTPError, ValueError) as error:
        answer.error = type(error).__name__
    times_s = answer.times_s
    return Sample(
        at_s=at_s,
        ttft_s=times_s[0] - due_s if times_s else None,
        done_s=time.perf_counter() - due_s,
        itl_s=tuple(later - earlier for earlier, later in itertools.pairwise(times_s)),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        text=answer.text,
        error=answer.error,
        accounting=answer.accounting,
        late_s=late_s,
    )
