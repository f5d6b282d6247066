"""How much memory is free, in which cgroup, and what is said if a service may not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.cli.commands import doctor
from kintsugi.cli.machine import find_free_memory_gib, find_shortage
from kintsugi.core.deploy import EngineSpec, ModelSpec, ServiceSpec, StoreSpec
from kintsugi.core.sizing import service_memory_gib

GIB = 1 << 30
SPEC = ServiceSpec(ModelSpec("m"))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n"}
V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "5:cpu:/x\n4:memory:/a\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "free_gib"),
    [
        ({}, 8),
        (V2, 8),
        (
            {
                **V2,
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "1\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            },
            2,
        ),
        (
            {  # in a container: the path is the host's, the folder the container's
                **V2,
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/memory.stat": "anon 1\n",
            },
            3,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
            },
            3,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/a/memory.stat": "",
            },
            8,
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], free_gib: float) -> None:
    write(tmp_path, MEMINFO | files)
    assert find_free_memory_gib(tmp_path) == free_gib


def test_a_system_without_figures_has_no_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_free_memory_gib(tmp_path) is None
    monkeypatch.setattr("kintsugi.cli.machine.find_free_memory_gib", lambda: None)
    assert find_shortage(SPEC) == ""


def test_a_shortage_names_the_parts_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(GIB // 1024))
    spec = ServiceSpec(ModelSpec(str(tmp_path)), store=StoreSpec(ram_gib=10))
    needed = sum(service_memory_gib(spec, 1 / 1024).values())
    assert find_shortage(spec, needed) == ""
    says = find_shortage(spec, needed - 1)
    assert says.startswith(f"full tiers and caches need {needed:.1f} GiB (shards 12.2, engines 3.8, ")
    assert "lower --ram (store.ram_gib)" in says


def test_engines_on_gpus_keep_caches_and_weights_elsewhere() -> None:
    spec = ServiceSpec(ModelSpec("m"), EngineSpec(gpus=1, replicas=2))
    assert service_memory_gib(spec, 100)["engines"] == 2 * 1.75
    bound = ServiceSpec(ModelSpec("m"), EngineSpec(vllm={"kv_cache_memory_bytes": 8 * GIB}))
    assert service_memory_gib(bound, 1)["engines"] == 1.75 + 8 + 1


@pytest.mark.parametrize(("free_gib", "verdict"), [(1.0, "warning"), (100.0, "ok"), (None, "skipped")])
def test_the_doctor_warns_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, free_gib: float | None, verdict: str
) -> None:
    monkeypatch.setattr(doctor, "find_free_memory_gib", lambda: free_gib)
    check = doctor.memory_check("m")
    assert (check.name, check.verdict) == ("memory", verdict)
