"""Gateways, a shard, a ledger and a log on one machine, filled with texts that are found again in any byte.

Every marked text begins with `PHRASE`. The stub for an engine stores a chunk's own token ids as its KV, so
that a marked chunk is found in frames, too. `find_residue` looks for the phrase, its tokens, and what files
keep of each text in other forms, in all files and in the shard's memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kintsugi.core.deploy import GatewaySpec
from kintsugi.core.exchange import SaveOutcome
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.spaces import ChunkKey, ChunkSpace, TokenIds, anchors_of
from kintsugi.gateway.fill import FillConfig
from kintsugi.gateway.fronts.grpc_server import GatewayServer
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.known_texts import ChunkText
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.precompute.chunking import Chunker
from kintsugi.precompute.ledger import Ledger, ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import pack_tokens
from kintsugi.sdk.client import Client
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from tests.fakes.stub_backend import StubBackend

PHRASE = "Seven violet marmots guard the quiet harbour of Oostzaan"
CORPUS = "library"
MIB = 1 << 20
_LAYERS = 4
_LAYOUT = KVLayout.uniform(num_layers=_LAYERS, num_kv_heads=1, head_dim=32, dtype="bfloat16")


class TellingBackend(StubBackend):
    """Stores each chunk's token ids, again and again, as its KV."""

    def __init__(self, store: GrpcStore) -> None:
        super().__init__(store=store)
        self._shard = store

    async def _put(
        self,
        namespace: str,
        token_ids: Sequence[int],
        ttl_s: float | None,
        asked_at_s: float,
    ) -> SaveOutcome:
        space = self.space(namespace)
        size = _LAYOUT.frame_bytes(Codec.RAW, len(token_ids))
        data = np.asarray(list(token_ids), "<u4").tobytes()
        frame = (data * (size // len(data) + 1))[:size]
        frames: list[memoryview | bytes] = [frame] * _LAYERS
        key, anchor = ChunkKey.of(space, token_ids), anchors_of(token_ids)
        manifest = ChunkManifest.of(
            space, key, anchor, len(token_ids), _LAYOUT, Codec.RAW, frames, asked_at_s=asked_at_s
        )
        await asyncio.to_thread(self._shard.put, manifest, frames, ttl_s=ttl_s or 0.0)
        return SaveOutcome(is_saved=True)


@dataclass(frozen=True)
class MarkedText:
    """A text that is looked for after it was erased."""

    text: str
    tokens: TokenIds

    @property
    def forms(self) -> dict[str, bytes]:
        """What files may hold of it, besides the phrase and its tokens."""
        known = ChunkText.of(self.text)
        assert known is not None
        return {"compressed tokens": pack_tokens(self.tokens.data), "digest of the text": known.digest}


def words(count: int, seed: int) -> str:
    generator = random.Random(seed)
    return " ".join(f"{generator.choice('brzklm')}{generator.randrange(1000)}" for _ in range(count))


@dataclass
class OneGateway:
    """A gateway that is served on the service's loop."""

    gateway: Gateway
    server: GatewayServer


@dataclass
class MarkedService:
    """The parts, for as long as the `with` block of `running` lasts."""

    folder: Path
    shard: Shard
    ledger: Ledger
    chunker: Chunker
    loop: asyncio.AbstractEventLoop
    gateways: list[OneGateway] = field(default_factory=list)

    def client(self, namespace: str, gateway: int = 0) -> Client:
        return Client(self.gateways[gateway].server.address, namespace)

    def mark(self, number: int) -> MarkedText:
        """A marked text of its own, of a few hundred tokens."""
        text = f"{PHRASE}. {number} {words(60, number)}"
        return MarkedText(text, TokenIds.of(self.chunker.token_ids(text)))

    def space(self, namespace: str) -> ChunkSpace:
        backend = self.gateways[0].gateway.backend
        assert isinstance(backend, StubBackend)
        return backend.space(namespace)

    def record(self, namespace: str, documents: dict[str, Sequence[MarkedText]]) -> None:
        """As a precompute job does, once the chunks are stored."""
        space = self.space(namespace)
        edition = self.ledger.open_edition(f"{CORPUS}-{namespace}", space, "file:///corpus", "stub", "{}")
        run = self.ledger.begin_run(edition)
        scanned = [
            ScannedDocument("file:///corpus", place, name, "1", name.encode(), 0, _chunks(space, texts))
            for place, (name, texts) in enumerate(documents.items())
        ]
        self.ledger.record(edition, run, namespace, scanned)
        self.ledger.end_run(run, 0, 0.0, complete=True)

    def find_residue(self, marks: Sequence[MarkedText]) -> list[str]:
        """Where something of the marked texts is left, and in which form."""
        tokens = TokenIds.of(self.chunker.token_ids(PHRASE)).data[:32]
        everywhere = {"text": PHRASE.encode(), "tokens": tokens, "UTF-16": PHRASE.encode("utf-16-le")}
        places = {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        places["arena"] = bytes(self.shard.ram.arena.frames)
        found = []
        for name, data in places.items():
            found += [f"{form} in {name}" for form, needle in everywhere.items() if needle in data]
            if len(data) < 8 * MIB:
                forms = {form for mark in marks for form, needle in mark.forms.items() if needle in data}
                found += [f"{form} in {name}" for form in sorted(forms)]
        return found


def _chunks(space: ChunkSpace, texts: Sequence[MarkedText]) -> tuple[ScannedChunk, ...]:
    return tuple(
        ScannedChunk(ChunkKey.of(space, mark.tokens).digest, pack_tokens(mark.tokens.data), len(mark.tokens))
        for mark in texts
    )


@contextmanager
def running(folder: Path, gateways: int = 2, ram_mib: int = 4, ssd_mib: int = 16) -> Iterator[MarkedService]:
    """Gateways over one shard; the second and later ones follow what the first one erases."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    spec = ShardSpec(ram_mib * MIB, folder / "data", (SsdSpec(folder / "disk", ssd_mib * MIB),))
    with ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        stack.enter_context(_logging_to(folder / "gateway.log"))
        shard = stack.enter_context(closing(open_shard(spec)))
        server = stack.enter_context(ShardServer(shard, "127.0.0.1:0"))
        ledger = stack.enter_context(closing(Ledger(folder / "state")))
        chunker = Chunker.of_model(bundled_checkpoint())
        service = MarkedService(folder, shard, ledger, chunker, loop)

        async def start(index: int) -> OneGateway:
            gateway = Gateway(
                TellingBackend(GrpcStore(server.address, GrpcOptions(ack="durable"))),
                GrpcStore(server.address),
                chunker.token_ids,
                known=KnownChunks(folder / f"known{index}"),
                documents=Ledger(folder / "state"),
                detokenize=chunker.text_of,
                fill=FillConfig(),
            )
            front = GatewayServer(gateway, GatewaySpec(grpc_port=0))
            await front.start()
            gateway.follow_erasures()
            return OneGateway(gateway, front)

        async def stop(one: OneGateway) -> None:
            await one.server.stop(0.0)
            await one.gateway.close()

        for index in range(gateways):
            one = asyncio.run_coroutine_threadsafe(start(index), loop).result(30)
            stack.callback(
                lambda one=one: asyncio.run_coroutine_threadsafe(stop(one), loop).result(30)  # type: ignore[misc]
            )
            service.gateways.append(one)
        yield service


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    """Everything that Kintsugi logs, at its most talkative."""
    logger = logging.getLogger("kintsugi")
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
