"""Everything that a GPU can show, in one run of less than ten minutes: `make gpu`.

Needs torch and Triton alone; with vLLM installed, the engine's matrix of `tests/gpu` runs as well.

- **kernel**: scattered attention against its reference, and its time against dense attention's; also for one
  rank of several, where the walk over the context is split.
- **codecs**: every codec decoded on the device equals what the host decodes; bytes per second.
- **loading**: a layer loader with one thread and with several; whether loading hides behind computation.
- **pass**: whole blends on a reference stack with the layers of Mistral-7B and Llama-70B, at 4k to 32k
  tokens, against a dense prefill on the same stack; how often the host waits; peak memory.
- **engine**: `tests/gpu/test_engine.py`, where vLLM is installed.

Prints a table per section and writes one JSON file. A section that fails is recorded with its error, and
what no time is left for is recorded as skipped. `--dry` runs all of it at tiny shapes on the CPU: it shows
that the script works, and measures nothing. There it also counts, over a pretended device, waits and pageable
copies.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.bare import REPOSITORY, prepare_imports

STAND_INS = prepare_imports()

import torch  # noqa: E402

from benchmarks.gpu import blending, scattered_attention  # noqa: E402
from kintsugi.core.layout import Codec, KVLayout  # noqa: E402
from kintsugi.core.plan import Selection  # noqa: E402
from kintsugi.core.request import SelectorName  # noqa: E402
from kintsugi.fusor import staging  # noqa: E402
from kintsugi.fusor.attention import attend_scattered  # noqa: E402
from kintsugi.fusor.codecs import Encoding, as_bytes, decode_frame, decode_into, encode_frame  # noqa: E402
from tests.contracts.scattered_attention import TOLERANCE, Case, matches_reference  # noqa: E402
from tests.fakes.paged_stack import ModelShape  # noqa: E402

MISTRAL_7B = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336)
LLAMA_70B = ModelShape(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, mlp=28672)
TINY = ModelShape(layers=3, hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=64)
SELECTIONS = {
    "hkvd@1 r=.15": Selection(0.15, SelectorName.HKVD, 1),
    "query r=.15": Selection(0.15, SelectorName.QUERY),
    "chunk_head r=.15": Selection(0.15, SelectorName.CHUNK_HEAD),
    "r=0": Selection(0.0),
}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    device: torch.device
    models: dict[str, ModelShape]
    contexts: tuple[int, ...]
    repeats: int
    deadline_s: float

    @property
    def is_dry(self) -> bool:
        return self.device.type == "cpu"


def kernel_rows(plan: Plan) -> Iterator[Row]:
    device = plan.device.type
    dtype = "float32" if plan.is_dry else "bfloat16"
    head_dim, contexts = (16, (90,)) if plan.is_dry else (128, (700, 8192))
    for context in contexts:
        for kv_heads, group in ((8, 4), (8, 8), (1, 4), (1, 8)):
            for variant in ({}, {"window": 100}, {"sinks": True, "softcap": 30.0}, {"layout": "hnd"}):
                case = Case(kv_heads=kv_heads, group=group, head_dim=head_dim, context=context, dtype=dtype)
                case = dataclasses.replace(case, **variant)
                error = matches_reference(attend_scattered, case, device)
                yield {
                    "case": f"{kv_heads}x{group} {variant or 'plain'}",
                    "context": context,
                    "max_abs_error": error,
                    "holds": error <= TOLERANCE[dtype],
                }
    for shape in () if plan.is_dry else scattered_attention.SHAPES:
        yield scattered_attention.measured(shape, 16384)


def codec_rows(plan: Plan) -> Iterator[Row]:
    tokens, heads, dim = (40, 2, 16) if plan.is_dry else (4096, 8, 128)
    layout = KVLayout(1, heads, dim, "bfloat16")
    drawn = torch.randn(2, tokens, heads, dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    for codec in Codec:
        frame = encode_frame(drawn[0], drawn[1], codec)
        expected = decode_frame(frame, layout, codec, tokens)
        there = as_bytes(frame).view(heads, -1).to(plan.device)
        key, value = (torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=plan.device) for _ in "kv")

        def decode(there=there, codec=codec, key=key, value=value) -> None:  # type: ignore[no-untyped-def]
            decode_into(there, Encoding.of(layout, None, codec, tokens), slice(None), key, value)

        seconds = blending.seconds_of(decode, plan.device, plan.repeats)
        got = (key.cpu(), value.cpu())
        same = all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        yield {"codec": codec.name.lower(), "decode_gb_s": len(frame) / seconds / 1e9, "holds": same}


def loading_rows(plan: Plan) -> Iterator[Row]:
    name = next(iter(plan.models))
    shape = dataclasses.replace(plan.models[name], layers=min(16, plan.models[name].layers))
    context = plan.contexts[len(plan.contexts) // 2]
    several = staging.THREADS_ON_DEVICE
    for codec, threads in ((Codec.RAW, 1), (Codec.RAW, several), (Codec.INT8, 1), (Codec.INT8, several)):
        staging.THREADS_ON_DEVICE = threads
        try:
            yield {"shape": name, **blending.measure_loading(shape, context, codec, plan.device, threads)}
        finally:
            staging.THREADS_ON_DEVICE = several


def pass_rows(plan: Plan) -> Iterator[Row]:
    for name, shape in plan.models.items():
        few = dataclasses.replace(shape, layers=2)
        exactness = blending.measure_exactness(few, plan.contexts[0], plan.device)
        yield {"shape": name, "context": plan.contexts[0], **exactness}
    for context in plan.contexts:
        for name, shape in plan.models.items():
            for row in blending.measure_pass(shape, context, SELECTIONS, plan.device, plan.repeats):
                yield {"shape": name, **row}


def counted_rows(plan: Plan) -> Iterator[Row]:
    """Waits and pageable copies per layer over a pretended device. A real one counts its own (`pass`)."""
    if not plan.is_dry:
        return
    from tests.fakes.pretend_cuda import CUDA, PretendCuda

    for name, selection in SELECTIONS.items():
        counts = []
        for layers in (3, 5):
            with PretendCuda() as device:
                shape = dataclasses.replace(TINY, layers=layers)
                prompt, stack = blending.scene_of(shape, plan.contexts[0], CUDA)
                device.clear()
                blending.blend(prompt, stack, selection)
                counts.append((device.syncs.total(), device.pageable.total()))
        (few_waits, few_copies), (waits, copies) = counts
        yield {
            "selection": name,
            "device_syncs_per_layer": (waits - few_waits) / 2,
            "pageable_copies_per_layer": (copies - few_copies) / 2,
        }


def engine_rows(plan: Plan) -> Iterator[Row]:
    if plan.is_dry or _version_of("vllm") is None:
        return
    left_s = max(30.0, plan.deadline_s - time.perf_counter())
    paths = os.pathsep.join([str(REPOSITORY / "services"), str(REPOSITORY / "operators")])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/gpu/test_engine.py"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=left_s,
        check=False,
    )
    tail = ran.stdout.strip().splitlines()[-1:] or ran.stderr.strip().splitlines()[-1:]
    yield {"tests": "tests/gpu/test_engine.py", "holds": ran.returncode == 0, "summary": " ".join(tail)}


SECTIONS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "kernel": kernel_rows,
    "codecs": codec_rows,
    "loading": loading_rows,
    "counted": counted_rows,
    "pass": pass_rows,
    "engine": engine_rows,
}


def run_section(name: str, plan: Plan) -> dict[str, Any]:
    """The rows of a section, and what kept it from having more."""
    rows: list[Row] = []
    print(f"\n== {name}")
    found: dict[str, Any] = {"rows": rows}
    try:
        for row in SECTIONS[name](plan):
            rows.append(row)
            print("  " + "  ".join(f"{key} {_text(value)}" for key, value in row.items()), flush=True)
            if time.perf_counter() > plan.deadline_s:
                found["skipped"] = "the rest: no time was left"
                break
    except Exception as error:
        # One section that breaks must not cost the results of the others.
        logging.exception("The section %s broke", name)
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine_of(device: torch.device) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "vllm": _version_of("vllm"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "stand_ins": STAND_INS,
    }


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def holds(sections: dict[str, dict[str, Any]]) -> bool:
    return all(
        "error" not in section and all(row.get("holds", True) for row in section["rows"])
        for section in sections.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after so many minutes")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results" / "gpu.json")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --dry runs tiny shapes on the CPU")
    deadline_s = time.perf_counter() + 60 * arguments.minutes
    if arguments.dry:
        plan = Plan(torch.device("cpu"), {"tiny": TINY}, (200,), 1, deadline_s)
    else:
        models = {"mistral-7b": MISTRAL_7B, "llama-70b": LLAMA_70B}
        plan = Plan(torch.device("cuda", 0), models, (4096, 8192, 16384, 32768), 2, deadline_s)
    with torch.inference_mode():
        sections = {name: run_section(name, plan) for name in arguments.sections}
    summary = {
        "benchmark": "gpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": scattered_attention.commit(),
        "dry": arguments.dry,
        "machine": machine_of(plan.device),
        "holds": holds(sections),
        "sections": sections,
    }
    arguments.output.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\n{'all of it holds' if summary['holds'] else 'something does NOT hold'}: {arguments.output}")
    if not summary["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
