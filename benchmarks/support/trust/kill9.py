"""Kills shards, gateways, engines and drivers at random moments; no chunk may be wrong or lost.

Each round has a fleet of its own, with one copy of each chunk or two, and a client that remembers what was
acknowledged as durable or as deleted. The victim dies at a random moment of that work; in a fifth of the
shards' rounds again while it opens its folder. Everybody starts again, and every shard's copies are read.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from benchmarks.support.figures import Figure
from benchmarks.support.trust.fleet import (
    NAMESPACE,
    Fleet,
    Frames,
    kill,
    read_line,
    start_process,
    until_it_says,
)
from benchmarks.support.trust.rounds import Outcome, run_rounds
from kintsugi.core.errors import KintsugiError
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.sdk.client import Client
from kintsugi.store.client.sharded import ShardedStore
from tests.contracts.store_contract import make_chunk

ROUNDS = {"shard": 800, "gateway": 150, "engine": 25, "driver": 25}
QUICK_ROUNDS = {"shard": 4, "gateway": 2, "engine": 1, "driver": 1}
LIFE_S = 0.6
"""The longest time for which the victim works."""


class Memory:
    """The acknowledged state of each chunk. After an unacknowledged operation the state is unknown."""

    def __init__(self) -> None:
        self.stored: set[ChunkKey] = set()
        self.deleted: set[ChunkKey] = set()
        self.frames: dict[ChunkKey, Frames] = {}

    def forget(self, key: ChunkKey) -> None:
        self.stored.discard(key)
        self.deleted.discard(key)


def put_and_delete(store: ShardedStore, memory: Memory, chance: random.Random, stop: threading.Event) -> None:
    """Put and delete chunks until stopped."""
    while not stop.is_set():
        start = chance.randrange(60) * 1000
        manifest, frames = make_chunk(range(start, start + chance.choice((33, 100, 200, 400))))
        key = manifest.key
        memory.forget(key)
        memory.frames[key] = frames
        with suppress(KintsugiError):
            if chance.random() < 0.25:
                store.delete(NAMESPACE, [key])
                memory.deleted.add(key)
            else:
                store.put(manifest, frames)
                memory.stored.add(key)


def kill_shard(folder: Path, replicas: int, chance: random.Random) -> Outcome:
    fleet = Fleet(folder, replicas)
    memory, stop = Memory(), threading.Event()
    life_s, victim = chance.uniform(0.05, LIFE_S), chance.choice(fleet.shards)
    dies_again, again_s = chance.random() < 0.2, chance.uniform(0.0, 1.5)
    try:
        with closing(fleet.connect()) as store:
            writer = threading.Thread(target=put_and_delete, args=(store, memory, chance, stop))
            writer.start()
            time.sleep(life_s)
            kill(victim.process)
            stop.set()
            writer.join()
        if dies_again:
            opening = victim.spawn()
            time.sleep(again_s)
            kill(opening)
        victim.start()
        return fleet.judge(memory.stored, memory.deleted, memory.frames)
    finally:
        fleet.close()


def kill_gateway(folder: Path, replicas: int, chance: random.Random) -> Outcome:
    fleet = Fleet(folder, replicas)
    texts: dict[ChunkKey, str] = {}
    known_folder = folder / "known"
    life = (
        f"from benchmarks.support.trust.lives import gateway; gateway({str(known_folder)!r}, {fleet.url!r})"
    )
    process = start_process(["-c", life])
    try:
        address = read_line(process).strip()
        timer = threading.Timer(chance.uniform(0.02, LIFE_S), process.kill)
        timer.start()
        with Client(address, NAMESPACE) as client, suppress(KintsugiError):
            while process.poll() is None:
                text = f"Passage {chance.randrange(10_000)} tells of {chance.random()}. " * chance.randrange(
                    1, 9
                )
                (put,) = client.put_chunks([text], timeout_s=2.0)
                if put.state in ("stored", "present"):
                    texts[ChunkKey.from_hex(put.key)] = text
        timer.join()
        kill(process)
        process = start_process(["-c", life])
        read_line(process)
        kill(process)
        outcome = fleet.judge(texts.keys(), (), {})
        known = KnownChunks(known_folder)
        with closing(known):
            told = {key: known.token_ids(NAMESPACE, key) for key in texts}
        wrong = [key for key, ids in told.items() if ids is not None and [*ids] != [*texts[key].encode()]]
        return {**outcome, "wrong": outcome["wrong"] + len(wrong)}
    finally:
        kill(process)
        fleet.close()


def kill_engine(folder: Path, replicas: int, chance: random.Random) -> Outcome:
    fleet = Fleet(folder, replicas)
    stored: set[ChunkKey] = set()
    seed = chance.randrange(1 << 32)
    process = start_process(
        ["-c", f"from benchmarks.support.trust.lives import engine; engine({fleet.url!r}, {seed})"],
        VLLM_LOGGING_LEVEL="ERROR",
    )
    killer = threading.Timer(chance.uniform(0.05, 2.0), process.kill)

    def note(line: str) -> bool:
        with suppress(KintsugiError):  # vLLM has words of its own
            stored.add(ChunkKey.from_hex(line.strip()))
        return bool(stored) and not killer.is_alive()

    try:
        until_it_says(process, note)
        killer.start()
        until_it_says(process, lambda line: note(line) and False)
        killer.join()
        return fleet.judge(stored, (), {})
    finally:
        kill(process)
        fleet.close()


def kill_driver(folder: Path, replicas: int, chance: random.Random) -> Outcome:
    """A precompute job on Ray whose driver dies; the job is run again. Its shard stands alone."""
    import ray

    from kintsugi.precompute.pool import ensure_ray
    from tests.simulation import test_precompute_crashes as crashes

    crashes.write_corpus(folder)
    world = crashes.World(folder, chance)
    ensure_ray(crashes.WORKERS)
    world.ray_address = ray.get_runtime_context().gcs_address
    world.start_shard()
    try:
        world.life("driver")
        world.settle()
        assert world.life(""), "the job that was run again did not come to its end"
        _, missing, damaged = crashes.judge(world)
        return {"wrong": damaged, "lost": missing, "stored": 0}
    finally:
        if world.shard is not None:
            kill(world.shard)


KINDS: dict[str, Callable[[Path, int, random.Random], Outcome]] = {
    "shard": kill_shard,
    "gateway": kill_gateway,
    "engine": kill_engine,
    "driver": kill_driver,
}


def names_of(rounds: dict[str, int]) -> list[str]:
    """`KIND-REPLICAS-NUMBER` of every round: one copy and two, by turns. A job has one shard."""
    return [
        f"{kind}-{1 if kind == 'driver' else 1 + number % 2}-{number}"
        for kind, count in rounds.items()
        for number in range(count)
    ]


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """`kill9_wrong` and `kill9_lost`."""

    def play(name: str) -> Outcome:
        kind, replicas, _ = name.split("-")
        with tempfile.TemporaryDirectory(prefix="kintsugi-kill9-", ignore_cleanup_errors=True) as folder:
            return KINDS[kind](Path(folder), int(replicas), random.Random(f"{seed}/{name}"))

    rounds = QUICK_ROUNDS if quick else ROUNDS
    outcomes = run_rounds("kill9", names_of(rounds), play, quick=quick, seed=seed)
    stored = sum(outcome["stored"] for outcome in outcomes.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in rounds.items())
    detail = f"{len(outcomes)} kills ({counts}); {stored} chunks acknowledged as durable; seed {seed}"
    return [
        Figure.at_most(f"kill9_{what}", sum(outcome[what] for outcome in outcomes.values()), 0, "", detail)
        for what in ("wrong", "lost")
    ]
