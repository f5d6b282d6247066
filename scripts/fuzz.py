"""Coverage-guided fuzzing of every decoder: `python scripts/fuzz.py --minutes 10`.

Needs atheris and kintsugi's base and `store` dependencies, in an environment of their own: atheris is not
part of the development environment. Each decoder of `tests/decoders.py` gets an equal share of the time, in a
process of its own. A finding ends the run with its traceback and leaves the input in the corpus folder.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
INPUT_BYTES_MAX = 65536


def fuzz(name: str, corpus: Path, seconds: int) -> None:
    """Fuzz one decoder in this process, which libFuzzer ends."""
    import atheris

    sys.path[:0] = [str(ROOT), str(ROOT / "services")]
    with atheris.instrument_imports(include=["kintsugi", "tests.decoders"]):
        from tests.decoders import DECODERS, seeds
    for index, seed in enumerate(seeds(name)):
        (corpus / f"seed-{index}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}", "-rss_limit_mb=2048"]
    options += [f"-artifact_prefix={corpus}/", "-print_final_stats=1", "-verbosity=1"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], DECODERS[name])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="total time over all decoders")
    parser.add_argument("--decoder", help="only this one, in this process")
    parser.add_argument("--corpus", type=Path, help="folder of inputs (default: temporary)")
    arguments = parser.parse_args()
    corpus = arguments.corpus or Path(tempfile.mkdtemp(prefix="kintsugi-fuzz-"))
    if arguments.decoder:
        fuzz(arguments.decoder, corpus, int(60 * arguments.minutes))
        return 0
    sys.path[:0] = [str(ROOT), str(ROOT / "services")]
    from tests.decoders import DECODERS

    total = 0
    for name in DECODERS:
        folder = corpus / name
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--decoder", name, "--corpus", str(folder)]
        command += ["--minutes", str(arguments.minutes / len(DECODERS))]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        units = re.search(r"number_of_executed_units: (\d+)", done.stderr)
        coverage = re.findall(r"cov: (\d+)", done.stderr)
        runs = int(units[1]) if units else 0
        total += runs
        print(f"{name}: {runs} runs, coverage {coverage[-1] if coverage else '?'}", flush=True)
        if done.returncode:
            print(f"{done.stderr[-4000:]}\nfinding in {name}; the input is in {folder}", flush=True)
            return 1
    print(f"{total} runs in {arguments.minutes:g} minutes, no finding", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
