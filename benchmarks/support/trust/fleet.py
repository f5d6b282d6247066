"""Runs shards in separate processes, for rounds that kill them, and counts their chunks afterwards."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.protocol.interface import ChunkStore, LayerFrame
from tests.fakes.fixed_directory import FixedDirectory

NAMESPACE = "acme"
START_S = 60.0
REPOSITORY = Path(__file__).parents[3]
Frames = Sequence[bytes]


def start_process(arguments: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """A Python process that imports this checkout and says on its standard output how far it is."""
    paths = [str(REPOSITORY / part) for part in ("services", "operators", ".")]
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
    )


def read_line(process: subprocess.Popen[str], timeout_s: float = START_S) -> str:
    """The next line that it says. Raises `AssertionError` where it ends or takes too long."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline() if ready else ""
    assert line, f"{process.args!r} said nothing within {timeout_s:.0f} s"
    return line


def kill(process: subprocess.Popen[str]) -> None:
    """Idempotent."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


class ShardProcess:
    """One shard, which keeps its folder and its address when it is started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listen = "127.0.0.1:0"
        self.start()

    def spawn(self) -> subprocess.Popen[str]:
        return start_process(
            [
                *("-c", "from kintsugi.cli.commands.store import app; app()", "serve"),
                *("--listen", self._listen, "--data-dir", str(self._folder / "data"), "--ack", "durable"),
                *("--ram", "16MiB", "--ssd", f"{self._folder / 'ssd'}:64MiB"),
            ]
        )

    def start(self) -> None:
        self.process = self.spawn()
        words = read_line(self.process).split()
        self._listen = words[-1]
        self.address = ShardAddress(words[1], self._listen)


class Fleet:
    """As many shards as there are to be copies of each chunk, so that a kill leaves the others alone with
    it."""

    def __init__(self, folder: Path, replicas: int) -> None:
        self.shards = [ShardProcess(folder / f"shard-{index}") for index in range(replicas)]
        self._map = ShardMap(1, tuple(shard.address for shard in self.shards), replicas)
        self._file = folder / "shards.json"
        shards = [{"shard_id": one.shard_id, "address": one.address} for one in self._map.shards]
        self._file.write_text(json.dumps({"version": 1, "replicas": replicas, "shards": shards}))

    @property
    def url(self) -> str:
        """Where processes find the shards; what they put is acknowledged once it is on disk."""
        return f"shardfile://{self._file}?ack=durable"

    def connect(self) -> ShardedStore:
        return ShardedStore(FixedDirectory(self._map), GrpcOptions(ack="durable", call_timeout_s=30.0))

    def close(self) -> None:
        for shard in self.shards:
            kill(shard.process)

    def judge(
        self,
        stored: Collection[ChunkKey],
        deleted: Collection[ChunkKey],
        expected: Mapping[ChunkKey, Frames],
        namespace: str = NAMESPACE,
    ) -> dict[str, int]:
        """Return the number of wrong chunks, and of `stored` chunks that no shard has.

        Wrong: other bytes than `expected`, where they are known, a copy in any shard whose digests do not
        match, or one that is back after its deletion was acknowledged.
        """
        wrong: set[ChunkKey] = set()
        with closing(self.connect()) as store:
            found = store.lookup(namespace, list(stored))
            lost = sum(manifest is None for manifest in found)
            back = store.lookup(namespace, list(deleted))
            wrong |= {key for key, manifest in zip(deleted, back, strict=True) if manifest is not None}
        for shard in self.shards:
            with closing(GrpcStore(shard.address.address)) as one:
                keys = [manifest.key for manifest in one.list(namespace, 10_000)]
                wrong |= {
                    key for key in keys if expected.get(key, None) not in (None, _read(one, namespace, key))
                }
                wrong |= set(one.verify(namespace, keys).quarantined)
        return {"wrong": len(wrong), "lost": lost, "stored": len(stored)}


def _read(store: ChunkStore, namespace: str, key: ChunkKey) -> list[bytes] | None:
    """The chunk's frames; None where the store says that it is lost, which is not wrong."""
    (manifest,) = store.lookup(namespace, [key])
    if manifest is None:
        return None
    layout = manifest.layout
    heads = HeadRange(0, layout.num_kv_heads)
    items = store.stream(namespace, [key], range(layout.num_layers), heads, 30.0)
    frames = [bytes(item.data) for item in items if isinstance(item, LayerFrame)]
    return frames if len(frames) == layout.num_layers else None


def until_it_says(process: subprocess.Popen[str], take: Callable[[str], bool]) -> None:
    """Pass each line that a process prints to `take`, until it returns True or the process ends."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n") and take(line):
            return
