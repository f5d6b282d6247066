"""One request to a front end: its id and caller, and its entries in metrics, log and audit log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kintsugi.core.errors import KintsugiError
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from kintsugi.gateway.logs import RequestLine
from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.gateway.tracing import TRACE_HEADERS
from kintsugi.store.protocol.access import Verb
from kintsugi.store.protocol.audit import AuditEntry, AuditLog
from kintsugi.store.protocol.grpc_status import DETAIL_CHARS_MAX

log = logging.getLogger("kintsugi.gateway")

REQUEST_ID = "x-request-id"
"""Header or metadata key of the request id, in requests and in answers."""
RESIDENCY_PATH = "/v1/kintsugi/residency"
METHOD_VERBS: Mapping[str, Verb | None] = {
    CHAT_PATH: Verb.GENERATE,
    COMPLETIONS_PATH: Verb.GENERATE,
    RESPONSES_PATH: Verb.GENERATE,
    RESIDENCY_PATH: Verb.LIST,
    "/console/api/compare": Verb.GENERATE,
    "Generate": Verb.GENERATE,
    "Prefetch": Verb.GENERATE,
    "PutChunk": Verb.PUT,
    "PutChunks": Verb.PUT,
    "GetChunk": Verb.LIST,
    "ListChunks": Verb.LIST,
    "DeleteChunk": Verb.DELETE,
    "DeleteDocument": Verb.DELETE,
    "EraseNamespace": Verb.ADMIN,
    "Tokenize": None,
    "ListModels": None,
}
"""The verb that each method requires, for the audit log; None: any verb."""
BODY_READ_S = 30.0
"""Maximum time until a whole body has arrived."""
_VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def choose_request_id(given: str = "") -> str:
    """Return the caller's id if it has 1 to 128 letters, digits, dots, dashes and underscores, or a new
    id."""
    return given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex


@dataclass
class ServedRequest:
    """A request that is being served."""

    method: str
    """The RPC's name, or the path."""
    headers: Mapping[str, str]
    """HTTP headers or gRPC metadata, by their names in lower case."""
    metrics: GatewayMetrics | None
    """None: the request is not counted."""
    status: str | int
    """The gRPC status name or HTTP status with which it ends unless an exception is raised."""
    audit: AuditLog | None = None
    """None: the request is not audited."""
    caller: str = ""
    """The caller's name; empty until it is authenticated."""
    keys: Sequence[str] = ()
    """Hexadecimal keys of the chunks that it names, for the audit log."""
    namespace: str = ""
    failure: Exception | None = None
    """The error that ended it, for the log."""
    request_id: str = field(init=False)
    began_s: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.request_id = choose_request_id(self.headers.get(REQUEST_ID, ""))

    @property
    def trace(self) -> dict[str, str]:
        """W3C trace headers."""
        return {name: self.headers[name] for name in TRACE_HEADERS if name in self.headers}

    @contextmanager
    def record(self, status_of: Callable[[BaseException], str | int]) -> Iterator[None]:
        """Count, log and audit the request when the block ends. Errors of the block are raised again;
        ``status_of`` returns their status. A defect is logged with its traceback."""
        try:
            yield
        except BaseException as error:
            self.status = status_of(error)
            if isinstance(error, Exception):
                self.failure = error
                if not isinstance(error, KintsugiError):
                    log.exception("request %s failed because of a defect", self.request_id)
            raise
        finally:
            if self.metrics is not None:
                self.metrics.count_request(self.method, self.status)
            if log.isEnabledFor(logging.INFO):
                log.info(self._line())
            if self.audit is not None:
                self.audit.write(self._entry())

    @property
    def _error(self) -> str:
        """The failure as text; empty without one."""
        text = "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
        return text[:DETAIL_CHARS_MAX]

    def _entry(self) -> AuditEntry:
        verb, namespace = METHOD_VERBS.get(self.method), self.namespace[:DETAIL_CHARS_MAX]
        status = str(self.status)
        return AuditEntry(
            self.method, status, self.caller, verb, namespace, self.keys, self.request_id, self._error
        )

    def _line(self) -> RequestLine:
        ms = round((time.perf_counter() - self.began_s) * 1e3, 3)
        line = RequestLine(request_id=self.request_id, method=self.method)
        line |= {"namespace": self.namespace[:DETAIL_CHARS_MAX], "status": self.status, "ms": ms}
        return line if self.failure is None else RequestLine(line, error=self._error)
