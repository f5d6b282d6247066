"""A shard from what its operator asked for: directories, sizes, policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kintsugi.core.errors import InvalidField
from kintsugi.store.admission import ShardConfig
from kintsugi.store.disk_tier import DiskTier
from kintsugi.store.entry import Entry
from kintsugi.store.home import Home
from kintsugi.store.policies import DEFAULT_POLICY, policy_factory
from kintsugi.store.policy import EvictionPolicy
from kintsugi.store.ram_tier import RamTier
from kintsugi.store.shard import Shard

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|KiB|MiB|GiB|TiB)")


def parsed_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB`, `1048576`. Raises `InvalidField`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidField("size", f"{text!r} is not a number of bytes, KiB, MiB, GiB or TiB, such as 4GiB")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class SsdSpec:
    """One SSD tier."""

    path: Path
    capacity_bytes: int

    @staticmethod
    def parsed(text: str) -> SsdSpec:
        """`FOLDER:SIZE`, such as `/mnt/nvme0:64GiB`. Raises `InvalidField`."""
        folder, separator, size = text.rpartition(":")
        if not separator or not folder:
            raise InvalidField("ssd", f"{text!r} must name a folder and a size, such as /mnt/nvme0:64GiB")
        return SsdSpec(Path(folder), parsed_size(size))


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
    policy: Callable[[int], EvictionPolicy[Entry]] = policy_factory(spec.policy, lambda entry: entry.address)
    with ExitStack() as undo:
        home = None if spec.data_dir is None else Home(spec.data_dir)
        shard_id = None
        if home is not None:
            undo.callback(home.close)
            shard_id = home.identity.shard_id
        disks = [_opened_tier(f"ssd{i}", ssd, shard_id, policy, undo) for i, ssd in enumerate(spec.ssds)]
        shard = Shard(
            RamTier(spec.ram_bytes, policy),
            disks,
            shard_id=shard_id,
            config=spec.config,
            home=home,
        )
        undo.pop_all()
    return shard


def _opened_tier(
    name: str,
    ssd: SsdSpec,
    shard_id: str | None,
    policy: Callable[[int], EvictionPolicy[Entry]],
    undo: ExitStack,
) -> DiskTier:
    home = Home(ssd.path / "kintsugi-tier", shard_id)
    undo.callback(home.close)
    return DiskTier(name, home, ssd.capacity_bytes, policy)
