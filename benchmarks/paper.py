"""CacheBlend's evaluation on the reference model: data sets, ratio, chunks, batch, device, prefix caching.

Every section repeats a figure of the paper (EuroSys'25, section 7) with the methods of the paper beside
Kintsugi's `query`: full prefill, full KV reuse, and CacheBlend (`hkvd`, r = 15 %, layer 1). The figures are
TTFT of full prefill ÷ that of the method; quality is in the detail. The model has 135 M parameters: it
answers few of these questions, so agreement with full prefill (KL, top-1) says more than F1.

    python benchmarks/paper.py [--quick] [--save] [--only datasets,ratio,chunks,batch,device,prefix]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

from benchmarks.support.musique import MUSIQUE
from benchmarks.support.paper.sections import SECTIONS, PaperSetup
from benchmarks.support.sections import measure, parser_of


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], SECTIONS, "one or two prompts: 2 minutes")
    parser.add_argument("--musique", type=Path, default=MUSIQUE, help="MuSiQue's file")
    arguments = parser.parse_args()
    if not arguments.musique.is_file():
        sys.exit(f"{arguments.musique} is not a file; name MuSiQue's questions with --musique FILE")
    setup = PaperSetup(arguments.quick, musique=arguments.musique)
    config = {"model": "SmolLM2-135M-Instruct, dequantised Q4_1", "rows": setup.details}
    measure("paper", arguments, SECTIONS, config, setup=setup)


if __name__ == "__main__":
    main()
