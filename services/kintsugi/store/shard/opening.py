"""Opens a shard from its configuration: directories, sizes, eviction policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import blake3
import lmdb

from kintsugi.core.errors import Corrupted, InvalidField
from kintsugi.store.shard.entry import MakePolicy
from kintsugi.store.shard.eviction.policy import DEFAULT_POLICY, policy_factory
from kintsugi.store.shard.malloc import keep_large_buffers
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.bucket import BucketUrl, S3Bucket
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES
from kintsugi.store.shard.tiers.home import TIER_FOLDER, Home
from kintsugi.store.shard.tiers.object_tier import ObjectTier
from kintsugi.store.shard.tiers.ram_tier import RamTier

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
STAGING_BYTES_MAX = 256 << 20
STAGING_BYTES_MIN = 16 << 20
STAGING_SHARE = 8
"""Memory for chunks that wait for their upload to a bucket: 1/8 of the RAM tier's size, within these bounds,
in addition to the RAM tier."""
SIZE_BYTES_MAX = 1 << 60
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|KiB|MiB|GiB|TiB)")


def parse_size(text: str) -> int:
    """Parse a size such as `4GiB`, `512MiB` or `1048576` (bytes). Raises `InvalidField`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidField("size", f"{text!r} is not a number of bytes, KiB, MiB, GiB or TiB, such as 4GiB")
    size = float(match[1]) * _UNITS[match[2]]
    if size > SIZE_BYTES_MAX:
        raise InvalidField(
            "size", f"{text[:40]} is more than the {SIZE_BYTES_MAX} bytes that can be addressed"
        )
    return int(size)


def _parse_place(option: str, text: str, noun: str, example: str, prefix: str = "") -> tuple[str, int]:
    """Parse `PLACE:SIZE`. Raises `InvalidField` if the place does not begin with `prefix`, or if the size is
    less than one block."""
    place, separator, size = text.rpartition(":")
    if not separator or not place or not place.startswith(prefix):
        raise InvalidField(option, f"{text!r} must name a {noun} and a size, such as {example}")
    capacity_bytes = parse_size(size)
    if capacity_bytes < BLOCK_BYTES:
        raise InvalidField(option, f"{text!r} is less than one block of {BLOCK_BYTES} bytes")
    return place, capacity_bytes


@dataclass(frozen=True)
class SsdSpec:
    """One SSD tier."""

    path: Path
    capacity_bytes: int

    @staticmethod
    def from_text(text: str) -> SsdSpec:
        """Parse `FOLDER:SIZE`, such as `/mnt/nvme0:64GiB`. Raises `InvalidField`."""
        folder, capacity_bytes = _parse_place("ssd", text, "folder", "/mnt/nvme0:64GiB")
        return SsdSpec(Path(folder), capacity_bytes)


@dataclass(frozen=True)
class BucketSpec:
    """The object tier: how much of a bucket a shard may use."""

    url: BucketUrl
    capacity_bytes: int

    @staticmethod
    def from_text(text: str) -> BucketSpec:
        """Parse `s3://BUCKET/PREFIX:SIZE`, such as `s3://chunks/kintsugi:1TiB`. Raises `InvalidField`."""
        example = "s3://chunks/kintsugi:1TiB"
        url, capacity_bytes = _parse_place("bucket", text, "bucket", example, prefix="s3:")
        return BucketSpec(BucketUrl.from_text(url), capacity_bytes)


@dataclass(frozen=True)
class ShardSpec:
    """The configuration of a shard."""

    ram_bytes: int
    data_dir: Path | None = None
    """Folder of identity and reports. None, without SSD tiers: nothing survives the process."""
    ssds: tuple[SsdSpec, ...] = ()
    """Fastest first."""
    policy: str = DEFAULT_POLICY
    """Name of the eviction policy of every tier."""
    bucket: BucketSpec | None = None
    """The tier below the SSD tiers. Needs at least one SSD tier."""


def open_shard(spec: ShardSpec) -> Shard:
    """Open a shard and recover it from its directories. The caller must close it. Configures the process's
    allocator.

    Raises `Unavailable` if another process uses a directory, `VersionMismatch` or `Corrupted` if this build
    cannot read it, `ResourceExhausted` if a disk has no room, `InvalidField`.
    """
    if spec.ssds and spec.data_dir is None:
        raise InvalidField("data-dir", "is required with --ssd: it holds the shard's identity")
    if spec.bucket is not None and not spec.ssds:
        raise InvalidField("bucket", "requires an SSD tier, whose evicted chunks it takes: pass --ssd")
    keep_large_buffers()
    policy: MakePolicy = policy_factory(spec.policy, lambda entry: entry.address)
    with ExitStack() as undo:
        home = None if spec.data_dir is None else Home(spec.data_dir)
        shard_id = None
        if home is not None:
            undo.callback(home.close)
            shard_id = home.shard_id
        disks = [_open_tier(f"ssd{i}", ssd, shard_id, policy, undo) for i, ssd in enumerate(spec.ssds)]
        bucket = _open_bucket(spec, shard_id, policy, undo)
        folders = ", ".join(str(folder) for folder in (spec.data_dir, *(ssd.path for ssd in spec.ssds)))
        with _translate_open_errors(folders):
            shard = Shard(
                RamTier(spec.ram_bytes, policy),
                disks,
                shard_id=shard_id,
                home=home,
                bucket=bucket,
            )
        undo.pop_all()
    return shard


@contextmanager
def _translate_open_errors(where: object) -> Iterator[None]:
    """Convert the errors of a folder's files to Kintsugi's errors."""
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
    policy: MakePolicy,
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


def _open_bucket(
    spec: ShardSpec,
    shard_id: str | None,
    policy: MakePolicy,
    undo: ExitStack,
) -> ObjectTier | None:
    if spec.bucket is None:
        return None
    assert spec.data_dir is not None, "SSD tiers need it"
    assert shard_id is not None, "it is in the data directory"
    bucket = S3Bucket(spec.bucket.url, shard_id)
    # Each bucket has its own catalog: another URL in the settings opens another one.
    folder = spec.data_dir / f"bucket-{blake3.blake3(str(spec.bucket.url).encode()).hexdigest(8)}"
    staging_bytes = min(STAGING_BYTES_MAX, max(spec.ram_bytes // STAGING_SHARE, STAGING_BYTES_MIN))
    with _translate_open_errors(folder):
        tier = ObjectTier(bucket, folder, spec.bucket.capacity_bytes, staging_bytes, policy)
    undo.callback(tier.close)
    return tier
