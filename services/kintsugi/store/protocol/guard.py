"""Authorises the calls of a shard, and writes them to the audit log.

A shard without a tokens file and an audit log has no guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kintsugi.core.errors import KintsugiError
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.access import Access, Caller, Verb, identities_of_call, parse_bearer
from kintsugi.store.protocol.audit import AuditEntry, AuditLog
from kintsugi.store.protocol.grpc_status import DETAIL_CHARS_MAX, status_of

PUT = "put_chunk_kv"


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
    PUT: Need(Verb.PUT),
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

    def __init__(self, access: Access, audit: AuditLog | None) -> None:
        self._access = access
        self._audit = audit

    @contextmanager
    def admit(self, rpc: str, request: Any, context: Any) -> Iterator[Any]:
        """Yield the request to handle; for a put, an iterator that checks the messages as they arrive.

        Raises `Unauthenticated`, `PermissionDenied`, and `InvalidField` for an invalid namespace.
        """
        call = AuditEntry(rpc, "OK", verb=NEEDS[rpc].verb)
        try:
            caller = self._identify(context)
            call.caller = caller.name
            if rpc == PUT:
                request = self._check_put(caller, call, request)
            else:
                _authorize(caller, NEEDS[rpc], call, request)
            yield request
        except KintsugiError as error:
            call.result, call.error = status_of(error).name, str(error)[:DETAIL_CHARS_MAX]
            raise
        except asyncio.CancelledError:  # the client ended the call, as it ends every lease
            call.result = "CANCELLED"
            raise
        except Exception:
            call.result = "INTERNAL"
            raise
        finally:
            if self._audit is not None and (NEEDS[rpc].is_audited or call.error):
                self._audit.write(call)

    def _identify(self, context: Any) -> Caller:
        """Raises `Unauthenticated`."""
        metadata = dict(context.invocation_metadata() or ())
        identities = identities_of_call(context) if self._access.has_certificates else ()
        return self._access.caller(parse_bearer(metadata.get("authorization")), identities)

    async def _check_put(
        self, caller: Caller, call: AuditEntry, messages: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Check the header of a put, which comes first, and yield every message."""
        is_first = True
        async for message in messages:
            if is_first:
                is_first = False
                header, _ = wire.parse_payload(message, pb.PutChunkKVRequest)
                _authorize(caller, NEEDS[PUT], call, header.header.manifest)
            yield message


def _authorize(caller: Caller, need: Need, call: AuditEntry, request: Any) -> None:
    """Record the names in a request, and authorise it. Raises `PermissionDenied` and `InvalidField`."""
    if isinstance(request, pb.LeaseLayersRequest):
        request = request.request
    call.namespace = getattr(request, "namespace", "")[:DETAIL_CHARS_MAX]
    call.keys = _keys_in(request)
    if (
        isinstance(request, pb.VerifyRequest) and request.failed_salts
    ):  # this removes every copy of these chunks
        call.verb = Verb.DELETE
        caller.authorize(request.namespace, Verb.DELETE)
    match need.scope:
        case Reach.NAMESPACE:
            caller.authorize(request.namespace, need.verb)
        case Reach.EVERYTHING:
            assert need.verb is not None, "what concerns everything needs a verb"
            caller.require_everywhere(need.verb)
        case Reach.NOTHING if need.verb is not None:
            caller.require(need.verb)


def _keys_in(request: Any) -> tuple[str, ...]:
    if isinstance(request, pb.Manifest):
        return (request.key[: wire.DIGEST_BYTES].hex(),)
    # Bounded like a valid request: an invalid one must not fill the log.
    return tuple(key[: wire.DIGEST_BYTES].hex() for key in getattr(request, "keys", ())[: wire.KEYS_MAX])
