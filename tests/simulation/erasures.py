"""Gateways, two shards with copies of each other's chunks, and a third with hot copies, under seeded saves,
erasures and restarts.

Gateways are the product's `Saver` and `Eraser`, shards its `Shard` with RAM and an SSD tier; engines, the
network and clocks are simulated. Saves wait and run for as long as the seed says, clocks differ, copies are
under way, and shards are away and return with what they held. At the end every shard is back, and every copy
is looked at.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kintsugi.core.errors import NotFound, Unavailable
from kintsugi.core.exchange import SaveOutcome
from kintsugi.core.namespaces import is_within
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway import erasing
from kintsugi.gateway.chunks import Saver
from kintsugi.gateway.erasing import Eraser
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.client.erasures import follow
from kintsugi.store.protocol.interface import ErasedPlace, ErasurePage, ErasureRange
from kintsugi.store.protocol.save_times import CLOCKS_DIFFER_S, SaveTimes
from kintsugi.store.shard.erasure import Scope
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.contracts.store_contract import make_chunk

GATEWAYS, SHARDS, STEPS = 3, 3, 70
OWNERS = 2
"""The first shards own every chunk, the others share reads."""
NAMESPACES = ("docs", "docs/-/acme", "other")
TEXTS = [TokenIds.of(range(100 * number, 100 * number + 40)) for number in range(6)]
MIB = 1 << 20


@dataclass
class Judgement:
    """What a seed has shown."""

    asked: int = 0
    """Erasures that a caller asked for."""
    made: int = 0
    """Erasures that gateways asked the store for."""
    residue: list[str] = field(default_factory=list)
    """Chunks from before an erasure that can still be read."""
    lost: list[str] = field(default_factory=list)
    """Chunks from after every erasure that cannot."""


@dataclass(frozen=True)
class _Asked:
    step: int
    namespace: str
    key: ChunkKey | None
    knows: bool = True
    """Whether the gateway of this save had followed every erasure."""


class Shards:
    """The shards that are up, behind the calls of a store that gateways and engines make."""

    def __init__(self, folder: Path) -> None:
        self._specs = [
            ShardSpec(8 * MIB, folder / f"{number}", (SsdSpec(folder / f"{number}-disk", 8 * MIB),))
            for number in range(SHARDS)
        ]
        self.up: dict[int, Shard] = {number: open_shard(spec) for number, spec in enumerate(self._specs)}
        self.ids = [shard.shard_id for shard in self.up.values()]
        self.erased = 0
        self._under_way: list[tuple[int, Any, PutOptions]] = []
        """Hot copies that were read and have not arrived: shard, manifest, options."""

    def put(self, namespace: str, tokens: TokenIds, asked_at_s: float) -> None:
        manifest, frames = _chunk(namespace, tokens)
        for number, shard in self.up.items():
            if number < OWNERS:
                _put(shard, replace(manifest, asked_at_s=asked_at_s), frames, PutOptions())

    def read_hot(self, chance: random.Random) -> None:
        """An owner reads one of its chunks for a shard that is to share the chunk's reads."""
        held = [(shard, entry) for shard in self.up.values() for entry in shard.table.entries()]
        if held:
            shard, entry = chance.choice(held)
            to = chance.randrange(OWNERS, SHARDS)
            seen = shard.erasures.seen_of(self.ids[to])
            options = PutOptions(is_copy=True, is_hot=True, erasures_seen=seen)
            self._under_way.append((to, entry.manifest, options))

    def send_hot(self) -> None:
        """The hot copies that are under way arrive, or their shard is away."""
        under_way, self._under_way = self._under_way, []
        for number, manifest, options in under_way:
            if number in self.up:
                _put(self.up[number], manifest, _FRAMES[manifest.key], options)

    def erase(
        self, namespace: str, keys: Sequence[ChunkKey] | None, at_s: float, within: str = ""
    ) -> list[ErasedPlace]:
        self.erased += 1
        scope = Scope(namespace, None if keys is None else frozenset(keys))
        gone_at_s = [shard.erase(scope, at_s).gone_at_s for shard in self.up.values()]
        return [ErasedPlace("shards", 1, 0, max(gone_at_s))]

    def erasures(self, cursor: str) -> ErasurePage:
        """As `ShardedStore.erasures`."""
        shards = {shard.shard_id: shard for shard in self.up.values()}

        def ask(after: Mapping[str, int | None]) -> list[ErasureRange]:
            pages = []
            for name, number in after.items():
                erasures = shards[name].erasures
                page = erasures.after(erasures.newest if number is None else number, 1000)
                pages.append(replace(page, shard_id=name))
            return pages

        return follow(cursor, list(shards), ask)

    def destroy_keys(self, namespace: str) -> list[ErasedPlace]:
        return []

    def stop(self, number: int) -> None:
        self.up.pop(number).close()

    def start(self, number: int) -> None:
        """Before it serves, a shard applies what the others have recorded."""
        shard = open_shard(self._specs[number])
        for other in self.up.values():
            _catch_up(shard, other)
        self.up[number] = shard

    def exchange(self) -> None:
        """Every shard asks the others for erasures, and sends them what they lack."""
        for shard in self.up.values():
            for other in self.up.values():
                if other is not shard:
                    _catch_up(shard, other)
        for shard in self.up.values():
            for number, other in self.up.items():
                if other is not shard:
                    _replicate(shard, other, is_hot=number >= OWNERS)

    def close(self) -> None:
        for number in list(self.up):
            self.stop(number)


