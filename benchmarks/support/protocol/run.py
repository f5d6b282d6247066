"""Runs the sections of the protocol: measures blends on prompts, with one record for each."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.support.engines import say
from benchmarks.support.protocol import figures
from benchmarks.support.protocol.blending import Blender, prefill_fully
from benchmarks.support.protocol.decoder import Decoder
from benchmarks.support.protocol.preparation import Preparation, Preparer
from benchmarks.support.protocol.workloads import WORKLOADS, Item, Workload
from benchmarks.support.real.records import Records
from kintsugi.core.plan import FormName, PromptChunk, Selection
from kintsugi.models.prompt_form import load_form
from kintsugi.models.reference import resolve_model
from kintsugi.quality.metrics import exact_match, f1

POSITIONS_MAX = 8192
NOTHING = Selection(0.0, "chunk_head")


@dataclass(frozen=True)
class Cell:
    """One blend: the preparation of its chunks, its selection and its cost."""

    preparation: Preparation
    selector: str = ""
    """As in `selection_named`."""
    cost: float = 0.0
    """0: nothing is recomputed."""

    @property
    def name(self) -> str:
        return f"{self.preparation}/{self.selector}@{self.cost:g}" if self.cost else f"{self.preparation}/r0"


def selection_named(name: str, num_layers: int) -> Selection:
    """Return the selection, without a ratio. `query:7+10`: the question's attention at these layers."""
    kind, _, layers = name.partition(":")
    if kind == "hkvd":
        return Selection(0.0, "hkvd", check_layer=int(layers or 1))
    if kind == "prophetkv":
        return Selection(0.0, "query", query_layers=tuple(range(num_layers)))
    if kind == "qcfuse":
        layers_at = tuple(sorted({round(depth * num_layers) for depth in QCFUSE_DEPTHS}))
        return Selection(0.0, "query", query_layers=layers_at)
    if layers:
        return Selection(0.0, kind, query_layers=tuple(map(int, layers.split("+"))))
    return Selection(0.0, kind)


QCFUSE_DEPTHS = (0.41, 0.45, 0.5)
"""Where QCFuse's published query layers lie in Llama-3.1-8B. The question's pass here sees every key, not
only its anchors."""
PUBLISHED = ("hkvd", "chunk_head", "prophetkv", "qcfuse")
SECTIONS = ("choosing", "judged")


def cells_of(section: str, preparation: Preparation, selector: str) -> list[Cell]:
    """Choosing prompts compare all preparations, judged ones show what was chosen. Both compare the published
    selections after the chosen preparation."""
    some = list(Preparation) if section == "choosing" else [preparation]
    cells = [cell for one in some for cell in (Cell(one), Cell(one, selector, 0.2))]
    cells.append(Cell(preparation, selector, 0.1))
    return cells + [Cell(preparation, other, 0.2) for other in PUBLISHED]


class Bench:
    """Measures on one model."""

    def __init__(self, model: str, records: Path, answer_tokens_max: int) -> None:
        folder = Path(resolve_model(model))
        self._folder = records / model.replace("/", "-")
        self._folder.mkdir(parents=True, exist_ok=True)
        self.decoder = Decoder(folder, POSITIONS_MAX)
        self.form = load_form(str(folder), FormName.CHAT)
        self.records = Records(self._folder / "records.jsonl", {"model": model, "answer": answer_tokens_max})
        self._answer_tokens_max = answer_tokens_max

    def measure(
        self, workload: Workload, item: Item, cells: Sequence[Cell], preparer: Preparer, is_choosing: bool
    ) -> None:
        """Add the records that are missing."""
        base = Cell(Preparation.PLAIN)
        key = (workload.name, item.number)
        missing = [cell for cell in dict.fromkeys([base, *cells]) if (*key, cell.name) not in self.records]
        if not any(passage.before for passage in item.passages[1:]):
            missing = [cell for cell in missing if cell.preparation is not Preparation.DOCUMENT]
        if not missing:
            return
        chunks = [PromptChunk("", self.form.tokenize(passage.text)) for passage in item.passages]
        prompt = self.form.build(chunks, item.question)
        full, cache = prefill_fully(self.decoder, prompt, self._answer_tokens_max)
        if (*key, "full") not in self.records:
            self.records.add(
                (*key, "full"), {"tokens": len(prompt.token_ids), **self._judge(item, full.answer)}
            )
        blender = Blender(self.decoder, prompt, full, self._answer_tokens_max)
        plain = [preparer.save(chunk.token_ids, self.form.head) for chunk in chunks]
        for preparation in dict.fromkeys(cell.preparation for cell in missing):
            leads = [preparer.lead(passage, preparation) for passage in item.passages]
            prepared = [
                plain[at] if not at or lead == self.form.head else preparer.save(chunk.token_ids, lead)
                for at, (chunk, lead) in enumerate(zip(chunks, leads, strict=True))
            ]
            if is_choosing and preparation is not Preparation.PLAIN:
                path = self._folder / f"{workload.name}-{item.number}-{preparation}.npz"
                np.savez(path, allow_pickle=False, **blender.signals(prepared, cache))
            for cell in missing:
                if cell.preparation is preparation:
                    selection = NOTHING
                    if cell.cost:
                        named = selection_named(cell.selector, self.decoder.num_layers)
                        selection = blender.selection_at(cell.cost, named)
                    found = blender.blend(prepared, selection)
                    values = {"kl": found.kl, "agreement": found.agreement, "cost": found.cost}
                    values |= self._judge(item, found.answer)
                    self.records.add((*key, cell.name), values)

    def _judge(self, item: Item, answer: Sequence[int]) -> dict[str, float]:
        text = self.form.tokenizer.decode(answer, skip_special_tokens=True)
        return {"f1": f1(text, item.answers), "exact": exact_match(text, item.answers)}


def items_of(workload: Workload, section: str, count: int) -> Iterator[Item]:
    yield from workload.part(is_judged=section == "judged")[:count]


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ends_s = time.monotonic() + 60 * arguments.minutes
    bench = Bench(arguments.model, arguments.records, arguments.answer_tokens)
    names = arguments.workloads.split(",")
    for section in arguments.only.split(","):
        cells = cells_of(section, Preparation(arguments.preparation), arguments.selector)
        prepared = {name: WORKLOADS[name]() for name in names}
        preparers = {name: Preparer(bench.decoder, bench.form, one) for name, one in prepared.items()}
        lists = [list(items_of(prepared[name], section, arguments.prompts)) for name in names]
        for turn in range(max(map(len, lists))):
            for name, items in zip(names, lists, strict=True):
                if turn < len(items) and time.monotonic() < ends_s:
                    bench.measure(prepared[name], items[turn], cells, preparers[name], section == "choosing")
                    say(f"{arguments.model} {section} {name} {turn + 1} of {len(items)}")
    figures.report_all(bench.records, arguments)
    print("complete" if time.monotonic() < ends_s else "not finished: run again with the same --records")
