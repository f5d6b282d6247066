"""The segments that wait to be saved, and the token budget for saving them.

Each prompt adds a share of its tokens to the budget, up to `EARNED_MAX`. So the tokens that discovery
computes are bounded by the tokens of the traffic. Segments are saved in order of arrival, and no namespace
can fill the backlog alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kintsugi.core.held import Allotment
from kintsugi.core.namespaces import base_of
from kintsugi.core.spaces import ChunkKey, ChunkSpace, TokenIds

TOKENS_MAX = 1 << 20
"""Maximum number of tokens that wait: 4 MiB of token ids."""
SEGMENT_TOKENS_MIN = 256
"""Minimum charge of a segment, so that at most 4,096 wait."""
NAMESPACE_TOKENS_MAX = TOKENS_MAX // 2
"""Maximum number of tokens that wait for one namespace, including all its parts."""
SHARE = 0.5
"""Tokens that saves may compute per prompt token."""
EARNED_MAX = 1 << 16
"""Maximum unspent budget in tokens. It bounds the burst of saves after a time without saves."""


@dataclass(frozen=True)
class Recurring:
    """A segment that was seen often enough to be saved, in the chunk space of its request."""

    space: ChunkSpace
    token_ids: TokenIds
    shared: str
    """Another namespace whose chunks the request may use; empty: none."""
    salt: str
    """Salt of the request's namespace when the segment was seen. If the present salt differs, chunks have
    been erased since then."""
    ttl_s: float
    """Lifetime of the saved chunk."""
    asked_at_s: float
    """Time of the sighting, as `ChunkManifest.asked_at_s`."""

    @property
    def name(self) -> ChunkKey:
        """The chunk's key as clients compute it."""
        return ChunkKey.of(self.space, self.token_ids)

    def is_alike(self, other: Recurring) -> bool:
        """Whether both are prefilled after the same text, and come from requests with the same rights."""
        return (self.space, self.shared, self.salt) == (other.space, other.shared, other.salt)


class Backlog:
    """A queue with a token budget. Not thread-safe."""

    def __init__(self) -> None:
        self.share = SHARE
        self._earned = 0.0
        self._waiting: OrderedDict[ChunkKey, Recurring] = OrderedDict()
        self._tokens = Allotment(NAMESPACE_TOKENS_MAX)
        """Charged tokens of the waiting segments, by base namespace."""
        self.num_refused = 0
        """Number of segments that were dropped for lack of room."""

    def __len__(self) -> int:
        return len(self._waiting)

    def earn(self, prompt_tokens: int) -> None:
        """Increase the budget for a prompt of this many tokens."""
        self._earned = min(self._earned + self.share * prompt_tokens, EARNED_MAX)

    def add(self, segment: Recurring) -> bool:
        """Add a segment. Returns False if it already waits, or if there is no room."""
        room, base = _room_of(segment), base_of(segment.space.namespace)
        if segment.name in self._waiting:
            return False
        if not self._tokens.fits(base, room):
            self.num_refused += 1
            return False
        self._waiting[segment.name] = segment
        self._tokens.add(base, room)
        return True

    @property
    def is_due(self) -> bool:
        """Whether a segment waits and the budget is positive."""
        return bool(self._waiting) and self._earned > 0

    def take(self, tokens_max: int) -> list[Recurring]:
        """Remove and return the oldest segment, and later ones that can be saved together with it, up to
        ``tokens_max`` tokens in total."""
        taken: list[Recurring] = []
        room = tokens_max
        for segment in self._waiting.values():
            room -= len(segment.token_ids)
            if taken and (room < 0 or not segment.is_alike(taken[0])):
                break
            taken.append(segment)
        for segment in taken:
            self._leave(segment)
        return taken

    def _leave(self, segment: Recurring) -> None:
        del self._waiting[segment.name]
        base = base_of(segment.space.namespace)
        self._tokens.add(base, -_room_of(segment))

    def spend(self, computed_tokens: int) -> None:
        """Decrease the budget by the tokens that a save computes. The last save may overdraw it."""
        self._earned -= computed_tokens


def _room_of(segment: Recurring) -> int:
    return max(len(segment.token_ids), SEGMENT_TOKENS_MIN)
