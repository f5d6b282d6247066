"""Ray, shards and corpora, shared by the tests of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.core.spaces import ChunkKey
from kintsugi.models.passages import read_bundled_passages
from kintsugi.precompute.chunking import ChunkingConfig
from kintsugi.precompute.job import Job
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.progress import Progress
from kintsugi.precompute.spec import JobSpec
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.fakes.stub_prefiller import StubPrefiller

PASSAGE_CHARS_MIN = 200
"""Minimum length of a paragraph; shorter ones are titles."""


@pytest.fixture
def shard() -> Iterator[ShardServer]:
    with ShardServer(Shard(RamTier(256 << 20)), "127.0.0.1:0") as server:
        yield server


def passages(count: int) -> list[str]:
    """Distinct paragraphs of the passages that ship with Kintsugi."""
    paragraphs = [part.strip() for passage in read_bundled_passages() for part in passage.text.split("\n\n")]
    found = [text for text in dict.fromkeys(paragraphs) if len(text) >= PASSAGE_CHARS_MIN]
    assert len(found) >= count
    return found[:count]


def write_corpus(path: Path, texts: dict[str, str]) -> None:
    lines = (json.dumps({"id": name, "text": text, "topic": "tea"}) for name, text in texts.items())
    path.write_text("".join(line + "\n" for line in lines))


class Bench:
    """A source, a shard, a ledger and a log of every prefill."""

    def __init__(self, folder: Path, server: ShardServer) -> None:
        self.folder = folder
        self.server = server
        self.source = folder / "corpus.jsonl"
        self.ledger = Ledger(folder / "state")
        self.log = folder / "prefills.log"

    def spec(self, **values: Any) -> JobSpec:
        base: dict[str, Any] = {
            "source": str(self.source),
            "model": str(make_checkpoint_once("tiny-llama")),
            "store": f"grpc://{self.server.address}",
            "namespace": "acme",
            "corpus": "tea",
            "chunking": ChunkingConfig(64),
            "batch_tokens": 512,
        }
        return JobSpec(**{**base, **values})

    def job(self, on_progress: Callable[[Progress], None] = lambda progress: None, **values: Any) -> Job:
        factory = partial(StubPrefiller, log=str(self.log))
        return Job(self.spec(**values), self.ledger, factory=factory, on_progress=on_progress)

    def run(self, **values: Any) -> Progress:
        return self.job(**values).run()

    @property
    def prefilled(self) -> list[str]:
        """Keys, once per prefill."""
        return self.log.read_text().split() if self.log.exists() else []

    def ledger_keys(self) -> list[ChunkKey]:
        """Keys of all chunks of the corpus."""
        (edition,) = self.ledger.editions("tea")
        return [key for page in self.ledger.keys(edition.id) for key in page]

    def contexts(self) -> dict[str, list[str]]:
        """The keys of the texts that each stored chunk was prefilled after."""
        with closing(GrpcStore(self.server.address)) as store:
            return {
                manifest.key.hex: [key.hex for key in manifest.context_keys]
                for manifest in store.list("acme", 100_000)
            }

    def stored(self) -> set[str]:
        store = GrpcStore(self.server.address)
        try:
            return {manifest.key.hex for manifest in store.list("acme", 100_000)}
        finally:
            store.close()


@pytest.fixture
def bench(tmp_path: Path, shard: ShardServer, running_ray: None) -> Bench:
    return Bench(tmp_path, shard)
