"""Decides which blends and saves hold cache blocks, and which blends other requests wait for. Pure.

vLLM allocates all blocks of a request when the connector claims its tokens, and parks the request until the
worker has blended it. A parked request takes none of vLLM's seats (`max_num_seqs`), so vLLM itself parks
without bound. The rules here:

- **A blend needs a place.** There are as many places as blends that the worker works on at a time, and no
  more than the engine has seats. A blend takes its place with its blocks, and keeps it until the request
  runs, is preempted or ends.
- **Parked prompts fill half of the cache at most**, unless a single one is longer than that.
- **First come, first served.** In every step, vLLM asks for its waiting requests in their order (by arrival,
  or by priority). Whoever is asked first takes a free place, and once one is refused, so are all behind it.
  A request whose lookup still runs lets others pass. As soon as it has its answer, it is again ahead of all
  that are behind it in vLLM's queue, so nobody waits for ever.
- **The same KV is blended once.** While a blend is in flight, requests that will find its blocks in vLLM's
  prefix cache wait for it. Blocks have the same name only for the same tokens, namespace and parameters
  (`engine.scheduler.hashing`), so nobody waits for blocks that it could not use. A request waits for one
  blend only. If that one fails, is aborted or misses, the request goes on by itself.

Saves have places and a share of the cache of their own (`parking_of_saves`). They leave them once their chunk
is stored, so a store that takes puts slowly holds up saves alone. Other requests never need a place: plain
ones, and those with nothing to load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

CACHE_SHARE_MAX = 0.5
"""Share of the KV cache that parked blends may fill. Most of the rest is for requests that run."""
SAVES_SHARE_MAX = 0.25
"""Share of the KV cache that parked saves may fill."""
SAVES_MAX = 64
"""Saves that may be parked: several of the worker's batches, so that it computes one while others are put."""


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
    """Whether a request was refused in this step."""

    def __post_init__(self) -> None:
        assert self.places >= 1

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._parked)

    def step_began(self) -> None:
        """A step's requests have been scheduled; vLLM will ask for the next step's in their order."""
        self._has_refused = False

    def admits(self, request_id: str, num_tokens: int) -> bool:
        """Whether a prompt of `num_tokens` may be parked now. A request that is parked keeps its place."""
        others = [parked.num_tokens for name, parked in self._parked.items() if name != request_id]
        fits = not others or sum(others) + num_tokens <= self.cache_share_max * self.cache_tokens
        if len(others) >= self.places or not fits:
            self._has_refused = True
        return not self._has_refused

    def park(self, request_id: str, num_tokens: int, block_name: bytes | None) -> None:
        """The request's blocks are allocated, and its blend is in flight.

        ``block_name``: vLLM's name of the last block that the blend fills for others; None if it fills none.
        """
        self._parked[request_id] = _Parked(num_tokens, block_name)

    def leader_of(self, block_name: bytes | None) -> str | None:
        """The request whose blend in flight will fill the block of that name; None if there is none."""
        if block_name is None:
            return None
        flying = {name: one.block_name for name, one in self._parked.items() if one.is_in_flight}
        return next((name for name, fills in flying.items() if fills == block_name), None)

    def settle(self, request_id: str) -> None:
        """The worker has ended the blend. The request keeps its blocks, and waits for a seat."""
        parked = self._parked.get(request_id)
        if parked is not None:
            parked.is_in_flight = False

    def leave(self, request_id: str) -> None:
        """The request runs, or has ended."""
        self._parked.pop(request_id, None)


def parking_of_saves(cache_tokens: int) -> Parking:
    """For the saves of an engine whose KV cache holds `cache_tokens`."""
    return Parking(SAVES_MAX, cache_tokens, SAVES_SHARE_MAX)


def is_parked(request: Request) -> bool:
    """Whether a request that took a place still waits with its blocks. One that vLLM preempted holds none,
    and asks for a place again."""
    status, has_blocks = request.status, request.num_computed_tokens > 0
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return True
    return bool(status != RequestStatus.RUNNING and has_blocks)
