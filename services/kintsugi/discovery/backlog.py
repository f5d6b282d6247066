"""The segments that wait to be saved, and how many tokens saving may compute.

Saving earns tokens: a share of the tokens of every prompt seen, at most `EARNED_MAX` ahead. So what
discovery computes is bounded by the traffic, whatever the traffic is. First come, first served, and no
namespace takes all the room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from kintsugi.core.namespaces.parts import base_of
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.core.tokens import TokenIds

TOKENS_MAX = 1 << 20
"""4 MiB of token ids."""
SEGMENT_TOKENS_MIN = 256
"""A shorter segment takes as much room: so no more than 4,096 wait."""
NAMESPACE_TOKENS_MAX = TOKENS_MAX // 2
"""What of it a namespace and its parts may take together: who makes many parts has no more."""
EARNED_MAX = 1 << 16
"""Tokens that saving may be ahead: an idle hour is not made up for at once."""


@dataclass(frozen=True)
class Recurring:
    """A segment that was seen often enough, in the space of its request."""

    space: ChunkSpace
    token_ids: TokenIds
    shared: str
    """The namespace whose chunks the request could use, too; empty: none."""
    salt: str
    """That of the request's namespace when it was seen; another one now means that something was erased."""
    ttl_s: float
    """How long it is to be kept."""
    asked_at_s: float
    """When it was seen, as in `ChunkManifest`."""

    @property
    def name(self) -> ChunkKey:
        """The key that clients know the chunk by."""
        return ChunkKey.of(self.space, self.token_ids)

    def is_alike(self, other: Recurring) -> bool:
        """Whether both are saved behind the same text, of requests with the same rights."""
        return (self.space, self.shared, self.salt) == (other.space, other.shared, other.salt)


class Backlog:
    """Not thread-safe."""

    def __init__(self, share: float) -> None:
        """``share``: tokens that saving may compute per token of prompts."""
        self._share = share
        self._earned = 0.0
        self._waiting: OrderedDict[ChunkKey, Recurring] = OrderedDict()
        self._tokens: Counter[str] = Counter()
        """What waits, by namespace; that of parts with their base."""
        self.num_refused = 0
        """Segments for which there was no room."""

    def __len__(self) -> int:
        return len(self._waiting)

    def earn(self, prompt_tokens: int) -> None:
        """A prompt of so many tokens was seen."""
        self._earned = min(self._earned + self._share * prompt_tokens, EARNED_MAX)

    def add(self, segment: Recurring) -> bool:
        """Whether the segment waits now: not if it did before, and not if there is no room."""
        room, base = _room_of(segment), base_of(segment.space.namespace)
        is_full = self._tokens.total() + room > TOKENS_MAX or self._tokens[base] + room > NAMESPACE_TOKENS_MAX
        if segment.name in self._waiting:
            return False
        if is_full:
            self.num_refused += 1
            return False
        self._waiting[segment.name] = segment
        self._tokens[base] += room
        return True

    @property
    def is_due(self) -> bool:
        """Whether a segment waits and saving has earned something."""
        return bool(self._waiting) and self._earned > 0

    def take(self, tokens_max: int) -> list[Recurring]:
        """The segment that waited longest, and those behind it that can be saved together with it, as long as
        they have at most ``tokens_max`` tokens together. All of them leave."""
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
        self._tokens[base] -= _room_of(segment)
        if not self._tokens[base]:
            del self._tokens[base]

    def spend(self, computed_tokens: int) -> None:
        """A save computes so many tokens. The last ones before there is nothing left may overdraw."""
        self._earned -= computed_tokens


def _room_of(segment: Recurring) -> int:
    return max(len(segment.token_ids), SEGMENT_TOKENS_MIN)
