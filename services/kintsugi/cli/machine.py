"""The memory of this machine, and whether a service fits into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kintsugi.core.deploy import ServiceSpec
from kintsugi.core.sizing import GIB, service_memory_gib

CGROUPS = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Files of a memory cgroup with its limit and its use, by hierarchy: version 2, and version 1."""
INACTIVE = ("inactive_file ", "total_inactive_file ")
"""Lines of a cgroup's `memory.stat`: pages of files, which are used but free when needed."""


def find_free_memory_gib(root: Path = Path("/")) -> float | None:
    """Return the memory in GiB that this process may still take: the machine's, or less in a cgroup with a
    limit. None if unknown (not Linux)."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return min([free_kib * 1024, *_free_in_cgroups(root)]) / GIB


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each memory cgroup of this process that has a limit."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, hierarchy, path = line.split(":", 2)
            if hierarchy not in CGROUPS:
                continue
            top = root / "sys/fs/cgroup" / hierarchy
            folder = top / path.lstrip("/")
            # In a container the path may be the host's, while the mounted folder is the container's own.
            for one in (folder, *folder.parents) if folder.is_dir() else (top,):
                with suppress(OSError, ValueError):  # `max`, or a group without a limit
                    limit, used = (int((one / name).read_text()) for name in CGROUPS[hierarchy])
                    yield max(0, limit - used + _inactive_bytes(one))
                if one == top:
                    break


def _inactive_bytes(folder: Path) -> int:
    lines = (folder / "memory.stat").read_text().splitlines()
    return max((int(line.split()[1]) for line in lines if line.startswith(INACTIVE)), default=0)


def find_shortage(spec: ServiceSpec, free_gib: float | None = None) -> str:
    """Return a message with the memory that a service needs, by part, and the free memory, if it may not fit;
    "" if it fits. ``free_gib`` None: the result of `find_free_memory_gib`."""
    free_gib = find_free_memory_gib() if free_gib is None else free_gib
    parts = service_memory_gib(spec, _weights_gib(Path(spec.model.path)))
    needed_gib = sum(parts.values())
    if free_gib is None or needed_gib <= free_gib:
        return ""
    return (
        f"full tiers and caches need {needed_gib:.1f} GiB ({describe_parts(parts)}), but {free_gib:.1f} GiB "
        "are free, and the kernel ends processes when none is left; lower --ram (store.ram_gib) or "
        "engines.vllm.kv_cache_memory_bytes, or stop other programs"
    )


def describe_parts(parts: Mapping[str, float]) -> str:
    """Format as `engines 4.0, shards 5.7`, the largest first."""
    ordered = sorted(parts.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {gib:.1f}" for name, gib in ordered)


def _weights_gib(folder: Path) -> float:
    """Return the size of a checkpoint's weights; 0 for a model that is not a folder."""
    files = (one for kind in ("*.safetensors", "*.bin") for one in folder.glob(kind))
    return sum(one.stat().st_size for one in files) / GIB
