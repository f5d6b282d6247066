"""The protocol's own code, on a tiny model."""

from __future__ import annotations

import torch

from benchmarks.support.protocol.blending import Blender, SavedChunk, prefill_fully, save
from benchmarks.support.protocol.decoder import KV, Decoder
from benchmarks.support.protocol.figures import REUSE, describe, judged_figures
from benchmarks.support.protocol.preparation import Preparation, Preparer
from benchmarks.support.protocol.run import cells_of, selection_named
from benchmarks.support.protocol.workloads import Item, Passage, Workload
from kintsugi.core.plan import PromptChunk, RagPrompt, Selection
from kintsugi.models.prompt_form import load_form
from tests.fakes.random_models.factory import make_checkpoint_once

HEAD, QUESTION = (1, 7), (5, 9, 11, 4)
CHUNKS = tuple(tuple(range(20 + 40 * number, 50 + 40 * number)) for number in range(3))
ANSWER_TOKENS = 6


def decoder() -> Decoder:
    return Decoder(make_checkpoint_once("tiny-qwen2"), 512)


def saved(model: Decoder, chunk: tuple[int, ...], lead: tuple[int, ...] = HEAD) -> SavedChunk:
    kv, start = model.prefill(torch.tensor((*lead, *chunk))), len(lead)
    return save(model, chunk, lead, KV(kv.key[:, start:], kv.value[:, start:]))


def prompt() -> RagPrompt:
    return RagPrompt(HEAD, tuple(PromptChunk("", chunk) for chunk in CHUNKS), QUESTION)


def test_a_ratio_of_one_equals_full_prefill_and_reuse_does_not() -> None:
    model = decoder()
    full, _ = prefill_fully(model, prompt(), ANSWER_TOKENS)
    blender = Blender(model, prompt(), full, ANSWER_TOKENS)
    chunks = [saved(model, chunk) for chunk in CHUNKS]
    exact, reused = blender.blend(chunks, Selection(1.0)), blender.blend(chunks, Selection(0.0))
    assert exact.kl < 1e-6
    assert exact.answer == full.answer
    assert reused.kl > 1e-4
    assert 0 < reused.cost < exact.cost == 1.0


def test_chunks_saved_after_what_precedes_them_lose_only_their_codec() -> None:
    model = decoder()
    full, _ = prefill_fully(model, prompt(), ANSWER_TOKENS)
    blender = Blender(model, prompt(), full, ANSWER_TOKENS)
    isolated = [saved(model, chunk) for chunk in CHUNKS]
    natural = [saved(model, chunk, sum(CHUNKS[:number], HEAD)) for number, chunk in enumerate(CHUNKS)]
    reused, prepared = (blender.blend(chunks, Selection(0.0)).kl for chunks in (isolated, natural))
    assert prepared < reused / 4


def test_published_selections_cost_what_is_asked() -> None:
    model = decoder()
    full, _ = prefill_fully(model, prompt(), ANSWER_TOKENS)
    blender = Blender(model, prompt(), full, ANSWER_TOKENS)
    chunks = [saved(model, chunk) for chunk in CHUNKS]
    for name in ("chunk_head", "prophetkv", "qcfuse", "query:1+2"):
        selection = blender.selection_at(0.4, selection_named(name, model.num_layers))
        assert abs(blender.blend(chunks, selection).cost - 0.4) < 0.03, name


def test_contexts_are_similar_passages_and_never_copies() -> None:
    words = {
        "tides": "the tide rises with the moon and falls along the harbour wall",
        "moon": "the moon pulls the tide twice each day over the wide harbour bay",
        "bread": "bakers knead flour with water then rest the dough near warm ovens",
        "ovens": "warm ovens bake the dough that bakers knead with flour and yeast",
    }
    texts = {name: f"{text}\n\n" for name, text in words.items()}
    copy = f"{words['tides']} again\n\n"
    items = (Item(0, (Passage(texts["tides"]),), "why?", ()),)
    workload = Workload("made up", items, (*texts.values(), copy))
    preparer = Preparer(decoder(), load_form(str(make_checkpoint_once("tiny-qwen2"))), workload)
    context = preparer.context(Passage(texts["tides"]), Preparation.SIMILAR)
    assert context[-1] == texts["moon"]
    assert copy not in context
    assert texts["tides"] not in context


def test_figures_compare_the_choice_with_the_best_published_selection() -> None:
    kls = {"similar/query@0.2": 0.1, "similar/qcfuse@0.2": 0.2, "similar/hkvd@0.2": 0.5, REUSE: 1.0}
    row = {name: {"kl": kl} for name, kl in kls.items()}
    figures = {one.name: one for one in judged_figures({"musique": [row, row]}, "similar", "query")}
    assert figures["hard_kl_share_cost20"].value == 0.1
    assert figures["protocol_lead"].value == 2.0
    assert "easy_kl_share_cost20" not in figures


def test_full_prefill_has_no_kl_of_its_own() -> None:
    row = {"full": {"f1": 0.5}, REUSE: {"kl": 1.0, "f1": 0.25}}
    assert "KL" not in describe([row], "full")
    assert "KL share 1.000" in describe([row], REUSE)


def test_a_cell_is_measured_once() -> None:
    names = [cell.name for cell in cells_of("choosing", Preparation.SIMILAR, "query")]
    assert len(names) == len(set(names))
