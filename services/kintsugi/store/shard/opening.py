"""Opens a shard as its operator configured it: directories, sizes, policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from kintsugi.core.errors import Corrupted, InvalidField
from kintsugi.store.shard.admission import ShardConfig
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.eviction.policies import DEFAULT_POLICY, policy_factory
from kintsugi.store.shard.eviction.policy import EvictionPolicy
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES
from kintsugi.store.shard.tiers.home import TIER_FOLDER, Home
from kintsugi.store.shard.tiers.ram_tier import RamTier

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE_BYTES_MAX = 1 << 60
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|KiB|MiB|GiB|TiB)")


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB`, `1048576`. Raises `InvalidField`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidField("size", f"{text!r} is not a number of bytes, KiB, MiB, GiB or TiB, such as 4GiB")
    size = float(match[1]) * _UNITS[match[2]]
    if size > SIZE_BYTES_MAX:
        raise InvalidField(
            "size", f"{text[:40]} is more than the {SIZE_BYTES_MAX} bytes that can be addressed"
        )
    return int(size)


@dataclass(frozen=True)
class SsdSpec:
    """One SSD tier."""

    path: Path
    capacity_bytes: int

    @staticmethod
    def from_text(text: str) -> SsdSpec:
        """`FOLDER:SIZE`, such as `/mnt/nvme0:64GiB`. Raises `InvalidField`."""
        folder, separator, size = text.rpartition(":")
        if not separator or not folder:
            raise InvalidField("ssd", f"{text!r} must name a folder and a size, such as /mnt/nvme0:64GiB")
        capacity_bytes = parse_size(size)
        if capacity_bytes < BLOCK_BYTES:
            raise InvalidField("ssd", f"{text!r} gives it less than one block of {BLOCK_BYTES} bytes")
        return SsdSpec(Path(folder), capacity_bytes)


@dataclass(frozen=True)
class ShardSpec:
    """Everything that decides how a shard opens."""

    ram_bytes: int
    data_dir: Path | None = None
    """Identity and reports; None only without SSD tiers, and then nothing survives the process."""
    ssds: tuple[SsdSpec, ...] = ()
    """Fastest first."""
    policy: str = DEFAULT_POLICY
    """Name of an eviction policy, for every tier."""
    config: ShardConfig = field(default_factory=ShardConfig)


def open_shard(spec: ShardSpec) -> Shard:
    """The shard, recovered from its directories. Close it.

    Raises `Unavailable` where a directory has another owner, `VersionMismatch` and `Corrupted` for one
    that this build cannot read, `ResourceExhausted` where a disk has no room, `InvalidField`.
    """
    if spec.ssds and spec.data_dir is None:
        raise InvalidField("data-dir", "is needed with --ssd: it holds the shard's identity")
    policy: Callable[[int], EvictionPolicy[ChunkEntry]] = policy_factory(
        spec.policy, lambda entry: entry.address
    )
    with ExitStack() as undo:
        home = None if spec.data_dir is None else Home(spec.data_dir)
        shard_id = None
        if home is not None:
            undo.callback(home.close)
            shard_id = home.identity.shard_id
        disks = [_open_tier(f"ssd{i}", ssd, shard_id, policy, undo) for i, ssd in enumerate(spec.ssds)]
        folders = ", ".join(str(folder) for folder in (spec.data_dir, *(ssd.path for ssd in spec.ssds)))
        with _translate_open_errors(folders):
            shard = Shard(
                RamTier(spec.ram_bytes, policy),
                disks,
                shard_id=shard_id,
                config=spec.config,
                home=home,
            )
        undo.pop_all()
    return shard


@contextmanager
def _translate_open_errors(where: object) -> Iterator[None]:
    """What a folder's files fail with, as our errors."""
    try:
        yield
    except lmdb.Error as error:
        raise Corrupted(
            f"{where}: a catalog cannot be read ({error}); empty its folder: its chunks are computed again"
        ) from error
    except OSError as error:
        raise InvalidField("data-dir", f"{where} cannot be used ({error})") from error


def _open_tier(
    name: str,
    ssd: SsdSpec,
    shard_id: str | None,
    policy: Callable[[int], EvictionPolicy[ChunkEntry]],
    undo: ExitStack,
) -> DiskTier:
    home = Home(ssd.path / TIER_FOLDER, shard_id)
    try:
        with _translate_open_errors(ssd.path):
            tier = DiskTier(name, home, ssd.capacity_bytes, policy)
    except BaseException:
        home.close()
        raise
    undo.callback(tier.close)
    return tier
