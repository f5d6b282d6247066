"""Runs the load of `service.py` on the reference model in its chat form.

Passages are cut to the length of those of the load on random weights, and saved after a context of two more
passages. Both servers compute in float32: in bfloat16 full prefill of this model, in batches of another size,
picks another token than itself at three positions of a hundred.

Only speed is measured. The service blends with `SERVED` and tests nothing (`quality: off`), so that learning
takes no time of the server's core and every request finds the same configuration.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.support.discovered.service import (
    DISCOVER,
    FULL_WORKLOAD,
    REQUESTS,
    measure_load,
    ttft_figure,
)
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.real.corpus import read_corpus
from benchmarks.support.real.engine import MODEL_TOKENS_MAX
from benchmarks.support.real.speed import expert_of
from benchmarks.support.servers import Setting, our_server, plain_server
from kintsugi.core.plan import FormName, Selection
from kintsugi.core.request import SelectorName
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import REFERENCE, resolve_model

SERVED = Selection(0.3, SelectorName.QUERY)
"""Changed 3.1 % of the tokens of 256 prompts of this kind, below 4.9 % with 97.5 % confidence."""
DTYPE = "float32"
PASSAGES, QUICK_PASSAGES = 200, 8
QUICK_REQUESTS = 6
TTFT_BAR = 1.4


def measure(quick: bool) -> list[Figure]:
    corpus = read_corpus(MUSIQUE)
    form = load_form(REFERENCE.name, FormName.CHAT)
    texts = _cut(form, corpus.judged[: QUICK_PASSAGES if quick else PASSAGES])
    workload = replace(FULL_WORKLOAD, documents=len(texts))
    model = Path(resolve_model(REFERENCE.name))
    with tempfile.TemporaryDirectory(prefix="kintsugi-discovery-") as folder:
        context = Path(folder) / "context.txt"
        context.write_text(corpus.sample)
        setting = Setting(
            "real",
            max_model_len=MODEL_TOKENS_MAX,
            kv_cache_bytes=2 << 30,
            dtype=DTYPE,
            ratio=SERVED.ratio,
            expert=expert_of(SERVED),
            model={"expert": {"context": str(context)}},
            privacy=DISCOVER,
        )
        with plain_server(model, setting) as plain, our_server(model, setting) as ours:
            for server in (plain, ours):
                server.endpoint = replace(server.endpoint, chat=True)
            samples = measure_load((plain, ours), texts, workload, QUICK_REQUESTS if quick else REQUESTS)
    figure = ttft_figure("discovered_real_ttft_ratio", samples, None if quick else TTFT_BAR)
    told = [one.accounting or {} for one in samples["kintsugi"]]
    ends = Counter(str(one.get("reason") or one.get("outcome")).split(":")[0] for one in told)
    return [replace(figure, detail=f"{figure.detail}; {corpus.name}; {dict(ends)}")]


def _cut(form: PromptForm, passages: Sequence[str]) -> list[str]:
    tokens = FULL_WORKLOAD.chunk_tokens
    return [form.tokenizer.decode(form.tokenize(text)[:tokens]) for text in passages]
