"""Authorises the calls of a shard, and writes them to the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kintsugi.core.errors import InvalidField, KintsugiError, PermissionDenied
from kintsugi.core.namespaces import check_namespace_pattern, includes, matches
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.access import Access, Caller, Verb, identify_call
from kintsugi.store.protocol.audit import AuditEntry, AuditLog
from kintsugi.store.protocol.grpc_status import DETAIL_CHARS_MAX, status_of


class Reach(Enum):
    """Which namespaces a call concerns."""

    NAMESPACE = "the namespace that its message names"
    EVERYTHING = "every namespace"
    NOTHING = "no namespace"


@dataclass(frozen=True)
class Need:
    """Requirements of a call."""

    verb: Verb | None
    """None: any verb."""
    scope: Reach = Reach.NAMESPACE
    is_audited: bool = True
    """False for calls that are too frequent for the log. A refusal is always written."""


NEEDS: Mapping[str, Need] = {
    "lookup": Need(None, is_audited=False),
    "lookup_anchors": Need(Verb.GENERATE, is_audited=False),
    "put_chunk_kv": Need(Verb.PUT),
    "stream_layers": Need(Verb.GENERATE),
    "lease_layers": Need(Verb.GENERATE),
    "prefetch": Need(Verb.GENERATE),
    "retain": Need(Verb.PUT),
    "pin": Need(Verb.PUT),
    # A lease's id is random; only the caller that pinned knows it.
    "unpin": Need(Verb.PUT, Reach.NOTHING),
    "delete": Need(Verb.DELETE),
    "list": Need(Verb.LIST),
    "clear": Need(Verb.ADMIN),
    "put_report": Need(Verb.REPORT, Reach.NOTHING),
    "get_report": Need(None, Reach.NOTHING, is_audited=False),
    "stats": Need(None, Reach.NOTHING, is_audited=False),
    "verify": Need(Verb.GENERATE),
    "drain": Need(Verb.ADMIN, Reach.EVERYTHING),
    # Engines, gateways and other shards poll.
    "list_erasures": Need(Verb.GENERATE, Reach.EVERYTHING, is_audited=False),
    # The arena holds the chunks of every namespace.
    "open_arena": Need(Verb.GENERATE, Reach.EVERYTHING),
}
"""Requirements by the name of the call's handler."""


class ShardGuard:
    """Authorises calls, and writes their results to the audit log."""

    def __init__(self, access: Access | None = None, audit: AuditLog | None = None) -> None:
        """`access` None: every client may make every call."""
        self._access = access or Access()
        self._audit = audit

    @contextmanager
    def admit(self, rpc: str, context: Any) -> Iterator[Admission]:
        """Identify the caller of a call, and record the call's result when the block ends. Raises
        `Unauthenticated`, and `InvalidField` for repeated metadata."""
        need = NEEDS[rpc]
        entry = AuditEntry(rpc, "OK", verb=need.verb)
        admission = None
        try:
            caller = identify_call(self._access, context)
            entry.caller = caller.name
            admission = Admission(caller, need, entry, context)
            yield admission
        except KintsugiError as error:
            entry.result, entry.error = status_of(error).name, str(error)[:DETAIL_CHARS_MAX]
            raise
        except asyncio.CancelledError:  # the client ended the call, as it ends every lease
            entry.result = "CANCELLED"
            raise
        except Exception:
            entry.result = "INTERNAL"
            raise
        finally:
            if self._audit is not None and (need.is_audited or entry.error):
                entry.keys = () if admission is None else _keys_in(admission.request)
                self._audit.write(entry)


@dataclass
class Admission:
    """A call whose caller is known."""

    caller: Caller
    need: Need
    entry: AuditEntry
    context: Any
    """gRPC's context of the call."""
    request: Any = None
    """The message that names the chunks, once it was authorised or refused."""

    def authorize(self, request: Any) -> Any:
        """Authorise a request, and return it. Raises `PermissionDenied`, and `InvalidField` for an invalid
        namespace."""
        inner = request.request if isinstance(request, pb.LeaseLayersRequest) else request
        self.entry.namespace = getattr(inner, "namespace", "")[:DETAIL_CHARS_MAX]
        self.request = inner
        if isinstance(inner, pb.VerifyRequest) and inner.failed_salts:  # removes every copy of these chunks
            self.entry.verb = Verb.DELETE
            self.caller.authorize(inner.namespace, Verb.DELETE)
        match self.need.scope:
            case Reach.NAMESPACE:
                self.caller.authorize(inner.namespace, self.need.verb)
            case Reach.EVERYTHING:
                assert self.need.verb is not None, "what concerns everything needs a verb"
                self.caller.require_everywhere(self.need.verb)
            case Reach.NOTHING if self.need.verb is not None:
                self.caller.require(self.need.verb)
        return request

    def pattern_of(self, request: Any) -> str:
        """Return the pattern of namespaces to which a deletion is charged. Raises `InvalidField`, and
        `PermissionDenied` for namespaces that the caller may not use."""
        if not request.within:
            return self.caller.pattern_of(request.namespace)
        check_namespace_pattern(request.within, "within")
        if not matches(request.within, request.namespace):
            raise InvalidField("within", f"{request.within[:100]!r} does not include the namespace")
        if not any(includes(pattern, request.within) for pattern in self.caller.namespaces):
            raise PermissionDenied(
                f"{self.caller.name!r} may not use every namespace in {request.within!r}; leave `within` out"
            )
        return str(request.within)

    async def authorize_put(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Authorise a put by its header, which comes first, and yield every message. Raises as
        `authorize`."""
        is_first = True
        async for message in messages:
            if is_first:
                is_first = False
                first, payload = wire.parse_payload(message, pb.PutChunkKVRequest)
                if not first.HasField("header") or payload:
                    raise InvalidField(
                        "header", "the first message of a put carries the header and no frames"
                    )
                self.authorize(first.header.manifest)
            yield message


def _keys_in(request: Any) -> tuple[str, ...]:
    if isinstance(request, pb.Manifest):
        return (request.key[: wire.DIGEST_BYTES].hex(),)
    # Bounded like a valid request: an invalid one must not fill the log.
    return tuple(key[: wire.DIGEST_BYTES].hex() for key in getattr(request, "keys", ())[: wire.KEYS_MAX])
