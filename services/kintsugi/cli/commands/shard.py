"""A store shard for the length of one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

RAM_BYTES = 4 << 30
"""An upper bound: memory is taken as chunks come."""


@contextmanager
def local_shard() -> Iterator[str]:
    """The URL of a shard on loopback, in this process; its folder and its chunks go with it."""
    # Only commands that run an engine need a server.
    from kintsugi.store.shard.opening import ShardSpec, open_shard
    from kintsugi.store.shard.server import ShardServer

    with TemporaryDirectory(prefix="kintsugi-shard-") as folder:
        spec = ShardSpec(RAM_BYTES, data_dir=Path(folder))
        with closing(open_shard(spec)) as shard, ShardServer(shard, "127.0.0.1:0") as server:
            yield f"grpc://{server.address}"