def _chunk(namespace: str, tokens: TokenIds) -> tuple[Any, list[bytes]]:
    manifest, frames = make_chunk(tokens.to_list())
    return replace(manifest, namespace=namespace, context_keys=_context_keys(manifest.key)), frames


def _context_keys(key: ChunkKey) -> tuple[ChunkKey, ...]:
    """Every second text is prefilled after the one before it."""
    keys = [make_chunk(tokens.to_list())[0].key for tokens in TEXTS]
    return (keys[keys.index(key) - 1],) if keys.index(key) % 2 else ()


def _put(shard: Shard, manifest: Any, frames: Sequence[bytes], options: PutOptions) -> None:
    put = shard.begin_put(manifest, options, wait_s=10.0)
    if put is not None:
        for layer, frame in enumerate(frames):
            put.write(layer, memoryview(frame))
        shard.commit(put)


def _catch_up(shard: Shard, other: Shard) -> None:
    seen = shard.erasures.seen_of(other.shard_id)
    other.erasures.acknowledge(shard.shard_id, seen)
    found = other.erasures.after(seen, 1000)
    if found.next != seen:
        shard.apply_erasures(other.shard_id, found)


_FRAMES = {manifest.key: frames for manifest, frames in (_chunk("any", tokens) for tokens in TEXTS)}


def _replicate(shard: Shard, other: Shard, is_hot: bool) -> None:
    options = PutOptions(is_copy=True, erasures_seen=shard.erasures.seen_of(other.shard_id), is_hot=is_hot)
    for entry in shard.table.entries():
        if not entry.is_hot:
            _put(other, entry.manifest, _FRAMES[entry.manifest.key], options)


class Engine:
    """Keeps every save until it is let go, and puts its chunks then."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._gates: list[asyncio.Event] = []

    async def save(
        self, request_id: str, namespace: str, chunks: Sequence[TokenIds], *, asked_at_s: float, **_: Any
    ) -> list[SaveOutcome]:
        gate = asyncio.Event()
        self._gates.append(gate)
        await gate.wait()
        outcomes = []
        for tokens in chunks:
            try:
                self._shards.put(namespace, tokens, asked_at_s)
                outcomes.append(SaveOutcome(is_saved=True))
            except NotFound as error:
                outcomes.append(SaveOutcome(False, str(error)))
        return outcomes

    def let_go(self, chance: random.Random | None = None) -> bool:
        """End one save, or all; whether any was running."""
        gates, self._gates = self._gates, []
        if chance is not None and gates:
            chance.shuffle(gates)
            self._gates = gates[1:]
            gates = gates[:1]
        for gate in gates:
            gate.set()
        return bool(gates)


class _OneCopy:
    """Erases chunks of a space without a context."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    async def erase(
        self, namespace: str, key: ChunkKey, tokens: Any, asked_at_s: float, within: str
    ) -> tuple[list[ChunkKey], list[ErasedPlace]]:
        return [key], self._shards.erase(namespace, [key], asked_at_s, within)


class _NoResolver:
    def forget(self, namespace: str, keys: Any) -> None:
        """Nothing is resolved here."""


class Gateways:
    """Each has a clock of its own, and follows erasures when it is told to."""

    def __init__(self, count: int, shards: Shards, engine: Engine, chance: random.Random) -> None:
        self.savers, self.erasers, self._stores = [], [], []
        for _ in range(count):
            skew_s = chance.uniform(-0.5, 0.5) * CLOCKS_DIFFER_S
            times = SaveTimes(lambda skew_s=skew_s: time.time() + skew_s)  # type: ignore[misc]
            saver: Any = Saver(engine, times=times)  # type: ignore[arg-type]
            store = ThreadedStore(shards)  # type: ignore[arg-type]
            self.savers.append(saver)
            copies: Any = _OneCopy(shards)
            self.erasers.append(Eraser(store, copies, KnownChunks(), _NoResolver(), saver))  # type: ignore[arg-type]
            self._stores.append(store)

    async def follow(self, number: int) -> None:
        with suppress(Unavailable):
            while await self.erasers[number].follow_once():
                pass


