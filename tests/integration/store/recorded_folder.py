"""A small shard's folder, recorded once. Every later version must open it.

`python -m tests.integration.store.recorded_folder` writes `recorded/format-1.tar.gz`, the folder as this
version makes it, and `recorded/format-1.json`, what it holds. Never record it again once it is released:
those bytes are on people's disks. The same commit gives the same bytes.

LMDB's `lock.mdb` is left out: it belongs to one machine, and LMDB makes it anew.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3

from kintsugi.core.layout import (
    FORMAT,
    ChunkManifest,
    Codec,
    KVLayout,
    LayerGroup,
    Part,
    PartKind,
    SideKind,
)
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, anchors_of
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.opening import ShardSpec, SsdSpec
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.ram_tier import PutOptions, RamTier

RECORDED = Path(__file__).parent / "recorded"
SHARD_ID = "5f0c7f4e-9d0b-4c53-8a4b-0a8f6f4c2d11"
FINGERPRINT = ModelFingerprint(bytes(range(32)))
REPORT_NAME, REPORT = "gate", b"a calibration report, as far as a shard knows"
LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16")
MIXED = KVLayout.of_groups(
    [
        LayerGroup(1, 2, (Part(PartKind.KV, 8),)),
        LayerGroup(2, 2, (Part(PartKind.K, 12), Part(PartKind.V, 4))),
        LayerGroup(1, 1, (Part(PartKind.LATENT, 16), Part(PartKind.ROTARY, 4))),
    ],
    "bfloat16",
)
"""Every kind of group."""
SIDE_KINDS = (9, SideKind.PATCH)
"""One of them is a kind that nobody knows."""
RAM_BYTES = 2 << 20
SLAB_BYTES = 23 * BLOCK_BYTES
"""So little that the last chunk finds no run for all of its frames."""
NOW_S = 1.75e9
DURABLE = PutOptions(durable=True)


def shard_spec(folder: Path) -> ShardSpec:
    """How the recorded shard is opened."""
    return ShardSpec(RAM_BYTES, folder / "data", (SsdSpec(folder / "disk", SLAB_BYTES),))


@dataclass(frozen=True)
class Recipe:
    """A chunk to put. Its tokens count up from `first_token`; its frames are blake3 of its name, as are the
    tags of an encrypted one."""

    first_token: int
    num_tokens: int
    codec: Codec
    namespace: str = "acme"
    options: PutOptions = DURABLE
    layout: KVLayout = LAYOUT
    side_kinds: tuple[int, ...] = ()
    key_id: str = ""
    context_token_ids: tuple[int, ...] = ()

    def made(self) -> tuple[ChunkManifest, list[bytes]]:
        tokens = range(self.first_token, self.first_token + self.num_tokens)
        space = ChunkSpace(FINGERPRINT, self.namespace, context_token_ids=self.context_token_ids)
        sizes = {-kind: 10 + kind for kind in self.side_kinds}
        sizes |= {
            layer: self.layout.frame_bytes(self.codec, self.num_tokens, layer)
            for layer in range(self.layout.num_layers)
        }
        frames = [
            blake3.blake3(f"{self.first_token} {layer}".encode()).digest(length=size)
            for layer, size in sizes.items()
        ]
        key, anchors = ChunkKey.of(space, tokens), anchors_of(tokens)
        of = (space, key, anchors, self.num_tokens, self.layout, self.codec)
        manifest = ChunkManifest.of(*of, frames, self.side_kinds)
        return self._encrypted(manifest) if self.key_id else manifest, frames

    def _encrypted(self, manifest: ChunkManifest) -> ChunkManifest:
        tags = blake3.blake3(f"{self.first_token} tags".encode()).digest(length=len(manifest.digests))
        salt = blake3.blake3(f"{self.first_token} salt".encode()).digest(length=16)
        return replace(manifest, key_id=self.key_id, salt=salt, digests=tags)


DELETED = Recipe(9000, 40, Codec.RAW)
"""It leaves a hole of one run in the slab."""
KEPT = (
    Recipe(1000, 40, Codec.RAW),
    Recipe(2000, 41, Codec.INT8, options=PutOptions(durable=True, recompute_ms=12.5)),
    Recipe(3000, 42, Codec.FP8, options=PutOptions(durable=True, ttl_s=1e12), context_token_ids=(1, 2)),
    Recipe(4000, 7, Codec.INT8_SINKS),  # too short for an anchor
    Recipe(5000, 43, Codec.FP8_SINKS, key_id="acme/1"),
    Recipe(6000, 80, Codec.RAW, "rival/team", layout=MIXED, side_kinds=SIDE_KINDS),  # frames of two blocks
)
"""The last finds no run for all of its frames."""


def make(folder: Path) -> dict[str, Any]:
    """Write the folder as this version does; what it then holds."""
    home = Home(folder / "data", SHARD_ID)
    disk = DiskTier("ssd0", Home(folder / "disk/kintsugi-tier", SHARD_ID), SLAB_BYTES)
    shard = Shard(RamTier(RAM_BYTES), [disk], SHARD_ID, home=home, wall_clock=lambda: NOW_S)
    with closing(shard):
        shard.reports.put(FINGERPRINT, REPORT_NAME, REPORT)
        for recipe in (DELETED, *KEPT[:-1]):
            _put(shard, recipe)
        shard.delete(DELETED.namespace, [DELETED.made()[0].key])
        for flushed in shard.flush_writers():
            flushed.result(10.0)
        entry = _put(shard, KEPT[-1])
        assert entry.disk is not None
        assert len(entry.disk.extents) == 2
    return {
        "shard_id": SHARD_ID,
        "report": REPORT.decode(),
        "chunks": in_order(map(_contents, KEPT)),
    }


def _put(shard: Shard, recipe: Recipe) -> ChunkEntry:
    manifest, frames = recipe.made()
    begun = shard.begin_put(manifest, recipe.options, wait_s=10.0)
    assert begun is not None
    for layer, frame in zip(manifest.layers, frames, strict=True):
        begun.write(layer, memoryview(frame))
    durable = shard.commit(begun).durable
    assert durable is not None
    durable.result(10.0)
    return begun.entry


def _contents(recipe: Recipe) -> dict[str, Any]:
    return contents(*recipe.made(), recipe.options.recompute_ms, NOW_S + recipe.options.ttl_s)


def in_order(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(chunks, key=lambda chunk: str(chunk["key"]))


def contents(
    manifest: ChunkManifest, frames: Sequence[bytes], recompute_ms: float, expires_at_s: float
) -> dict[str, Any]:
    """A chunk as `format-1.json` says it."""
    groups = [
        [group.layers, group.heads, [[part.kind.name, part.width] for part in group.parts]]
        for group in manifest.layout.groups
    ]
    return {
        "namespace": manifest.namespace,
        "key": manifest.key.hex,
        "space_digest": manifest.space_digest.hex(),
        "fingerprint": manifest.fingerprint.hex,
        "num_tokens": manifest.num_tokens,
        "groups": groups,
        "codec": int(manifest.codec),
        "anchors": list(manifest.anchors),
        "side_frames": [list(frame) for frame in manifest.side_frames],
        "context_keys": [key.hex for key in manifest.context_keys],
        "key_id": manifest.key_id,
        "salt": manifest.salt.hex(),
        "digests": manifest.digests.hex(),
        "recompute_ms": recompute_ms,
        "expires_at_s": None if math.isinf(expires_at_s) else expires_at_s,
        "frames_blake3": [blake3.blake3(frame).hexdigest() for frame in frames],
    }


def pack_tokens(folder: Path) -> bytes:
    """The folder's files as a `.tar.gz`, the same bytes for the same files."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != "lock.mdb":
                member = tarfile.TarInfo(str(path.relative_to(folder)))
                member.size, member.mode = path.stat().st_size, 0o600
                archive.addfile(member, io.BytesIO(path.read_bytes()))
    return buffer.getvalue()


def unpack(archive: Path, folder: Path) -> None:
    """A writable copy of a recorded folder."""
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")


def record() -> None:
    """Make this version's folder and keep it."""
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        held = make(Path(folder))
        (RECORDED / f"format-{FORMAT}.tar.gz").write_bytes(pack_tokens(Path(folder)))
    (RECORDED / f"format-{FORMAT}.json").write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    record()
