"""What vLLM's processes run when they load plugins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = """
import gc, multiprocessing, sys
sys.modules["vllm"] = None  # importing it takes seconds, and nothing of it is needed here
from kintsugi.engine.plugin import register

def frozen(connection):
    register()
    connection.send(gc.get_freeze_count())

if __name__ == "__main__":
    register()
    assert gc.get_freeze_count() == 0, "an application's own heap is left alone"
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=frozen, args=(theirs,))
    process.start()
    assert mine.poll(60)
    assert mine.recv() > 100
    process.join()
"""


def test_what_a_core_has_imported_is_collected_no_more(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    assert subprocess.run([sys.executable, script], timeout=120).returncode == 0
