"""Measures how much of a document still hits after a sentence or a line of code was inserted, without an
engine.

Documents are runs of the passages that ship with Kintsugi, and of modules of Python's standard library, in a
chat prompt of the reference model. Their segments count as stored, which they are from the second sight on.
"""

from __future__ import annotations

import random
import re
import statistics
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.figures import Figure
from kintsugi.core.plan import FormName
from kintsugi.core.spaces import TokenIds
from kintsugi.discovery.segments import find_segments
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.models.passages import read_bundled_passages
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import REFERENCE

TRIALS, QUICK_TRIALS = 400, 40
LONG_TOKENS, SHORT_TOKENS = 2400, 600
LONG_BAR, SHORT_BAR = 0.75, 0.45
QUESTION = "\n\nWhat does the document say?"
CODE_LINE_MIN = 12
"""Characters of a line that is inserted into code; shorter ones are mostly brackets."""
_SENTENCE = re.compile(r"(?<=[.!?])(?=\s)")


@dataclass(frozen=True)
class Kind:
    """Documents of one kind, as pieces that may be cut anywhere between two of them."""

    name: str
    draw: Callable[[random.Random], Iterator[str]]
    """The pieces of a random document, which ends where enough of them were taken."""
    insertions: Sequence[str]


def measure(quick: bool) -> list[Figure]:
    form = load_form(REFERENCE.name, FormName.CHAT)
    classes = TokenClasses.of_tokenizer(form.tokenizer)
    figures = []
    for kind in (_prose(), _code()):
        for length, tokens, bar in (
            ("long", LONG_TOKENS, LONG_BAR),
            ("short", SHORT_TOKENS, SHORT_BAR),
        ):
            generator = random.Random(f"insertion {kind.name}{tokens}")
            trials = QUICK_TRIALS if quick else TRIALS
            rates = [_hit_rate(form, classes, kind, tokens, generator) for _ in range(trials)]
            tenths = statistics.quantiles(rates, n=10)
            detail = f"{len(rates)} documents of {tokens} tokens; a tenth below {tenths[0]:.2f}"
            name = f"{kind.name}insertion_hit_rate_{length}"
            figures.append(Figure.at_least(name, statistics.mean(rates), None if quick else bar, "", detail))
    return figures


def _prose() -> Kind:
    """Passages in a random order, in sentences."""
    passages = [passage.text for passage in read_bundled_passages()]

    def draw(generator: random.Random) -> Iterator[str]:
        text = "\n".join(generator.sample(passages, len(passages)))
        return iter(_SENTENCE.split(text))

    return Kind("", draw, [f" {one.strip()}" for text in passages for one in _SENTENCE.split(text)])


def _code() -> Kind:
    """Modules, each from a random line on."""
    modules = [
        path.read_text(encoding="utf-8").splitlines(keepends=True)
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]

    def draw(generator: random.Random) -> Iterator[str]:
        while True:
            lines = generator.choice(modules)
            yield from lines[generator.randrange(len(lines) + 1) :]

    return Kind("code_", draw, [line for lines in modules for line in lines if len(line) > CODE_LINE_MIN])


def _hit_rate(
    form: PromptForm, classes: TokenClasses, kind: Kind, tokens: int, generator: random.Random
) -> float:
    """Share of a document's tokens in segments that existed before the insertion."""
    pieces: list[str] = []
    counted = 0
    for piece in kind.draw(generator):
        pieces.append(piece)
        counted += len(form.tokenize(piece))
        if counted >= tokens:
            break
    document = "".join(pieces)
    at = generator.randrange(1, len(pieces))
    changed = "".join([*pieces[:at], generator.choice(kind.insertions), *pieces[at:]])
    before, after = (_segments(form, classes, text) for text in (document, changed))
    hit = sum(len(segment) for segment in after if segment in set(before))
    return hit / len(form.tokenize(document))


def _segments(form: PromptForm, classes: TokenClasses, document: str) -> list[TokenIds]:
    ids = TokenIds.of([*form.head, *form.tokenize(document + QUESTION)])
    return [ids[span.start : span.end] for span in find_segments(ids, classes, len(form.head))]
