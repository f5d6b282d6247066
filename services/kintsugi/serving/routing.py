"""Decides which engine answers a request: the one with the least predicted time to first token. Pure.

The prediction is the sum of the work that waits at an engine, the prompt tokens that its prefix cache lacks,
and the cost of fetching chunks from another host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from kintsugi.core.exchange import OpenAICall
from kintsugi.core.spaces import Span, TokenIds
from kintsugi.gateway.fronts.openai_request import CHARS_PER_TOKEN, find_prompt_texts
from kintsugi.store.client.directory import ShardMap

BLOCK_TOKENS = 128
"""Prefixes are remembered in blocks of this many tokens."""
REMEMBERED_MAX = 65_536
BLOCKS_MAX = 64
"""Number of blocks of a prompt that are compared: bounds the work per request."""


PREFILL_MS_PER_TOKEN = 0.1
"""Used until an engine reports its measured rate."""
HIT_SHARE = 0.3
"""Cost of a stored chunk's token, as a share of prefilling it."""
REMOTE_MS_PER_TOKEN = 0.01
"""Extra cost of loading a token's KV from another host."""


@dataclass(frozen=True)
class EngineView:
    """One engine, as a router sees it."""

    waiting_tokens: int = 0
    """Prompt tokens that wait, from its report and the requests sent to it since."""
    tokens_per_s: float = 0.0
    """Prefill rate; 0: not measured yet."""
    host: str = ""
    fingerprint: str = ""
    """Its model's fingerprint; empty: not reported yet."""


@dataclass(frozen=True)
class Wanted:
    """What a request needs from an engine."""

    num_tokens: int
    prefix: tuple[int, ...] = ()
    """`prefix_digests` of its prompt."""
    chunks: Mapping[str, int] = field(default_factory=dict)
    """Tokens of its chunks by the host that stores them, as far as known."""
    fingerprint: str = ""
    """The fingerprint of the model that the request is for; empty: any."""

    @property
    def chunk_tokens(self) -> int:
        return sum(self.chunks.values())

    def strangeness(self, view: EngineView) -> int:
        """0 for an engine with the wanted model, 1 with an unknown model, 2 with another model."""
        if self.fingerprint in ("", view.fingerprint):
            return 0
        return 2 if view.fingerprint else 1


def prefix_digests(namespace: str, token_ids: TokenIds) -> tuple[int, ...]:
    """Return digests of the prompt's prefixes of 1, 2, … whole blocks."""
    data = token_ids[: BLOCKS_MAX * BLOCK_TOKENS].data
    size = 4 * BLOCK_TOKENS
    starts = range(0, len(data) - size + 1, size)
    return _chain_digests(namespace.encode(), (data[start : start + size] for start in starts))


def text_digests(namespace: str, text: str) -> tuple[int, ...]:
    """Like `prefix_digests`, for a text that is not tokenised. Blocks have about `BLOCK_TOKENS` tokens."""
    size = BLOCK_TOKENS * CHARS_PER_TOKEN
    starts = range(0, min(len(text), BLOCKS_MAX * size) - size + 1, size)
    blocks = (text[start : start + size].encode(errors="replace") for start in starts)
    return _chain_digests(namespace.encode() + b"\0text", blocks)


def _chain_digests(salt: bytes, blocks: Iterable[bytes]) -> tuple[int, ...]:
    hasher = xxhash.xxh3_64(salt)
    digests = []
    for block in blocks:
        hasher.update(block)
        digests.append(hasher.intdigest())
    return tuple(digests)


def estimate_wanted(call: OpenAICall) -> Wanted:
    """Return the estimated needs of an OpenAI request, which only an engine can tokenise."""
    texts = find_prompt_texts(call.path, call.body)
    text = "".join(one for one in texts if isinstance(one, str))
    return Wanted(len(text) // CHARS_PER_TOKEN + 1, text_digests(call.params.namespace, text))


def tokens_by_host(spans: Sequence[Span], shards: ShardMap) -> dict[str, int]:
    """Return the tokens of known chunks by the host of their first shard; empty if all shards are on one
    host."""
    hosts = {shard.shard_id: shard.address.rpartition(":")[0] for shard in shards.shards}
    if len(set(hosts.values())) < 2:
        return {}
    found: dict[str, int] = {}
    known = [(span.key, span.end - span.start) for span in spans if span.key is not None]
    owners = shards.owners_of_each([key for key, _ in known])
    for (_, tokens), (owner, *_) in zip(known, owners, strict=True):
        host = hosts[owner.shard_id]
        found[host] = found.get(host, 0) + tokens
    return found


class PrefixMemory:
    """The prefixes that each engine computed recently and probably has in its prefix cache. Bounded."""

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._engines: OrderedDict[int, dict[str, None]] = OrderedDict()
        self._remembered_max = remembered_max

    def record_route(self, prefix: Sequence[int], engine: str) -> None:
        for digest in prefix:
            self._engines.setdefault(digest, {})[engine] = None
            self._engines.move_to_end(digest)
        while len(self._engines) > self._remembered_max:
            self._engines.popitem(last=False)

    def forget(self, engine: str) -> None:
        """Forget an engine that is gone."""
        for holders in self._engines.values():
            holders.pop(engine, None)

    def resident_tokens(self, prefix: Sequence[int], engine: str) -> int:
        """Return the number of prompt tokens that the engine probably has in its prefix cache."""
        blocks = 0
        for digest in prefix:
            if engine not in self._engines.get(digest, ()):
                break
            blocks += 1
        return blocks * BLOCK_TOKENS


def cost_ms(view: EngineView, wanted: Wanted, resident_tokens: int) -> float:
    """Return the predicted time to first token at one engine, in milliseconds. It never decreases with a
    longer queue or more remote tokens, and never increases with more resident tokens."""
    per_token_ms = 1e3 / view.tokens_per_s if view.tokens_per_s > 0 else PREFILL_MS_PER_TOKEN
    resident = min(resident_tokens, wanted.num_tokens)
    left = wanted.num_tokens - resident
    hit = min(wanted.chunk_tokens, left)
    remote = min(wanted.chunk_tokens - wanted.chunks.get(view.host, 0), left)
    own_ms = per_token_ms * (left - hit + HIT_SHARE * hit) + REMOTE_MS_PER_TOKEN * remote
    return per_token_ms * view.waiting_tokens + own_ms


def rank_engines(views: Mapping[str, EngineView], wanted: Wanted, memory: PrefixMemory) -> list[str]:
    """Engines, the best first; engines with another model come last.

    Equal engines are ordered by digests of their names that differ by prompt, so that new prompts are spread
    over idle engines.
    """
    salt = wanted.prefix[0] if wanted.prefix else 0

    def key(name: str) -> tuple[int, float, int]:
        view = views[name]
        cost = cost_ms(view, wanted, memory.resident_tokens(wanted.prefix, name))
        order = xxhash.xxh3_64_intdigest(name.encode(), seed=salt)
        return wanted.strangeness(view), round(cost, 3), order

    return sorted(views, key=key)
