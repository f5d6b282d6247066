"""Runs all GPU measurements: `make gpu`.

Needs torch and Triton alone; vLLM's engine is measured where it is installed, or packed (`make gpu-pack`).
Two groups of sections, the most valuable first, each for one call of a few minutes:

- **engine**: vLLM's own engine, a process for each part of `engine.py`: `ops`, `exact`, `ttft`; then `tests`,
  the engine's tests on one architecture.
- **parts**, on the reference stack: `kernel` (scattered attention against its reference, with strict masks,
  and its time against dense attention's), `codecs` (each decoded on the device equals what the host decodes),
  `loading` (the loader alone, and beside computation), `pass` (whole blends with the layers of Mistral-7B and
  Llama-70B against a dense prefill, waits, peak memory), which takes what time is left.

Prints a table per section, and writes the JSON file again after every row: whatever ends the run leaves
what was measured. What failed or was skipped is listed at the end; the exit status is 1 if something does
not hold, or if a required row has no result. `--dry` runs the parts at tiny shapes on the CPU, and requires
no vLLM: it shows that the script works, and measures nothing. There it also counts, over a pretended
device, waits and pageable copies.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.bare import REPOSITORY, prepare_imports, unpack_site

STAND_INS = prepare_imports()

import torch  # noqa: E402

from benchmarks.gpu import blending, scattered_attention  # noqa: E402
from benchmarks.gpu.blending import MAIN_SELECTIONS, SELECTIONS, TINY  # noqa: E402
from benchmarks.gpu.engine import BACKENDS, CONTEXTS, RATIO, RATIOS, SELECTOR  # noqa: E402
from benchmarks.support.figures import Figure  # noqa: E402
from kintsugi.core.layout import Codec, KVLayout  # noqa: E402
from kintsugi.fusor import staging  # noqa: E402
from kintsugi.fusor.codecs import Encoding, as_bytes, decode_frame, decode_into, encode_frame  # noqa: E402
from tests.contracts.scattered_attention import (  # noqa: E402
    TOLERANCE,
    Case,
    forgets_behind_the_window,
    matches_reference,
)
from tests.contracts.scattered_on_device import (  # noqa: E402
    MASKS,
    MISTRAL_7B_CASE,
    implementation_of,
    variant_of,
)
from tests.fakes.paged_stack import ModelShape  # noqa: E402

MISTRAL_7B = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336)
LLAMA_70B = ModelShape(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, mlp=28672)
KERNEL_VARIANTS = (
    *("kv_first", "block_first", "mixed", "block-32", "everything", "fp16"),
    *("head-dim-80", "head-dim-256", "group-3", "splits-4", "splits-16"),
)
"""Those of `tests.contracts.scattered_on_device` that run here: each is compiled first, for a second or
two."""
ENGINE_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer is not packed
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "8",
}
"""Default, unless the environment overrides it."""
DRY_CONTEXT = 90
ENGINE_TESTS = ["-q", "-m", "not full", "-k", "tiny-llama and not llama3", "tests/gpu/test_engine.py"]
LIMITS_S = {"ops": 120.0, "exact": 180.0, "ttft": 300.0, "tests": 180.0}
"""How long the sections with vLLM may take, its start included: half a minute, or two where it compiles."""
LEAST_S = 30.0
"""vLLM is not started with less time left."""
GROUPS = {
    "engine": ("ops", "exact", "ttft", "tests"),
    "parts": ("kernel", "codecs", "loading", "counted", "pass"),
}
FIRST_CASE = "8x4 plain"
FIRST_LOAD = "raw, 1 thread"
GROWTH = 3.0
"""Time allowed for the next prompt, as a multiple of the longest so far: lengths double."""
Row = dict[str, Any]
Section = dict[str, Any]


class Skipped(Exception):
    """The remaining rows of a section are skipped."""


class NoTimeLeft(Skipped):
    """The remaining rows of a section would not finish in time."""


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

    def check_time(self, needed_s: float = 0.0) -> float:
        """Return the seconds left. Raises `NoTimeLeft` if fewer than needed."""
        left_s = self.deadline_s - time.perf_counter()
        if left_s <= needed_s:
            raise NoTimeLeft(f"the rest: {max(0.0, left_s):.0f} s were left")
        return left_s


def kernel_rows(plan: Plan) -> Iterator[Row]:
    for name, check, case in _kernel_cases(plan):
        row = {"row": name, "context": case.context}
        try:
            implementation = implementation_of(case, plan.device.type)
            error = check(implementation, case, plan.device.type)
            # Rounding does not affect a strict mask.
            allowed = TOLERANCE[case.dtype] if check is matches_reference else 0.0
            yield {**row, "max_abs_error": error, "holds": error <= allowed}
        except Exception as failure:
            # If this GPU cannot run one variant, the others may still work.
            logging.exception("The kernel's case %s broke", name)
            yield {**row, "error": f"{type(failure).__name__}: {failure}", "holds": False}
    for shape in () if plan.is_dry else scattered_attention.SHAPES:
        yield {"row": f"time {shape}", **scattered_attention.measured(shape, 16384)}


def _kernel_cases(plan: Plan) -> Iterator[tuple[str, Callable[..., float], Case]]:
    dtype = "float32" if plan.is_dry else "bfloat16"
    head_dim, contexts = (16, (DRY_CONTEXT,)) if plan.is_dry else (128, (700, 8192))
    for context in contexts:
        for kv_heads, group in ((8, 4), (8, 8), (1, 4), (1, 8)):
            for variant in ({}, {"window": 100}, {"sinks": True, "softcap": 30.0}, {"layout": "hnd"}):
                case = Case(kv_heads=kv_heads, group=group, head_dim=head_dim, context=context, dtype=dtype)
                case = dataclasses.replace(case, **variant)
                yield f"{kv_heads}x{group} {variant or 'plain'}", matches_reference, case
    more = [(name, matches_reference, variant_of(MISTRAL_7B_CASE, name)) for name in KERNEL_VARIANTS]
    masks = [(name, *mask) for name, mask in MASKS.items()]
    for name, check, case in (*more, *masks):
        if plan.is_dry:
            case = dataclasses.replace(case, context=DRY_CONTEXT)
        if not _is_left_out(plan, check):
            yield name, check, case


def _is_left_out(plan: Plan, check: Callable[..., float]) -> bool:
    """The reference, which replaces the kernel on a CPU, also reads keys outside the windows."""
    return plan.is_dry and check is forgets_behind_the_window


def codec_rows(plan: Plan) -> Iterator[Row]:
    tokens, heads, dim = (40, 2, 16) if plan.is_dry else (4096, 8, 128)
    layout = KVLayout.uniform(1, heads, dim, "bfloat16")
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
        yield {"row": codec.name.lower(), "decode_gb_s": len(frame) / seconds / 1e9, "holds": same}


def loading_rows(plan: Plan) -> Iterator[Row]:
    name = next(iter(plan.models))
    shape = dataclasses.replace(plan.models[name], layers=min(16, plan.models[name].layers))
    context = plan.contexts[len(plan.contexts) // 2]
    several = staging.THREADS_ON_DEVICE
    for codec, threads in ((Codec.RAW, 1), (Codec.RAW, several), (Codec.INT8, 1), (Codec.INT8, several)):
        staging.THREADS_ON_DEVICE = threads
        try:
            measured = blending.measure_loading(shape, context, codec, plan.device, threads)
            row = f"{codec.name.lower()}, {threads} thread" + "s" * (threads > 1)
            yield {"row": row, "shape": name, **measured}
        finally:
            staging.THREADS_ON_DEVICE = several


def pass_rows(plan: Plan) -> Iterator[Row]:
    for name, shape in plan.models.items():
        few = dataclasses.replace(shape, layers=2)
        exactness = blending.measure_exactness(few, plan.contexts[0], plan.device)
        yield {"row": f"{name} exact", "shape": name, "context": plan.contexts[0], **exactness}
    longest_s = 0.0
    for context in plan.contexts:
        # Waits appear at any length, and only the main selections are timed.
        selections = SELECTIONS if context == plan.contexts[0] else MAIN_SELECTIONS
        for name, shape in plan.models.items():
            plan.check_time(GROWTH * longest_s)
            began_s = time.perf_counter()
            for row in blending.measure_pass(shape, context, selections, plan.device, plan.repeats):
                yield {"row": f"{name} {context} {row['selection']}", "shape": name, **row}
            longest_s = max(longest_s, time.perf_counter() - began_s)


def counted_rows(plan: Plan) -> Iterator[Row]:
    """Waits and pageable copies per layer over a pretended device. A real one counts its own (`pass`)."""
    if not plan.is_dry:
        return
    from benchmarks.gpu.counting import count_per_layer

    for name, selection in SELECTIONS.items():
        waits, copies = count_per_layer(selection)
        yield {
            "row": name,
            "selection": name,
            "device_syncs_per_layer": waits,
            "pageable_copies_per_layer": copies,
        }


def part_rows(part: str, plan: Plan) -> Iterator[Row]:
    """The rows of a part of `engine.py`, as soon as it prints them."""
    output: list[str] = []
    limit_s = _limit_of(part, plan)
    script = ["benchmarks/gpu/engine.py", part, "--stuck-s", f"{limit_s - 5:.0f}"]
    with running_python(script, limit_s) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise RuntimeError(
            f"exit status {process.returncode} within {limit_s:.0f} s: " + "".join(output)[-2000:]
        )


def test_rows(plan: Plan) -> Iterator[Row]:
    limit_s = _limit_of("tests", plan)
    with running_python(["-m", "pytest", *ENGINE_TESTS], limit_s) as process:
        assert process.stdout is not None
        lines = process.stdout.readlines()
    row = {"row": "engine", "tests": " ".join(ENGINE_TESTS), "summary": "".join(lines[-1:]).strip()}
    yield {**row, "holds": process.returncode == 0}


def _limit_of(section: str, plan: Plan) -> float:
    """How long a section with vLLM may run. Raises `Skipped`."""
    if plan.is_dry:
        raise Skipped("vLLM needs a GPU")
    if find_vllm() is None:
        raise Skipped("vLLM is neither installed nor in .gpu/site.tar.xz; run make gpu-pack before")
    # Leave time to record its rows.
    return min(LIMITS_S[section], plan.check_time(LEAST_S) - LEAST_S / 3)


@contextlib.contextmanager
def running_python(arguments: Sequence[str], limit_s: float) -> Iterator[subprocess.Popen[str]]:
    """Run a process that uses the device alone. It and its children are killed after ``limit_s``."""
    torch.cuda.empty_cache()
    folders = [REPOSITORY, *(REPOSITORY / name for name in ("services", "operators")), unpack_site()]
    paths = [*map(str, filter(None, folders)), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**ENGINE_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, kill)
    timer.start()
    try:
        with process:
            yield process
    finally:
        timer.cancel()
        kill()


SECTIONS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    **{part: partial(part_rows, part) for part in ("ops", "exact", "ttft")},
    "tests": test_rows,
    "kernel": kernel_rows,
    "codecs": codec_rows,
    "loading": loading_rows,
    "counted": counted_rows,
    "pass": pass_rows,
}


def required_rows(plan: Plan) -> dict[str, tuple[str, ...]]:
    """The rows that a section must have."""
    models, context = tuple(plan.models), plan.contexts[0]
    first = next(iter(MAIN_SELECTIONS))
    masks = [name for name, (check, _) in MASKS.items() if not _is_left_out(plan, check)]
    parts = {
        "kernel": (FIRST_CASE, *masks),
        "codecs": tuple(codec.name.lower() for codec in Codec),
        "loading": (FIRST_LOAD,),
        "pass": tuple(f"{model} {row}" for model in models for row in ("exact", f"{context} {first}")),
    }
    if plan.is_dry:
        return {**parts, "counted": tuple(SELECTIONS)}
    exact = tuple(f"{backend} r={ratio:g}" for backend in BACKENDS for ratio in RATIOS)
    ttft = (f"{CONTEXTS[0]} {SELECTOR} r={RATIO:g}", "itl")
    return {**parts, "ops": ("norm", "attention"), "exact": exact, "ttft": ttft}


def run_section(
    name: str, plan: Plan, sections: dict[str, Section], keep: Callable[[], None] = lambda: None
) -> None:
    """Add a section to `sections`: its rows, and what kept it from having more. `keep` is called after each
    row."""
    rows: list[Row] = []
    found: Section = {"rows": rows}
    sections[name] = found
    print(f"\n== {name}", flush=True)
    making = SECTIONS[name](plan)
    try:
        plan.check_time()
        while (row := next(making, None)) is not None:
            rows.append(row)
            print("  " + "  ".join(f"{key} {_text(value)}" for key, value in row.items()), flush=True)
            keep()
            plan.check_time()
    except Skipped as reason:
        found["skipped"] = str(reason)
    except Exception as error:
        # One section that breaks must not cost the results of the others.
        logging.exception("The section %s broke", name)
        found["error"] = f"{type(error).__name__}: {error}"
    names = {row.get("row") for row in rows}
    if missing := [row for row in required_rows(plan).get(name, ()) if row not in names]:
        found["missing"] = missing


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def config_of(plan: Plan, sections: Sequence[str]) -> dict[str, Any]:
    """The machine and configuration of the measurement, as in other benchmarks."""
    device = plan.device
    return {
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "vllm": None if plan.is_dry else find_vllm(),
        "weights": "random",
        "dry": plan.is_dry,
        "sections": list(sections),
        "stand_ins": STAND_INS,
        "verifies_frames": "xxhash" not in STAND_INS,
    }


def find_vllm() -> str | None:
    """Return the version of vLLM: the archive's, else the installed one's; None without vLLM."""
    site = unpack_site()
    if site is None:
        return _version_of("vllm")
    (packed,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    return packed.version


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def figures_of(sections: dict[str, Section]) -> list[Figure]:
    """The most important figures."""
    rows = [row for section in sections.values() for row in section["rows"]]
    wrong = sum("error" in one for one in sections.values()) + sum(not row.get("holds", True) for row in rows)
    missing = [f"{name}: {row}" for name, one in sections.items() for row in one.get("missing", ())]
    figures = [
        Figure.at_most("gpu_failures", wrong, 0, "", f"of {len(rows)} rows, and sections that broke"),
        Figure.at_most("gpu_rows_missing", len(missing), 0, "", "; ".join(missing)),
    ]
    waits = [row["waits_a_pass"] for row in rows if row.get("waits_a_pass") is not None]
    if waits:
        detail = f"the most of {len(waits)} blends"
        bar = blending.WAITS_A_PASS_MAX
        figures.append(Figure.at_most("gpu_waits_a_pass", max(waits), bar, "", detail))
    for row in rows:
        if "share" in row:
            detail = "the longest time between a decode's tokens beside a blend, of that beside its prefill"
            figures.append(Figure.at_most("gpu_itl_share", row["share"], 0.6, "", detail))
    for name in ("ttft", "pass"):
        figures += _speedups(name, sections.get(name, {"rows": []})["rows"])
    return figures


def _speedups(section: str, rows: Sequence[Row]) -> Iterator[Figure]:
    """A figure for each model and length: the first selection's, with the others in its detail."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if "speedup" in row:
            found.setdefault((row["shape"], row["context"]), []).append(row)
    for (shape, context), ways in found.items():
        detail = ", ".join(f"{way['selection']}: {way['speedup']:.3g}×" for way in ways)
        yield Figure(f"gpu_{section}_speedup_{shape}_{context}", ways[0]["speedup"], "×", detail=detail)


