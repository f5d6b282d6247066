"""What the metrics of a shard say of its disks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kintsugi.store.shard.exporter import ShardMetrics
from kintsugi.store.shard.opening import open_shard
from tests.integration.store.test_disk_tiers import spec


def test_metrics_show_which_disk_refuses_writes(tmp_path: Path) -> None:
    with closing(open_shard(spec(tmp_path))) as shard:
        registry = ShardMetrics(shard, {}).registry
        (disk,) = shard.disks
        values = []
        for failure in ("", "read-only", ""):
            disk.failure = failure
            values.append(registry.get_sample_value("kintsugi_store_tier_failing", {"tier": disk.name}))
        assert values == [0.0, 1.0, 0.0]
        assert registry.get_sample_value("kintsugi_store_tier_failing", {"tier": "ram"}) is None
