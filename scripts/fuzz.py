"""Coverage-guided fuzzing of every decoder: `make fuzz`, or `python scripts/fuzz.py --minutes 10`.

Needs atheris beside kintsugi's dependencies, in an environment of their own: atheris is not part of the
development environment. Each decoder of `tests/decoders.py` gets an equal share of the time, or the same
number of inputs (`--runs`), in a process of its own. Inputs that reach new code stay in the corpus folder;
the next run begins with them. A finding is printed with its traceback, and its input is left there, too.
"""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
INPUT_BYTES_MAX = 65536
INPUT_S_MAX = 10
"""An input that takes longer is a finding."""
CORPUS = ROOT / ".cache/fuzz"


@dataclass(frozen=True)
class Outcome:
    """What fuzzing one decoder found."""

    runs: int
    coverage: int
    """Number of edges that the inputs reached."""
    finding: str = ""
    """The end of libFuzzer's output; empty: no finding."""


def run_decoder(name: str, corpus: Path, limit: list[str]) -> Outcome:
    """Fuzz one decoder in a process of its own. ``limit``: options of libFuzzer."""
    folder = corpus / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--decoder", name, "--corpus", str(folder), *limit]
    done = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    output = done.stderr.decode(errors="replace")
    units = re.search(r"number_of_executed_units: (\d+)", output)
    coverage = re.findall(r"cov: (\d+)", output)
    finding = output[-4000:] or f"exit status {done.returncode}" if done.returncode else ""
    return Outcome(int(units[1]) if units else 0, int(coverage[-1]) if coverage else 0, finding)


def fuzz(name: str, corpus: Path, limit: list[str]) -> None:
    """Fuzz one decoder in this process, which libFuzzer ends."""
    import atheris

    logging.disable()  # log lines for every input would fill the memory of the process that reads them
    sys.path[:0] = [str(ROOT), str(ROOT / "services")]
    ours = ["kintsugi", "tests.decoders", "tests.file_decoders", "tests.front_decoders"]
    with atheris.instrument_imports(include=ours):
        from tests.decoders import DECODERS, seeds
    for index, seed in enumerate(seeds(name)):
        (corpus / f"seed-{index}").write_bytes(seed)
    options = [*limit, f"-max_len={INPUT_BYTES_MAX}", f"-timeout={INPUT_S_MAX}", "-rss_limit_mb=2048"]
    options += [f"-artifact_prefix={corpus}/", "-print_final_stats=1", "-verbosity=1"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], DECODERS[name])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="total time over all decoders")
    parser.add_argument("--runs", type=int, help="inputs per decoder, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; 0: a new one each time")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder of inputs, which grows")
    parser.add_argument("--only", nargs="*", help="these decoders (default: all)")
    parser.add_argument("--decoder", help=argparse.SUPPRESS)
    arguments, limit = parser.parse_known_args()
    if arguments.decoder:
        fuzz(arguments.decoder, arguments.corpus, limit)
        return 0
    sys.path[:0] = [str(ROOT), str(ROOT / "services")]
    from tests.decoders import DECODERS

    names = arguments.only or list(DECODERS)
    seconds = max(1, int(60 * arguments.minutes / len(names)))
    limit = [f"-runs={arguments.runs}"] if arguments.runs else [f"-max_total_time={seconds}"]
    total = findings = 0
    for name in names:
        outcome = run_decoder(name, arguments.corpus, [*limit, f"-seed={arguments.seed}"])
        total += outcome.runs
        findings += bool(outcome.finding)
        print(f"{name}: {outcome.runs} runs, coverage {outcome.coverage}", flush=True)
        if outcome.finding:
            print(
                f"{outcome.finding}\nfinding in {name}; the input is in {arguments.corpus / name}", flush=True
            )
    print(f"{total} runs, {findings} findings", flush=True)
    return min(findings, 1)


if __name__ == "__main__":
    sys.exit(main())
