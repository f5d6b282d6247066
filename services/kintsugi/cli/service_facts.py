"""Requests the facts about a service from its gateway. `kintsugi status` describes them."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from pydantic import TypeAdapter

from kintsugi.core.errors import InvalidField

DEFAULT_URL = "http://127.0.0.1:8000"
PATH = "/v1/kintsugi/service"
TIMEOUT_S = 15.0
"""Timeout of the request; longer than the gateway's own timeouts for engines and shards."""
ANSWER_BYTES_MAX = 1 << 20
REQUIRED = {"version", "caller", "engines", "store"}
"""Fields that every gateway sends."""


class Contact(StrEnum):
    """The outcome of the request to the gateway."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """Nothing listens at the address."""
    SILENT = "silent"
    """No answer within `TIMEOUT_S`."""
    UNTRUSTED = "untrusted"
    """TLS failed."""
    FOREIGN = "foreign"
    """A server that is not the HTTP port of a Kintsugi gateway."""
    UNAUTHENTICATED = "unauthenticated"
    FAILED = "failed"
    """Any other error; `ServiceFacts.detail` names it."""


@dataclass(frozen=True)
class EngineFacts:
    """Facts about one of the engines, which are all equal."""

    error: str | None
    """Why no engine answers; then all other fields are empty."""
    model: str = ""
    max_model_len: int = 0
    form: str = ""
    blending: str = ""
    """`on`, or why not."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `core.gate.GateProgress`."""
    namespace: str = ""
    """The caller's namespace whose evidence `blending` and `progress` show; empty: the one with
    the most progress."""
    learning: Mapping[str, Any] = field(default_factory=dict)
    """`core.exchange.EngineInfo.learning`."""
    version: str = ""
    vllm: str = ""


@dataclass(frozen=True)
class StoreFacts:
    """Facts about all shards together."""

    error: str | None
    """Why the store does not answer; then all other fields are empty."""
    shards: int = 0
    """Number of shards that answer."""
    shards_away: tuple[str, ...] = ()
    """Addresses of the store's shards that do not answer."""
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
class LostFacts:
    """A process of the service that ended unexpectedly."""

    part: str
    at_s: float
    """Unix time in seconds."""
    reason: str
    """A `core.exchange.LossReason`."""
    text: str


@dataclass(frozen=True)
class ServiceFacts:
    """The gateway's answer, or why there is none."""

    url: str
    contact: Contact
    detail: str = ""
    """The error message."""
    version: str = ""
    """Version of Kintsugi that the gateway runs."""
    has_tokens: bool = False
    caller: CallerFacts | None = None
    engines: EngineFacts | None = None
    store: StoreFacts | None = None
    """None: the caller may not see it."""
    answers: tuple[AnswerCount, ...] | None = None
    """None: the caller may not see it."""
    tokens_discovered: int | None = None
    """Tokens of hit chunks that requests did not declare. None: the caller may not see it."""
    discovering: tuple[str, ...] | None = None
    """Patterns of namespaces in which chunks are discovered. None: the caller may not see it."""
    lost: tuple[LostFacts, ...] | None = None
    """The last processes that ended unexpectedly, oldest first. None: the caller may not see it."""


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


def ask_service(link: ServiceLink) -> ServiceFacts:
    """Request the facts about a service. Raises `InvalidField` for invalid options; other errors are in the
    result. Unknown fields of the answer are ignored: a later gateway may send more."""
    url = parse_url(link.url)
    if not (link.api_key.isascii() and link.api_key.isprintable()):  # the client's error would quote the key
        raise InvalidField("api_key", "must hold visible ASCII characters only; remove a line end")
    headers = {"authorization": f"Bearer {link.api_key}"} if link.api_key else {}
    try:
        https = urllib.request.HTTPSHandler(context=_trust(link.tls_ca))
        opener = urllib.request.build_opener(_NoRedirects, https)
        request = urllib.request.Request(url + PATH, headers=headers)
        with opener.open(request, timeout=TIMEOUT_S) as response:
            body = response.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException, ValueError) as error:
        contact, detail = _classify(error)
        return ServiceFacts(url, contact, detail)
    try:
        document = {**json.loads(body), "url": url, "contact": Contact.ANSWERED}
        if not document.keys() >= REQUIRED:
            raise ValueError("no gateway's answer")
        return TypeAdapter(ServiceFacts).validate_python(document)
    except (ValueError, TypeError, RecursionError):
        return ServiceFacts(url, Contact.FOREIGN, "the server's answer is not that of a Kintsugi gateway")


def _trust(authority: Path | None) -> ssl.SSLContext | None:
    """Return a TLS context that trusts this authority; None: the default. Raises `InvalidField`."""
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise InvalidField("tls_ca", f"{authority} is not a PEM file of an authority ({error})") from error


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
        (TimeoutError, Contact.SILENT),
        (ConnectionResetError, Contact.FOREIGN),
        (http.client.HTTPException, Contact.FOREIGN),
    )
    for kind, contact in kinds:
        if isinstance(cause, kind):
            return contact, " ".join(detail.split())[:200]
    return Contact.FAILED, detail


def _message_of(body: bytes) -> str:
    """Return the message of an error in OpenAI's format; empty for any other body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