class Simulation:
    """One seed."""

    def __init__(self, folder: Path, seed: int, gateways: int) -> None:
        self._chance = random.Random(seed)
        self._shards = Shards(folder)
        self._engine = Engine(self._shards)
        self._gateways = Gateways(gateways, self._shards, self._engine, self._chance)
        self._step = 0
        self._saves: list[tuple[_Asked, asyncio.Future[SaveOutcome]]] = []
        self._erasures: list[_Asked] = []
        self._residue: list[str] = []
        self._followed = [True] * gateways

    async def run(self) -> Judgement:
        for number in range(len(self._followed)):
            await self._gateways.follow(number)
        saves = [self._save] * 3
        erase = [self._erase, self._erase_text]
        hot = [self._read_hot, self._send_hot]
        actions = [*saves, self._let_go, *erase, self._follow, self._restart, *hot]
        for self._step in range(STEPS):
            await self._chance.choice(actions)()
            await asyncio.sleep(0)
        await self._settle()
        judgement = self._judge()
        self._shards.close()
        return judgement

    async def _save(self) -> None:
        number = self._chance.randrange(len(self._followed))
        namespace, tokens = self._chance.choice(NAMESPACES), self._chance.choice(TEXTS)
        key = _chunk(namespace, tokens)[0].key
        (future,) = self._gateways.savers[number].submit(namespace, [(key, tokens)])
        self._saves.append((_Asked(self._step, namespace, key, self._followed[number]), future))
        if self._chance.random() < 0.5:  # the engine has it, or it waits
            await asyncio.sleep(0)

    async def _let_go(self) -> None:
        self._engine.let_go(self._chance)
        await asyncio.sleep(0)

    async def _erase(self) -> None:
        number, namespace = self._chance.randrange(len(self._followed)), self._chance.choice(NAMESPACES)
        self._erasures.append(_Asked(self._step, namespace, None))
        self._followed = [other == number and knows for other, knows in enumerate(self._followed)]
        await self._gateways.erasers[number].erase_namespace(namespace, namespace)

    async def _erase_text(self) -> None:
        number, namespace = self._chance.randrange(len(self._followed)), self._chance.choice(NAMESPACES)
        key = _chunk(namespace, self._chance.choice(TEXTS))[0].key
        self._erasures.append(_Asked(self._step, namespace, key))
        self._followed = [other == number and knows for other, knows in enumerate(self._followed)]
        await self._gateways.erasers[number].erase_chunk(namespace, key, namespace)
        self._find_residue()

    async def _follow(self) -> None:
        number = self._chance.randrange(len(self._followed))
        await self._gateways.follow(number)
        self._followed[number] = True

    async def _read_hot(self) -> None:
        self._shards.read_hot(self._chance)

    async def _send_hot(self) -> None:
        self._shards.send_hot()
        self._find_residue()

    async def _restart(self) -> None:
        """A shard goes, or the one that is away returns."""
        away = set(range(SHARDS)) - self._shards.up.keys()
        if away:
            self._shards.start(away.pop())
        else:
            self._shards.stop(self._chance.randrange(SHARDS))
        self._shards.exchange()

    async def _settle(self) -> None:
        for number in set(range(SHARDS)) - self._shards.up.keys():
            self._shards.start(number)
        for number in range(len(self._followed)):
            await self._gateways.follow(number)
        while any(not future.done() for _, future in self._saves):
            self._engine.let_go()
            await asyncio.sleep(0)
        self._shards.send_hot()
        self._shards.exchange()
        self._find_residue()  # a restart drops what a tombstone covers
        for number in range(SHARDS):  # catalogs, too
            self._shards.stop(number)
            self._shards.start(number)
        for number in range(len(self._followed)):
            await self._gateways.follow(number)
        self._shards.exchange()

    def _judge(self) -> Judgement:
        self._find_residue()
        judgement = Judgement(len(self._erasures), self._shards.erased, self._residue)
        held = {entry.address for shard in self._shards.up.values() for entry in shard.table.entries()}
        for asked, future in self._saves:
            stays = asked.knows and not self._is_erased(asked)
            is_there = (asked.namespace, asked.key) in held and future.result().is_saved
            if stays and not is_there:
                judgement.lost.append(f"{asked} ({future.result()})")
        return judgement

    def _find_residue(self) -> None:
        """Note the chunks from before an erasure that can be read now."""
        for number, shard in self._shards.up.items():
            for entry in shard.table.entries():
                address = entry.address
                saves = [asked for asked, _ in self._saves if (asked.namespace, asked.key) == address]
                if all(self._is_erased(asked) for asked in saves):
                    self._residue.append(f"{address} in shard {number}")

    def _is_erased(self, save: _Asked) -> bool:
        assert save.key is not None
        keys = (save.key, *_context_keys(save.key))
        return any(
            erasure.step > save.step
            and (
                is_within(save.namespace, erasure.namespace)
                if erasure.key is None
                else erasure.namespace == save.namespace and erasure.key in keys
            )
            for erasure in self._erasures
        )


def simulate(folder: Path, seed: int, gateways: int = GATEWAYS) -> Judgement:
    """Run one seed in an empty folder."""
    waited_s, erasing.FOLLOWED_S = erasing.FOLLOWED_S, 0.0
    try:
        return asyncio.run(Simulation(folder, seed, gateways).run())
    finally:
        erasing.FOLLOWED_S = waited_s
