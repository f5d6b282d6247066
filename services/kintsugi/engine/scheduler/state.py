"""What the scheduler's side knows of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kintsugi.core.accounting import TICKET, Accounting, Outcome
from kintsugi.core.gate import GateState
from kintsugi.core.request import PARAMS_KEY, KintsugiParams
from kintsugi.core.spaces import ChunkSpace
from kintsugi.engine.protocol import BlendJob
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.scheduler.lookups import Lookup
from kintsugi.fusor.control.planner import Planner

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class RequestState:
    """One request with our parameters."""

    request: Request
    params: KintsugiParams
    space: ChunkSpace
    shared: ChunkSpace | None
    """The space of the namespace whose chunks it may use, too."""
    planner: Planner
    """Plans with the selection that the gate allowed at admission: a later report changes nothing midway."""
    gate: GateState
    """As it was at admission."""
    is_discovered: bool
    """See `scheduler.discovery`. As it was at admission."""
    takes_others: bool
    """Whether a blend may hold chunks that are found beside those that it names."""
    lookup: Lookup | None = None
    """None also while the lookup may not begin yet."""
    checked_at: int | None = None
    """The number of cached tokens that `_check` last passed with."""
    has_hits: bool = False
    block_name: bytes | None = None
    """vLLM's name of the last full block of the prompt's hits: whoever finds it cached needs no blend. None
    if there is none."""
    leader: str | None = None
    """The request whose blend this one waited for."""
    job: BlendJob | None = None
    """Made by the last claim; handed to the worker once blocks are allocated."""
    in_flight: bool = False
    ordinary_hasher: hashing.BlockHasher | None = None
    num_prefix_cached: int = 0
    computed_instead: frozenset[int] = frozenset()
    """Starts of the hit chunks that the planner recomputes instead of loading them."""
    accounting: Accounting | None = None
    """Set when the outcome is known."""

    @property
    def is_named(self) -> bool:
        """Whether the request itself has our parameters. One that has none is told nothing of ours."""
        return values_of(self.request) is not None

    @property
    def is_final(self) -> bool:
        """Whether nothing is claimed any more. vLLM asks again about a request that it preempted: if its
        KV was blended and is gone, it is blended again, or its answer would change midway."""
        repeatable = (None, Outcome.BLENDED, Outcome.PREFIX_HIT)
        return (self.accounting and self.accounting.outcome) not in repeatable


def ticket_of(request: Request) -> str | None:
    """Under what the request's accounting is told before the request ends; None where nobody asks for it."""
    extra = None if request.sampling_params is None else request.sampling_params.extra_args
    ticket = (extra or {}).get(TICKET)
    return ticket if isinstance(ticket, str) else None


def values_of(request: Request) -> Any:
    """Our parameters of a request, in JSON form; None where it has none."""
    params_of_all = request.kv_transfer_params
    return params_of_all.get(PARAMS_KEY) if isinstance(params_of_all, dict) else None
