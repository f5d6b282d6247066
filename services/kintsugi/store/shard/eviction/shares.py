"""What each namespace may keep in a shard: limits of RAM and SSD by the rules for namespaces.

Called under the table's lock. It decides and chooses; only the table changes chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.namespaces.limits import bytes_of
from kintsugi.core.namespaces.rules import NO_RULES, NamespaceRules, sum_account
from kintsugi.store.shard import admission
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.eviction.placement import RAM
from kintsugi.store.shard.pins import Leases
from kintsugi.store.shard.put import PutOptions
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.ram_tier import RamTier


@dataclass(frozen=True)
class NamespaceUse:
    """What a namespace uses of a shard, or all namespaces that share their limits."""

    name: str
    used_bytes: Mapping[str, int]
    """By resource: `ram`, `ssd`, `pinned`."""
    bytes_max: Mapping[str, float]


class Shares:
    """The rules, and what counts against them."""

    def __init__(self, ram: RamTier, disks: Sequence[DiskTier], leases: Leases) -> None:
        self.rules: NamespaceRules = NO_RULES
        self._ram = ram
        self._disks = disks
        self._leases = leases

    def exceeds_ram(self, namespace: str, added_bytes: int) -> bool:
        """Whether the namespace would have more in RAM than it may."""
        limits = self.rules.limits_of(namespace)
        if limits is None or limits.ram_gib is None:
            return False
        return self._ram_bytes(namespace) + added_bytes > bytes_of(limits.ram_gib)

    def exceeds_ssd(self, namespace: str) -> bool:
        """Whether the namespace has more on SSD than it may."""
        limits = self.rules.limits_of(namespace)
        if limits is None or limits.ssd_gib is None:
            return False
        return self._ssd_bytes(namespace) > bytes_of(limits.ssd_gib)

    def is_full_for(self, manifest: ChunkManifest) -> bool:
        """Whether others would have to leave for the chunk, by the limits of its namespace."""
        namespace, limits = manifest.namespace, self.rules.limits_of(manifest.namespace)
        if limits is None:
            return False
        if self._disks:
            return self._ssd_bytes(namespace) + manifest.chunk_bytes > bytes_of(limits.ssd_gib)
        return self.exceeds_ram(namespace, manifest.chunk_bytes)

    def may_be_on_ssd(self, manifest: ChunkManifest) -> bool:
        """Whether the chunk alone keeps its namespace's limit of SSD."""
        limits = self.rules.limits_of(manifest.namespace)
        return limits is None or manifest.chunk_bytes <= bytes_of(limits.ssd_gib)

    def check_size(self, manifest: ChunkManifest) -> None:
        """Raise `ResourceExhausted` for a chunk that RAM, or its namespace's limit of it, can never hold."""
        if manifest.chunk_bytes > self._ram.capacity_bytes:
            raise ResourceExhausted(
                f"a chunk of {manifest.chunk_bytes} bytes exceeds the RAM tier's {self._ram.capacity_bytes}; "
                "raise its capacity or make chunks shorter"
            )
        limits = self.rules.limits_of(manifest.namespace)
        if limits is not None and manifest.chunk_bytes > bytes_of(limits.ram_gib):
            raise ResourceExhausted(
                f"a chunk of {manifest.chunk_bytes} bytes exceeds ram_gib {limits.ram_gib:g} of namespace "
                f"{manifest.namespace!r}; make chunks shorter, or have the limit raised"
            )

    def tier_for(self, manifest: ChunkManifest, tier: str, options: PutOptions) -> str:
        """The best ``tier``, or RAM where the namespace may not have the chunk on SSD. Raises
        `ResourceExhausted` where the put asks for SSD."""
        if tier == RAM or self.may_be_on_ssd(manifest):
            return tier
        if options.durable or options.tier == tier:
            raise self.refuse_ssd(manifest)
        return RAM

    def check_write(self, entry: ChunkEntry) -> None:
        """Raise `ResourceExhausted` for a chunk that may not be on SSD, `Unavailable` for one that RAM does
        not hold: its only copy is in a bucket that does not keep it now."""
        if entry.ram is None:
            raise Unavailable("the chunk is only in a bucket that does not answer; put it again later")
        if not self.may_be_on_ssd(entry.manifest):
            raise self.refuse_ssd(entry.manifest)

    def refuse_ssd(self, manifest: ChunkManifest) -> ResourceExhausted:
        """The error for a chunk that its namespace may not have on SSD."""
        return ResourceExhausted(
            f"a chunk of {manifest.chunk_bytes} bytes exceeds ssd_gib of namespace {manifest.namespace!r}; "
            "put it to RAM, or have the limit raised"
        )

    def may_make_room(self, namespace: str) -> Callable[[str], bool]:
        """Whether chunks of another namespace count against the same limits as this one's."""
        account = self.rules.account_of(namespace)
        return lambda other: other == namespace or self.rules.account_of(other) == account

    def choose_from_ssd(self, namespace: str) -> ChunkEntry | None:
        """The chunk whose copy on SSD leaves next, the slowest tier's first; None once the namespace keeps
        its limit, and where nothing may leave."""
        if not self.exceeds_ssd(namespace):
            return None
        is_own = self.may_make_room(namespace)
        for disk in reversed(self._disks):
            victim = disk.policy.evict(
                lambda entry: is_own(entry.manifest.namespace) and admission.may_leave_disk(entry)
            )
            if victim is not None:
                disk.evictions += 1
                return victim
        return None

    def uses(self, namespaces: Iterable[str]) -> list[NamespaceUse]:
        """What those of the namespaces use that a rule is about."""
        limited = [name for name in namespaces if self.rules.limits_of(name) is not None]
        by_account = {self.rules.account_of(name): name for name in limited}
        return [self._use_of(account, name) for account, name in sorted(by_account.items())]

    def _use_of(self, account: str, namespace: str) -> NamespaceUse:
        limits = self.rules.limits_of(namespace)
        assert limits is not None
        pinned = sum_account(self._leases.bytes_by_namespace, namespace, self.rules)
        return NamespaceUse(
            account,
            {"ram": self._ram_bytes(namespace), "ssd": self._ssd_bytes(namespace), "pinned": pinned},
            {
                "ram": bytes_of(limits.ram_gib),
                "ssd": bytes_of(limits.ssd_gib),
                "pinned": self._leases.namespace_bytes_max,
            },
        )

    def _ram_bytes(self, namespace: str) -> int:
        return sum_account(self._ram.bytes_by_namespace, namespace, self.rules)

    def _ssd_bytes(self, namespace: str) -> int:
        return sum(sum_account(disk.bytes_by_namespace, namespace, self.rules) for disk in self._disks)
