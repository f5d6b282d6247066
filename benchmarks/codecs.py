"""Measures codecs: stored bytes, the effect of rounding on answers, and the decoding speed of one core.

Section `kl` stores the chunks of MuSiQue questions with their own passages in `raw`, blends with nothing
recomputed, and blends again after the same chunks were rewritten in each codec. Section `decode` decodes
frames of 512 tokens and 8 heads of 128.

    python benchmarks/codecs.py [--quick] [--save] [--only kl,decode] [--model smollm2-135m] [--prompts 40]

Nothing was tuned on these prompts.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.outcomes import BATCH, musique_questions
from benchmarks.support.rewriting import put_back, stored
from benchmarks.support.sections import Sections, measure, parser_of
from kintsugi.core.evidence import POSITIONS_MAX
from kintsugi.core.layout import Codec, KVLayout
from kintsugi.core.plan import FormName, Selection
from kintsugi.fusor.codecs import Encoding, as_bytes, decode_into, encode_frame
from kintsugi.models.prompt_form import load_form
from kintsugi.quality.measure import NAMESPACE, Bench, measure_selection, tokenize_questions
from kintsugi.quality.metrics import bootstrap
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store

JUDGED = (Codec.INT8, Codec.INT4)
REUSE = Selection(0.0)
TOKENS, HEADS, WIDTH = 512, 8, 128
REPETITIONS, REPETITIONS_QUICK = 200, 20


def measure_kl(quick: bool, model: str, dtype: str, prompts: int) -> list[Figure]:
    """The KL that a codec adds to full reuse, as a share of full reuse's own."""
    if not MUSIQUE.exists():
        say(f"{MUSIQUE} is not here: the section is left out")
        return []
    prompts, form = 8 if quick else prompts, load_form(model, FormName.CHAT)
    store = open_store(url := f"ram://codecs-{uuid.uuid4().hex[:8]}")
    assert isinstance(store, RamStore)
    found: dict[Codec, list[float]] = {codec: [] for codec in (Codec.RAW, *JUDGED)}
    sizes = dict.fromkeys(found, 0)
    spec = MeasuringEngineSpec(model, store=url, form=form, vllm_args={"dtype": dtype})
    with start_measuring_engine(spec) as engine:
        cases, _ = tokenize_questions(
            musique_questions("own", prompts, 0), form, engine.max_model_len, POSITIONS_MAX
        )
        for start in range(0, len(cases), BATCH):
            bench = Bench(engine, cases[start : start + BATCH], POSITIONS_MAX, BATCH)
            bench.store_chunks()
            chunks = stored(store)
            for codec, divergences in found.items():
                for chunk in chunks:
                    if codec is not Codec.RAW:
                        put_back(store, chunk, codec)
                    sizes[codec] += chunk.manifest.layout.chunk_bytes(codec, chunk.manifest.num_tokens)
                scores = measure_selection(bench, REUSE, range(len(bench.cases)), is_free=False)
                divergences += [one.deviation.kl for one in scores.by_prompt]
            store.delete(NAMESPACE, [chunk.manifest.key for chunk in chunks])
            say(f"{min(start + BATCH, len(cases))} of {len(cases)} prompts")
    reuse = statistics.fmean(found[Codec.RAW])
    figures = []
    for codec in JUDGED:
        name, bar = codec.name.lower(), 0.05 if codec is Codec.INT4 else None
        pairs = zip(found[codec], found[Codec.RAW], strict=True)
        added = bootstrap([(mine - raw) / reuse for mine, raw in pairs])
        detail = f"{added}, n={len(cases)}; full reuse's KL is {reuse:.4f}"
        figures.append(
            Figure(
                f"{name}_kl_share [{model}, {dtype}]",
                added.mean,
                "",
                None if bar is None else f"≤ {bar}",
                None if bar is None else added.mean <= bar,
                detail,
            )
        )
        share = sizes[codec] / sizes[Codec.RAW] * (2 if dtype == "float32" else 1)
        if codec is Codec.INT4:
            detail = "of bfloat16, sinks included; the passages have about 200 tokens"
            figures.append(Figure.at_most(f"int4_bytes_share [{model}]", share, 0.30, "", detail))
    return figures


def measure_decode(quick: bool, **given: Any) -> list[Figure]:
    """Decoded bfloat16 per second of one core. The lowest CPU time counts, because neighbours only add."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    layout = KVLayout.uniform(1, HEADS, WIDTH, "bfloat16")
    key, value = (torch.randn(TOKENS, HEADS, WIDTH, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty_like(key), torch.empty_like(value)
    times: dict[Codec, list[float]] = {Codec.INT8: [], Codec.INT4: [], Codec.FP8: []}
    frames = {
        codec: as_bytes(memoryview(bytearray(encode_frame(key, value, codec)))).view(HEADS, -1)
        for codec in times
    }
    for _ in range(REPETITIONS_QUICK if quick else REPETITIONS):
        for codec, taken in times.items():
            encoding = Encoding.of(layout, 0, codec, TOKENS)
            began_s = time.thread_time()
            decode_into(frames[codec], encoding, slice(None), *out)
            taken.append(time.thread_time() - began_s)
    figures = []
    for codec, taken in times.items():
        rate = (key.nbytes + value.nbytes) / min(taken) / 1e9
        detail = f"median {(key.nbytes + value.nbytes) / statistics.median(taken) / 1e9:.2f}"
        name = f"decode_gb_s [{codec.name.lower()}]"
        figures.append(
            Figure(name, rate, "GB/s", detail=detail)
            if codec is Codec.FP8
            else Figure.at_least(name, rate, 2.0, "GB/s", detail)
        )
    share = layout.frame_bytes(Codec.INT4, TOKENS) / layout.frame_bytes(Codec.RAW, TOKENS)
    figures.append(Figure.at_most("int4_bytes_share", share, 0.30, "", f"{TOKENS} tokens, heads of {WIDTH}"))
    return figures


def main() -> None:
    sections: Sections = {"kl": measure_kl, "decode": measure_decode}
    parser = parser_of(__doc__.splitlines()[0], sections, "8 prompts")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", help="float32 where the CPU does not multiply in bfloat16")
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    measure(
        "codecs",
        arguments,
        sections,
        {"model": arguments.model, "weights": "pretrained"},
        quick=arguments.quick,
        model=arguments.model,
        dtype=arguments.dtype,
        prompts=arguments.prompts,
    )


if __name__ == "__main__":
    main()