def write_result(output: Path, head: dict[str, Any], sections: dict[str, Section], finished: bool) -> bool:
    """Write the results so far. Returns whether all of them hold."""
    figures = figures_of(sections)
    holds = all(figure.holds is not False for figure in figures)
    body = {"figures": [dataclasses.asdict(figure) for figure in figures], "sections": sections}
    draft = output.with_suffix(".draft")
    draft.write_text(json.dumps({**head, "finished": finished, "holds": holds, **body}, indent=1) + "\n")
    draft.replace(output)
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after this time")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--group", choices=GROUPS, help="the sections of one call")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results" / "gpu.json")
    arguments = parser.parse_args()
    names = arguments.sections or GROUPS.get(arguments.group, list(SECTIONS))
    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --dry runs tiny shapes on the CPU")
    deadline_s = time.perf_counter() + 60 * arguments.minutes
    if arguments.dry:
        plan = Plan(torch.device("cpu"), {"tiny": TINY}, (200,), 1, deadline_s)
    else:
        models = {"mistral-7b": MISTRAL_7B, "llama-70b": LLAMA_70B}
        plan = Plan(torch.device("cuda", 0), models, (4096, 8192, 16384, 32768), 2, deadline_s)
    head = {
        "benchmark": "gpu",
        "commit": scattered_attention.commit(),
        "config": config_of(plan, names),
    }
    sections: dict[str, Section] = {}

    def keep() -> None:
        write_result(arguments.output, head, sections, finished=False)

    with torch.inference_mode():
        for name in names:
            run_section(name, plan, sections, keep)
    holds = write_result(arguments.output, head, sections, finished=True)
    print()
    for name, section in sections.items():
        for what in ("error", "skipped", "missing"):
            if what in section:
                print(f"{name}: {what}: {section[what]}")
        for row in section["rows"]:
            if not row.get("holds", True):
                print(f"{name}: does NOT hold: {row.get('row')}")
    verdict = "what was measured holds" if holds else "something does NOT hold, or is missing"
    print(f"{verdict}: {arguments.output}")
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
