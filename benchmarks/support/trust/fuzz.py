"""Coverage-guided fuzzing of every decoder: inputs that were tried, and findings. See `scripts/fuzz.py`.

Needs `.venv-fuzz`, which `make fuzz` makes. One round is one decoder.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.support.figures import Figure
from benchmarks.support.trust.rounds import Outcome, run_rounds
from tests.decoders import DECODERS

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-fuzz/bin/python"
INPUTS_MIN = 10_000_000
DECODER_INPUTS_MIN = 500_000
QUICK_INPUTS = 2_000
_RUN = """
import json, pathlib, sys
sys.path.insert(0, "scripts")
import fuzz
outcome = fuzz.run_decoder(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:])
print(json.dumps(vars(outcome)))
"""


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """The sums over all decoders, and the least that one of them was given."""
    share = -(-INPUTS_MIN // len(DECODERS))
    inputs = QUICK_INPUTS if quick else max(DECODER_INPUTS_MIN, share)
    with tempfile.TemporaryDirectory(prefix="kintsugi-fuzz-") as corpus:

        def fuzz(name: str) -> Outcome:
            return _fuzz(name, corpus, inputs, seed)

        outcomes = run_rounds("fuzz", DECODERS, fuzz, quick=quick, seed=seed)
    runs = {name: outcome["runs"] for name, outcome in outcomes.items()}
    found = [name for name, outcome in outcomes.items() if outcome["finding"]]
    least = min(runs, key=runs.__getitem__)
    bars = (None, None) if quick else (INPUTS_MIN, DECODER_INPUTS_MIN)
    return [
        Figure.at_least("fuzz_inputs", sum(runs.values()), bars[0], "inputs", f"{len(runs)} decoders"),
        Figure.at_least("fuzz_decoder_inputs", runs[least], bars[1], "inputs", f"least: {least}"),
        Figure.at_most("fuzz_findings", len(found), 0, "decoders", ", ".join(found)),
    ]


def _fuzz(name: str, corpus: str, inputs: int, seed: int) -> Outcome:
    command = [str(PYTHON), "-c", _RUN, name, corpus, f"-runs={inputs}", f"-seed={seed}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "services")))}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    outcome: Outcome = json.loads(done.stdout)
    return outcome
