"""Flips single bits in a shard's slab and catalog, a ledger and a gateway's known texts; nothing wrong may be
served. Damaged data may be lost, or its file refused. A separate process opens it and prints what it is
served, so that crashes are counted, too.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from benchmarks.support.figures import Figure
from benchmarks.support.trust.fleet import NAMESPACE, kill, start_process
from benchmarks.support.trust.rounds import Outcome, run_rounds
from kintsugi.core.errors import KintsugiError
from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.precompute.documents import DocumentRef
from kintsugi.precompute.ledger import Ledger, ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import pack_tokens
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.reading import HeldChunk
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.contracts.store_contract import make_chunk

FLIPS_PER_ROUND = 25
ROUNDS = 10
ITEMS = 40
MIB = 1 << 20
SPACE = ChunkSpace(ModelFingerprint.of({"weights": "flips"}), NAMESPACE)

Said = tuple[str, str]
"""The request, and a digest of the response."""


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def _shard_spec(folder: Path) -> ShardSpec:
    return ShardSpec(8 * MIB, folder / "data", (SsdSpec(folder / "ssd", 16 * MIB),))


def fill_shard(folder: Path) -> None:
    with closing(open_shard(_shard_spec(folder))) as shard:
        for start in range(0, 1000 * ITEMS, 1000):
            manifest, frames = make_chunk(range(start, start + 100))
            put = shard.begin_put(manifest, PutOptions(durable=True), wait_s=30.0)
            assert put is not None
            for layer, frame in enumerate(frames):
                put.write(layer, memoryview(frame))
            durable = shard.commit(put).durable
            assert durable is not None
            durable.result(30.0)


def read_shard(folder: Path) -> Iterable[Said]:
    """As a client does: a frame counts if it matches the digests that the shard sends with it."""
    with closing(open_shard(_shard_spec(folder))) as shard:
        for start in range(0, 1000 * ITEMS, 1000):
            key = make_chunk(range(start, start + 100))[0].key
            opened = shard.table.open_copies((NAMESPACE, key))
            if opened is None:
                continue
            entry, reading = opened
            (held,) = reading.chunks
            assert held is not None
            if held.is_intact():
                yield key.hex, _digest(*(bytes(held.read(n)) for n in range(_layers(held))))
            shard.table.close(reading)
            assert entry.manifest.key == key


def _layers(held: HeldChunk) -> int:
    assert held.heads == HeadRange(0, held.manifest.layout.num_kv_heads)
    return held.manifest.layout.num_layers


def _tokens(number: int) -> list[int]:
    return [number * 100 + position for position in range(64)]


def fill_ledger(folder: Path) -> None:
    with closing(Ledger(folder)) as ledger:
        edition = ledger.open_edition("corpus", SPACE, "source", "model", "chunking")
        run = ledger.begin_run(edition)
        ledger.record(edition, run, NAMESPACE, [_document(number) for number in range(ITEMS)])
        ledger.end_run(run, 0, 0.0, complete=True)


def _document(number: int) -> ScannedDocument:
    chunks = []
    for part in range(3):
        ids = _tokens(3 * number + part)
        packed = pack_tokens(b"".join(one.to_bytes(4, "little") for one in ids))
        chunks.append(ScannedChunk(ChunkKey.of(SPACE, ids).digest, packed, len(ids)))
    return ScannedDocument("file", number, f"document-{number}", "1", bytes(16), 64, tuple(chunks))


def read_ledger(folder: Path) -> Iterable[Said]:
    with closing(Ledger(folder)) as ledger:
        for number in range(ITEMS):
            refs = [DocumentRef(f"document-{number}", part) for part in range(3)]
            for ref, known in zip(refs, ledger.resolve("corpus", refs), strict=True):
                if known is not None:
                    served = f"{known.key.hex} {known.token_ids}"
                    yield f"{ref.document_id}/{ref.index}", _digest(served.encode())


def _text(number: int) -> str:
    return f"Passage {number} begins here. " + f"It tells of {number * 7} ships and {number * 3} storms. " * 4


def fill_texts(folder: Path) -> None:
    with closing(KnownChunks(folder)) as known:
        for number in range(ITEMS):
            ids = _tokens(number)
            known.remember(NAMESPACE, ChunkKey.of(SPACE, ids), ids, _text(number))


def read_texts(folder: Path) -> Iterable[Said]:
    with closing(KnownChunks(folder)) as known:
        for number in range(ITEMS):
            key = ChunkKey.of(SPACE, _tokens(number))
            ids = known.token_ids(NAMESPACE, key)
            if ids is not None:
                yield key.hex, _digest(str([*ids]).encode())
            message = f"Look: {_text(number)}\nWhat does it say?"
            for start, end in known.find(NAMESPACE, message):
                yield f"text {number}", _digest(message[start:end].encode())


FILL: dict[str, Callable[[Path], None]] = {
    "slab": fill_shard,
    "catalog": fill_shard,
    "ledger": fill_ledger,
    "texts": fill_texts,
}
READ: dict[str, Callable[[Path], Iterable[Said]]] = {
    "slab": read_shard,
    "catalog": read_shard,
    "ledger": read_ledger,
    "texts": read_texts,
}
FILES = {
    "slab": "ssd/kintsugi-tier/slab",
    "catalog": "ssd/kintsugi-tier/catalog/data.mdb",
    "ledger": "ledger.sqlite",
    "texts": "chunks.sqlite",
}


def read_in_child(kind: str, folder: str) -> None:
    """Print the responses as one JSON object; runs in a separate process."""
    try:
        served = dict(READ[kind](Path(folder)))
    except KintsugiError as error:
        print(json.dumps({"refused": f"{type(error).__name__}: {error}"}))
        return
    print(json.dumps({"served": served}))


def flip(file: Path, chance: random.Random) -> None:
    """Flip one bit among the bytes that are used: blocks of zeros are holes that nothing is read from."""
    data = bytearray(file.read_bytes())
    blocks = [start for start in range(0, len(data), 4096) if any(data[start : start + 4096])]
    start = chance.choice(blocks)
    position = start + chance.randrange(min(4096, len(data) - start))
    data[position] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def flip_once(kind: str, template: Path, expected: dict[str, str], chance: random.Random) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="kintsugi-flips-") as folder:
        damaged = Path(folder) / "damaged"
        shutil.copytree(template, damaged)
        flip(damaged / FILES[kind], chance)
        call = f"read_in_child({kind!r}, {str(damaged)!r})"
        life = f"from benchmarks.support.trust.flips import read_in_child; {call}"
        process = start_process(["-c", life])
        assert process.stdout is not None
        said = process.stdout.read()
        process.wait()
        kill(process)
    if process.returncode != 0 or not said:
        return {"crashed": 1}
    document = json.loads(said.splitlines()[-1])
    if "refused" in document:
        return {"refused": 1}
    served: dict[str, str] = document["served"]
    wrong = sum(expected.get(name) != digest for name, digest in served.items())
    return {"wrong": wrong, "lost": int(served.keys() < expected.keys())}


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """`flips_wrong`."""
    rounds = [f"{kind}-{number}" for kind in FILES for number in range(1 if quick else ROUNDS)]
    flips = 2 if quick else FLIPS_PER_ROUND

    def play(name: str) -> Outcome:
        kind, chance = name.split("-")[0], random.Random(zlib.crc32(f"{seed}/{name}".encode()))
        counts: Counter[str] = Counter(wrong=0)
        with tempfile.TemporaryDirectory(prefix="kintsugi-flips-") as folder:
            template = Path(folder)
            FILL[kind](template)
            expected = dict(READ[kind](template))
            assert len(expected) >= ITEMS, "everything is served before it is damaged"
            for _ in range(flips):
                counts.update(flip_once(kind, template, expected, chance))
        return dict(counts)

    outcomes = run_rounds("flips", rounds, play, quick=quick, seed=seed)
    total: Counter[str] = Counter()
    for outcome in outcomes.values():
        total.update(outcome)
    detail = (
        f"{flips * len(rounds)} flips, over {', '.join(FILES)} alike; {total['lost']} lost what they hit, "
        f"{total['refused']} files refused, {total['crashed']} processes crashed; seed {seed}"
    )
    return [Figure.at_most("flips_wrong", total["wrong"], 0, "", detail)]
