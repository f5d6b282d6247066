"""Runs attention cases in Triton's interpreter: one JSON request per line in, one answer per line out.

Its own process, because the interpreter is chosen by an environment variable before Triton is imported,
and the test process has imported it long ago.
"""

from __future__ import annotations

import json
import sys

import torch

from kintsugi.fusor.kernels.scattered import Tile, triton_attention
from tests.contracts.scattered_attention import CHECKS, Case


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        case = Case(**request["case"])
        tile = None if case.tile is None else Tile(*case.tile, warps=4, stages=1)
        extra = {"tile": tile, "splits": case.splits}
        try:
            error: float | str = CHECKS[request["check"]](triton_attention, case, "cpu", **extra)
        except AssertionError as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
