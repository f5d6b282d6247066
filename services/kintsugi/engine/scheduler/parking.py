"""Decides which blends and saves hold cache blocks, and which requests wait for another's blend. Pure.

vLLM allocates all blocks of a request when the connector claims its tokens, and parks the request until the
worker has blended it. A parked request does not count towards `max_num_seqs`, so vLLM itself sets no bound.
The rules here:

- **A blend needs a place.** There are as many places as the worker runs blends at a time, but at most
  `max_num_seqs`. A blend takes a place together with its blocks, and keeps it until the request runs, is
  preempted or ends.
- **Parked prompts fill at most half of the cache**, unless a single prompt is longer.
- **First come, first served.** In every step, vLLM asks about its waiting requests in their order (by arrival
  or priority). The first one takes a free place; after a refusal, all later requests of the step are refused.
  A request whose lookup still runs does not block others. After its answer it is again ahead of all later
  requests in vLLM's queue, so no request starves.
- **The same KV is blended once.** While a blend is in flight, requests that will find its blocks in vLLM's
  prefix cache wait for it. Blocks have the same name only for the same tokens, namespace and parameters
  (`engine.scheduler.hashing`), so no request waits for blocks that it cannot use. A request waits for one
  blend only. If that blend fails, is aborted or misses, the request is blended on its own.

Saves have separate places and a separate share of the cache (`parking_of_saves`), and leave them when their
chunk is stored, so slow puts delay only saves. Plain requests and requests with nothing to load need no
place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

CACHE_SHARE_MAX = 0.5
"""Maximum share of the KV cache for parked blends. The rest is for running requests."""
SAVES_SHARE_MAX = 0.25
"""Maximum share of the KV cache for parked saves."""
SAVES_MAX = 64
"""Maximum number of parked saves: several batches, so that one is computed while others are put."""


@dataclass
class _Parked:
    num_tokens: int
    block_name: bytes | None
    is_in_flight: bool = True


@dataclass
class Parking:
    """The parked blends, or the parked saves. Called from the scheduler's thread only."""

    places: int
    """Maximum number of parked requests, at least 1."""
    cache_tokens: int
    """Tokens that the engine's KV cache holds."""
    cache_share_max: float = CACHE_SHARE_MAX
    _parked: dict[str, _Parked] = field(default_factory=dict)
    _has_refused: bool = False
    """Whether a request was refused in the current step."""

    def __post_init__(self) -> None:
        assert self.places >= 1

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._parked)

    def step_began(self) -> None:
        """Note that the requests of a step are scheduled and the next step begins."""
        self._has_refused = False

    def admits(self, request_id: str, num_tokens: int) -> bool:
        """Return whether a prompt of ``num_tokens`` may be parked now. A parked request keeps its place."""
        others = [parked.num_tokens for name, parked in self._parked.items() if name != request_id]
        fits = not others or sum(others) + num_tokens <= self.cache_share_max * self.cache_tokens
        if len(others) >= self.places or not fits:
            self._has_refused = True
        return not self._has_refused

    def park(self, request_id: str, num_tokens: int, block_name: bytes | None) -> None:
        """Park a request whose blocks are allocated and whose blend is in flight.

        ``block_name``: vLLM's name of the last block that other requests may find; None if there is none.
        """
        self._parked[request_id] = _Parked(num_tokens, block_name)

    def leader_of(self, block_name: bytes | None) -> str | None:
        """Return the request whose blend in flight will fill the named block; None if there is none."""
        if block_name is None:
            return None
        flying = {name: one.block_name for name, one in self._parked.items() if one.is_in_flight}
        return next((name for name, fills in flying.items() if fills == block_name), None)

    def settle(self, request_id: str) -> None:
        """Note that the worker has ended the blend. The request keeps its blocks until it runs."""
        parked = self._parked.get(request_id)
        if parked is not None:
            parked.is_in_flight = False

    def leave(self, request_id: str) -> None:
        """Free the place of a request that runs or has ended."""
        self._parked.pop(request_id, None)


def parking_of_saves(cache_tokens: int) -> Parking:
    """Make the parking of saves for a KV cache of ``cache_tokens``."""
    return Parking(SAVES_MAX, cache_tokens, SAVES_SHARE_MAX)


def is_parked(request: Request) -> bool:
    """Return whether a request that took a place still waits and holds its blocks. A preempted request holds
    none and needs a place again."""
    status, has_blocks = request.status, request.num_computed_tokens > 0
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return True
    return bool(status != RequestStatus.RUNNING and has_blocks)
