"""How much of a document still hits after one sentence was inserted, by segments alone: no engine.

Documents are runs of the passages that ship with Kintsugi, in a chat prompt of the reference model. Their
segments count as stored, which they are from the second sight on.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence

from benchmarks.support.figures import Figure
from kintsugi.core.prompt import FormName
from kintsugi.core.tokens import TokenIds
from kintsugi.discovery.segments import find_segments
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.models.passages import read_bundled_passages
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import REFERENCE

TRIALS, QUICK_TRIALS = 400, 40
LONG_TOKENS, SHORT_TOKENS = 2400, 600
LONG_BAR, SHORT_BAR = 0.75, 0.45
QUESTION = "\n\nWhat does the document say?"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def measure(quick: bool) -> list[Figure]:
    form = load_form(REFERENCE.name, FormName.CHAT)
    classes = TokenClasses.of_tokenizer(form.tokenizer)
    sentences = [
        sentence for passage in read_bundled_passages() for sentence in _SENTENCE_END.split(passage.text)
    ]
    figures = []
    for name, tokens, bar in (
        ("insertion_hit_rate_long", LONG_TOKENS, LONG_BAR),
        ("insertion_hit_rate_short", SHORT_TOKENS, SHORT_BAR),
    ):
        generator = random.Random(f"insertion {tokens}")
        rates = [
            _hit_rate(form, classes, sentences, tokens, generator)
            for _ in range(QUICK_TRIALS if quick else TRIALS)
        ]
        tenths = statistics.quantiles(rates, n=10)
        detail = f"{len(rates)} documents of {tokens} tokens; a tenth below {tenths[0]:.2f}"
        figures.append(Figure.at_least(name, statistics.mean(rates), None if quick else bar, "", detail))
    return figures


def _hit_rate(
    form: PromptForm,
    classes: TokenClasses,
    sentences: Sequence[str],
    tokens: int,
    generator: random.Random,
) -> float:
    """Share of a document's tokens in segments that it also had before a sentence was inserted."""
    document = _document(form, tokens, generator)
    at = generator.choice([match.end() for match in _SENTENCE_END.finditer(document)])
    changed = f"{document[:at]}{generator.choice(sentences).strip()} {document[at:]}"
    before, after = (_segments(form, classes, text) for text in (document, changed))
    hit = sum(len(segment) for segment in after if segment in set(before))
    return hit / len(form.tokenize(document))


def _document(form: PromptForm, tokens: int, generator: random.Random) -> str:
    """Passages in a random order, cut at about so many tokens, at a sentence's end."""
    passages = [passage.text for passage in read_bundled_passages()]
    generator.shuffle(passages)
    chosen: list[str] = []
    counted = 0
    for sentence in re.split(r"(?<=[.!?])(?=\s)", "\n".join(passages)):
        chosen.append(sentence)
        counted += len(form.tokenize(sentence))
        if counted >= tokens:
            break
    return "".join(chosen)


def _segments(form: PromptForm, classes: TokenClasses, document: str) -> list[TokenIds]:
    ids = TokenIds.of([*form.head, *form.tokenize(document + QUESTION)])
    return [ids[span.start : span.end] for span in find_segments(ids, classes, len(form.head))]
