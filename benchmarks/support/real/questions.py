"""Questions over six passages, made by rules from their sentences: seeded, and no model decides anything.

A real model of 135 M parameters cannot answer multi-hop questions over 3,600 tokens, and asked freely it
rarely repeats a fact. It can find a sentence in one of the passages and go on with it. So every question asks
for one sentence, and the assistant's answer is opened with the sentence's beginning, as a chat client does
that sends the start of the assistant's message. What follows there (a year, a number, a word) is the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kintsugi.quality.metrics import normalize_answer

_SENTENCE_END = re.compile(r'(?<=[\w)"][\w)"][.?!])\s+(?=\S)')
_MARKS = ".,;:\"'"
OPENING_WORDS_MIN = 8
"""Length of a quoted beginning: fewer words may leave open what follows."""
BEGINNING_WORDS = 4
"""Words of the sentence by which the question names it."""
SENTENCE_WORDS = range(10, 46)
QUOTE = 'The passages say: "'


@dataclass(frozen=True)
class Kind:
    """A kind of question, by what the answer is."""

    name: str
    first_word: re.Pattern[str]
    """What the first word of the answer looks like, without the marks around it."""
    words: int = 1
    """Length of the answer."""


KINDS = (
    Kind("year", re.compile(r"1[0-9]{3}|20[0-2][0-9]")),
    Kind("number", re.compile(r"(?!1[0-9]{3}$|20[0-2][0-9]$)[0-9]{1,6}")),
    Kind("word", re.compile(r"[A-Za-z]{6,}")),
    Kind("phrase", re.compile(r"[A-Za-z]{6,}"), words=3),
)


@dataclass(frozen=True)
class Asked:
    """One question and the beginning of its answer."""

    kind: str
    user: str
    """The text of the user's message after the passages."""
    opening: str
    """How the assistant's answer begins; the model goes on."""
    answer: str
    """The words that have to follow."""
    sentence: str
    """Where they stand."""

    @property
    def quoted(self) -> str:
        """The part of the opening that stands in a passage."""
        return self.opening.removeprefix(QUOTE)

    def is_right(self, text: str) -> bool:
        """Whether the model's text begins with the answer, words compared without case, punctuation and
        articles."""
        expected = normalize_answer(self.answer).split()
        return normalize_answer(text).split()[: len(expected)] == expected


def ask(
    passages: Sequence[str], per_kind: int, seed: str, without: Collection[str] = frozenset()
) -> list[Asked]:
    """At most ``per_kind`` questions of each kind over the passages of one prompt, each about another
    sentence, and about none of ``without``.

    What is quoted occurs once in the passages, so one thing follows.
    """
    generator = random.Random(seed)
    everything = " ".join(passages)
    every = [sentence for passage in passages for sentence in sentences(passage)]
    candidates = [sentence for sentence in dict.fromkeys(every) if sentence not in without]
    generator.shuffle(candidates)
    found: list[Asked] = []
    for kind in KINDS:
        count = 0
        unused = []
        for sentence in candidates:
            asked = _quote(kind, sentence, generator) if count < per_kind else None
            if asked is None or everything.count(asked.quoted) > 1:
                unused.append(sentence)
            else:
                found.append(asked)
                count += 1
        candidates = unused
    return found


def sentences(passage: str) -> list[str]:
    """The whole sentences of a passage. Its first and last piece may be cut, and are left out."""
    pieces = _SENTENCE_END.split(passage)[1:-1]
    return [piece for piece in pieces if len(piece.split()) in SENTENCE_WORDS and "##" not in piece]


def _quote(kind: Kind, sentence: str, generator: random.Random) -> Asked | None:
    """A question about the sentence; None if nothing in it can be the answer."""
    words = sentence.split(" ")
    places = [
        at
        for at in range(OPENING_WORDS_MIN, len(words) - kind.words + 1)
        if kind.first_word.fullmatch(words[at].strip(_MARKS))
    ]
    if not places:
        return None
    at = generator.choice(places)
    answer = " ".join(words[at : at + kind.words]).strip(_MARKS)
    if len(normalize_answer(answer).split()) < kind.words:
        return None
    beginning = " ".join(words[:BEGINNING_WORDS])
    user = f'What do the passages say in the sentence that begins with "{beginning}"?'
    return Asked(kind.name, user, QUOTE + " ".join(words[:at]), answer, sentence)
