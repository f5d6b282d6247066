"""Requests facts about a service from its gateway. `status` draws conclusions from these `ServiceFacts`."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from kintsugi.core.errors import InvalidField

DEFAULT_URL = "http://127.0.0.1:8000"
PATH = "/v1/kintsugi/service"
TIMEOUT_S = 15.0
"""Longer than a gateway waits for its engines and shards."""
ANSWER_BYTES_MAX = 1 << 20


class Contact(StrEnum):
    """The outcome of the request to the gateway."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """Nothing listens at the address."""
    SILENT = "silent"
    """No answer within `TIMEOUT_S`."""
    UNKNOWN_HOST = "unknown_host"
    UNTRUSTED = "untrusted"
    """TLS failed."""
    NOT_HTTP = "not_http"
    """A server listens but does not speak HTTP."""
    FOREIGN = "foreign"
    """An HTTP server that is not a Kintsugi gateway."""
    UNAUTHENTICATED = "unauthenticated"
    FAILED = "failed"


@dataclass(frozen=True)
class EngineFacts:
    """Facts about one of the engines, which are all alike."""

    error: str | None
    """Why no engine answers; all other fields are then empty."""
    model: str = ""
    max_model_len: int = 0
    form: str = ""
    blending: str = ""
    """`on`, or why not."""
    version: str = ""
    vllm: str = ""


@dataclass(frozen=True)
class StoreFacts:
    """Facts about all shards together."""

    error: str | None
    """Why the store does not answer; all other fields are then empty."""
    shards: int = 0
    """Number of shards that answer."""
    shards_away: tuple[str, ...] = ()
    """Addresses of shards that should answer and do not."""
    chunks: int = 0
    bytes_used: int = 0
    bytes_capacity: int = 0
    durable: bool = False


@dataclass(frozen=True)
class AnswerCount:
    """Number of answers with this outcome and reason since the gateway started."""

    outcome: str
    reason: str
    count: int


@dataclass(frozen=True)
class CallerFacts:
    """The caller's identity and permissions, as the gateway sees them."""

    name: str
    namespaces: tuple[str, ...]
    verbs: tuple[str, ...]


@dataclass(frozen=True)
class ServiceFacts:
    """What a gateway answered, or why it did not."""

    url: str
    contact: Contact
    detail: str = ""
    """The error message."""
    version: str = ""
    round_trip_s: float = 0.0
    clock_ahead_s: float = 0.0
    """By how much the gateway's clock is ahead of ours; uncertain by half of `round_trip_s`."""
    has_tokens: bool = False
    caller: CallerFacts | None = None
    engines: EngineFacts | None = None
    store: StoreFacts | None = None
    """None: the caller lacks the permission."""
    answers: tuple[AnswerCount, ...] | None = None
    """None: the caller lacks the permission."""
    tokens_discovered: int | None = None
    """Tokens of hit chunks that requests did not declare. None: the caller lacks the permission."""
    discovering: tuple[str, ...] | None = None
    """Patterns of namespaces in which chunks are discovered. None: the caller lacks the permission."""


@dataclass(frozen=True, kw_only=True)
class ServiceLink:
    """The options that name a running service."""

    url: Annotated[str, typer.Option(help="URL of the gateway's HTTP port, with or without /v1.")] = (
        DEFAULT_URL
    )
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = ""
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authority that signed the gateway's certificate.")
    ] = None


def parse_url(text: str) -> str:
    """Return scheme, host and port of `127.0.0.1:8000` or `http://127.0.0.1:8000/v1/`. Raises
    `InvalidField`."""
    text = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_address = False
    if not is_address:
        raise InvalidField("url", f"{text!r} must be the gateway's HTTP address, such as {DEFAULT_URL}")
    return f"{parts.scheme}://{parts.netloc}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error: the token must not be sent to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def ask_service(link: ServiceLink, clock_s: Callable[[], float] = time.time) -> ServiceFacts:
    """Request the facts about a service. Raises `InvalidField` for invalid options; a failing service is a
    fact."""
    url = parse_url(link.url)
    headers = {"authorization": f"Bearer {link.api_key}"} if link.api_key else {}
    began_s = clock_s()
    try:
        https = urllib.request.HTTPSHandler(context=_trust(link.tls_ca))
        opener = urllib.request.build_opener(_NoRedirects, https)
        request = urllib.request.Request(url + PATH, headers=headers)
        with opener.open(request, timeout=TIMEOUT_S) as response:
            body = response.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException, ValueError) as error:
        contact, detail = _classify(error)
        return ServiceFacts(url, contact, detail)
    ended_s = clock_s()
    try:
        return _read(url, json.loads(body), began_s, ended_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServiceFacts(url, Contact.FOREIGN, "it answers, but not as a gateway of Kintsugi does")


def _trust(authority: Path | None) -> ssl.SSLContext | None:
    """Return a TLS context that trusts this authority; None: the default. Raises `InvalidField`."""
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise InvalidField("tls_ca", f"{authority} is no PEM file of an authority ({error})") from error


def _classify(error: Exception) -> tuple[Contact, str]:
    if isinstance(error, urllib.error.HTTPError):
        with error:
            text = _message_of(error.read(ANSWER_BYTES_MAX)) or f"HTTP status {error.code}"
        if error.code == 401:
            return Contact.UNAUTHENTICATED, text
        return (Contact.FOREIGN if error.code in (404, 405, 501) else Contact.FAILED), text
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    detail = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    kinds: tuple[tuple[type[BaseException], Contact], ...] = (
        (ssl.SSLError, Contact.UNTRUSTED),
        (ConnectionRefusedError, Contact.REFUSED),
        (socket.gaierror, Contact.UNKNOWN_HOST),
        (TimeoutError, Contact.SILENT),
        (ConnectionResetError, Contact.NOT_HTTP),
        (http.client.HTTPException, Contact.NOT_HTTP),
    )
    for kind, contact in kinds:
        if isinstance(cause, kind):
            return contact, " ".join(detail.split())[:200]
    return Contact.FAILED, detail


def _message_of(body: bytes) -> str:
    """Return the message of an error in OpenAI's format; empty for any other body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _read(url: str, document: Mapping[str, Any], began_s: float, ended_s: float) -> ServiceFacts:
    """Parse the gateway's answer. Fields that a later gateway adds are ignored."""
    caller, engines, store = document["caller"], document["engines"], document["store"]
    answers, discovering = document["answers"], document["discovering"]
    return ServiceFacts(
        url,
        Contact.ANSWERED,
        version=document["version"],
        round_trip_s=ended_s - began_s,
        clock_ahead_s=document["time_s"] - (began_s + ended_s) / 2,
        has_tokens=document["has_tokens"],
        caller=CallerFacts(caller["name"], tuple(caller["namespaces"]), tuple(caller["verbs"])),
        engines=_pick(EngineFacts, engines),
        store=None if store is None else _pick(StoreFacts, store),
        answers=None if answers is None else tuple(_pick(AnswerCount, one) for one in answers),
        tokens_discovered=document["tokens_discovered"],
        discovering=None if discovering is None else tuple(discovering),
    )


def _pick(kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Make a dataclass from the values that match its fields."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in names
        }
    )
