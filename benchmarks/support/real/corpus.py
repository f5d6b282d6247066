"""The passages of the real model's prompts in parts that share none, and the sets of six made of them."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.real.questions import Asked, ask
from kintsugi.models.passages import read_bundled_passages

PER_PROMPT = 6
CONTEXT_PASSAGES = 2
CONTEXT_WORDS = 210
"""Length of each passage of the context: about 320 tokens. Longer contexts were no better and cost more to
save."""
CHOOSING_PASSAGES = 54
OVERLAP_MAX = 0.1
"""Highest share of a passage's runs of `RUN_WORDS` words that earlier passages hold. MuSiQue's passages are
windows over the same texts, and most overlap."""
RUN_WORDS = 8
SEED = 14


@dataclass(frozen=True)
class PassageSet:
    """Six passages in the order of a prompt, and their question."""

    number: int
    passages: tuple[str, ...]
    open_question: str
    """Its answer has no known wording: KL is measured along full prefill's own."""
    asked: tuple[Asked, ...]


@dataclass(frozen=True)
class Corpus:
    """Passages in three parts that share no passage, except where ``is_small``."""

    name: str
    sample: str
    """A public sample in the style of the corpus: what prepared chunks are prefilled after."""
    choosing: tuple[str, ...]
    judged: tuple[str, ...]
    questions: Mapping[str, str]
    """An open question for each passage."""
    is_small: bool = False
    """Whether choosing and judged prompts share passages. Their combinations and questions differ."""

    def choosing_sets(self, count: int, per_kind: int) -> list[PassageSet]:
        """Sets to choose kinds of questions and configurations on."""
        return list(itertools.islice(self._sets(self.choosing, per_kind, f"{SEED} choosing"), count))

    def judged_sets(self, count: int, per_kind: int) -> list[PassageSet]:
        return list(itertools.islice(self._sets(self.judged, per_kind, f"{SEED} judged"), count))

    def _sets(self, passages: Sequence[str], per_kind: int, seed: str) -> Iterator[PassageSet]:
        """Round by round, each a partition of the passages in another order: a passage is stored once and
        used once a round. No question is asked twice."""
        number = 0
        sentences: set[str] = set()
        for turn in itertools.count():
            order = list(passages)
            random.Random(f"{seed} {turn}").shuffle(order)
            for start in range(0, len(order) - PER_PROMPT + 1, PER_PROMPT):
                chosen = tuple(order[start : start + PER_PROMPT])
                generator = random.Random(f"{seed} set {number}")
                about = self.questions[generator.choice(chosen)]
                asked = ask(chosen, per_kind, f"{seed} set {number} questions", sentences)
                sentences.update(one.sentence for one in asked)
                yield PassageSet(number, chosen, about, tuple(asked))
                number += 1


def read_corpus(path: Path) -> Corpus:
    """Return MuSiQue's passages if its file exists, else the passages that ship with Kintsugi."""
    return _read_musique(path) if path.is_file() else _read_bundled()


@functools.cache
def _read_musique(path: Path) -> Corpus:
    questions: dict[str, str] = {}
    for entry in json.loads(path.read_text()):
        for passage in entry["ctxs"]:
            questions.setdefault(passage["text"].strip(), entry["question"])
    passages = drop_overlapping(list(questions))
    random.Random(SEED).shuffle(passages)
    context, rest = passages[:CONTEXT_PASSAGES], passages[CONTEXT_PASSAGES:]
    choosing, judged = rest[:CHOOSING_PASSAGES], rest[CHOOSING_PASSAGES:]
    return Corpus("musique", _sample_of(context), tuple(choosing), tuple(judged), questions)


@functools.cache
def _read_bundled() -> Corpus:
    bundled = read_bundled_passages()
    sample = _sample_of([passage.text.strip() for passage in bundled[:CONTEXT_PASSAGES]])
    questions = {
        passage.text.strip(): f"What does the passage about {passage.title.lower()} say?"
        for passage in bundled[CONTEXT_PASSAGES:]
    }
    rest = tuple(questions)
    return Corpus("bundled", sample, rest, rest, questions, is_small=True)


def _sample_of(passages: Sequence[str]) -> str:
    return "".join(" ".join(passage.split()[:CONTEXT_WORDS]) + "\n\n" for passage in passages)


def drop_overlapping(passages: Sequence[str]) -> list[str]:
    """The passages that hardly repeat what earlier ones say, in their order."""
    kept: list[str] = []
    known: set[tuple[str, ...]] = set()
    for passage in passages:
        runs = runs_of(passage)
        if len(runs & known) <= OVERLAP_MAX * len(runs):
            known |= runs
            kept.append(passage)
    return kept


def runs_of(passage: str) -> set[tuple[str, ...]]:
    """Every run of `RUN_WORDS` words."""
    words = passage.split()
    return {tuple(words[at : at + RUN_WORDS]) for at in range(len(words) - RUN_WORDS + 1)}
