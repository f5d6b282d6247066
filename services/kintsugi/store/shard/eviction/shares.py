"""The limits that the rules for namespaces set in a shard: bytes in RAM, and bytes below it.

Call it under the table's lock. It decides and chooses; only the table changes chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.namespaces import NO_RULES, NamespaceRules, bytes_of, sum_account
from kintsugi.store.shard import admission
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.eviction.placement import RAM
from kintsugi.store.shard.pins import Leases
from kintsugi.store.shard.put import PutOptions
from kintsugi.store.shard.tiers.lower_tier import LowerTier
from kintsugi.store.shard.tiers.ram_tier import RamTier


@dataclass(frozen=True)
class NamespaceUse:
    """Bytes that one namespace, or all namespaces that share limits, use in a shard."""

    name: str
    used_bytes: Mapping[str, int]
    """By resource: `ram`, `ssd`, `pinned`."""
    bytes_max: Mapping[str, float]


class Shares:
    """The rules, and the bytes that count against them."""

    def __init__(self, ram: RamTier, lower: Sequence[LowerTier], leases: Leases) -> None:
        """`lower`: the tiers whose bytes `ssd_gib` limits: the SSD tiers, and the bucket if there is one."""
        self.rules: NamespaceRules = NO_RULES
        self._ram = ram
        self._lower = lower
        self._leases = leases

    def exceeds_ram(self, namespace: str, added_bytes: int) -> bool:
        """Return whether `added_bytes` more would exceed the namespace's limit of RAM."""
        limits = self.rules.limits_of(namespace)
        return limits is not None and self._ram_bytes(namespace) + added_bytes > bytes_of(limits.ram_gib)

    def _exceeds_ssd(self, namespace: str, added_bytes: int = 0) -> bool:
        limits = self.rules.limits_of(namespace)
        return limits is not None and self._ssd_bytes(namespace) + added_bytes > bytes_of(limits.ssd_gib)

    def is_full_for(self, manifest: ChunkManifest) -> bool:
        """Return whether the limits of its namespace let the chunk in only if others leave."""
        exceeds = self._exceeds_ssd if self._lower else self.exceeds_ram
        return exceeds(manifest.namespace, manifest.chunk_bytes)

    def may_be_on_ssd(self, manifest: ChunkManifest) -> bool:
        """Return whether the chunk alone fits its namespace's limit of SSD."""
        limits = self.rules.limits_of(manifest.namespace)
        return limits is None or manifest.chunk_bytes <= bytes_of(limits.ssd_gib)

    def check_size(self, manifest: ChunkManifest) -> None:
        """Raise `ResourceExhausted` for a chunk larger than RAM, or than its namespace's limit of RAM."""
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
        """Return `tier`, or RAM if the namespace's limit keeps the chunk off SSD. Raises `ResourceExhausted`
        if the put requires SSD."""
        if tier == RAM or self.may_be_on_ssd(manifest):
            return tier
        if options.durable or options.tier == tier:
            raise _ssd_refusal(manifest)
        return RAM

    def check_write(self, entry: ChunkEntry) -> None:
        """Raise `ResourceExhausted` for a chunk that may not be on SSD, and `Unavailable` for one that only
        an unreachable bucket holds."""
        if entry.ram is None:
            raise Unavailable("the chunk is only in a bucket that does not answer; put it again later")
        if not self.may_be_on_ssd(entry.manifest):
            raise _ssd_refusal(entry.manifest)

    def may_make_room(self, namespace: str) -> Callable[[str], bool]:
        """Return a test of whether another namespace's chunks count against this namespace's limits."""
        account = self.rules.account_of(namespace)
        return lambda other: other == namespace or self.rules.account_of(other) == account

    def choose_from_ssd(self, namespace: str) -> ChunkEntry | None:
        """Return the chunk whose copy below RAM leaves next, from the slowest tier first. None if the
        namespace is within its limit, or if no chunk may leave."""
        if not self._exceeds_ssd(namespace):
            return None
        is_own = self.may_make_room(namespace)
        for tier in reversed(self._lower):
            victim = tier.policy.evict(
                lambda entry: is_own(entry.manifest.namespace) and admission.may_leave_disk(entry)
            )
            if victim is not None:
                tier.evictions += 1
                return victim
        return None

    def uses(self, namespaces: Iterable[str]) -> list[NamespaceUse]:
        """Return the uses of those namespaces that have limits, by account."""
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
        return sum(sum_account(tier.bytes_by_namespace, namespace, self.rules) for tier in self._lower)


def _ssd_refusal(manifest: ChunkManifest) -> ResourceExhausted:
    return ResourceExhausted(
        f"a chunk of {manifest.chunk_bytes} bytes exceeds ssd_gib of namespace {manifest.namespace!r}; "
        "put it to RAM, or have the limit raised"
    )
