"""Questions in the forms of CacheBlend's four data sets (paper, section 7.1).

MuSiQue's questions are the real ones, read where their file is. The texts of the other three are not
available, so rules make them from MuSiQue's passages: prompts have the form of the data set, not its text,
and their names end in `-form`. Everything is seeded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.real.questions import ask, sentences
from kintsugi.quality.questions import Question

PASSAGES = 6
SHORT_PASSAGES = 10
SHORT_WORDS = 130
"""Length of a passage in the form of 2WikiMQA, whose prompts have ten short paragraphs."""
DIALOGUES_PER_CHUNK = 6
DIALOGUE_CHUNKS = 5
SEED = "paper"
SUMMARY_SENTENCES = 1
"""Sentences of each passage in the reference summary, because news summaries resemble the first sentences."""

NAMES = ("Anna", "Ben", "Carla", "David", "Elif", "Frank", "Greta", "Hugo", "Ines", "Jonas", "Kim", "Lena")
PLACES = ("the library", "the station", "the market", "the harbour", "the museum", "the park", "the cinema")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
THINGS = ("return the books", "buy a present", "practise the song", "repair the bicycle", "plan the trip")


def musique(path: Path, count: int) -> list[Question]:
    """Multi-hop questions over the first six passages of each entry."""
    entries = json.loads(path.read_text())[:count]
    return [
        Question(
            tuple(_ended(one["text"]) for one in entry["ctxs"][:PASSAGES]),
            entry["question"],
            tuple(entry["answers"]),
            "musique",
            bare=True,
        )
        for entry in entries
    ]


def two_wiki_form(passages: Sequence[str], count: int) -> list[Question]:
    """Ten short paragraphs and a question with a short answer, about a sentence in one of them."""
    found: list[Question] = []
    for number in range(len(passages)):
        chosen = _some(passages, SHORT_PASSAGES, f"2wiki {number}")
        short = [" ".join(text.split()[:SHORT_WORDS]) for text in chosen]
        asked = ask(short, 1, f"{SEED} 2wiki {number}")
        if asked:
            one = random.Random(f"{SEED} 2wiki kind {number}").choice(asked)
            tail = f'{one.user} Complete it with the next words only: "{one.quoted} ..."'
            found.append(Question(tuple(map(_ended, short)), tail, (one.answer,), "2wikimqa-form", bare=True))
        if len(found) == count:
            break
    return found


def samsum_form(count: int) -> list[Question]:
    """Short dialogues with their summaries as examples, and one more dialogue to summarise."""
    found = []
    for number in range(count):
        generator = random.Random(f"{SEED} samsum {number}")
        chunks = tuple(
            "\n".join("\n".join(_dialogue(generator)) for _ in range(DIALOGUES_PER_CHUNK)) + "\n\n"
            for _ in range(DIALOGUE_CHUNKS)
        )
        dialogue, summary = _dialogue(generator)
        tail = f"{dialogue}\nWrite its summary as above, in one sentence."
        found.append(
            Question(chunks, tail, (summary.removeprefix("Summary: ").strip(),), "samsum", bare=True)
        )
    return found


def multi_news_form(passages: Sequence[str], count: int) -> list[Question]:
    """Six passages to summarise; the reference is the first whole sentence of each."""
    found = []
    for number in range(count):
        chosen = _some(passages, PASSAGES, f"news {number}")
        lead = " ".join(sentence for text in chosen for sentence in sentences(text)[:SUMMARY_SENTENCES])
        tail = "Write a summary of all the passages in one paragraph."
        found.append(Question(tuple(map(_ended, chosen)), tail, (lead,), "multi_news", bare=True))
    return found


def _some(passages: Sequence[str], count: int, purpose: str) -> list[str]:
    return random.Random(f"{SEED} {purpose}").sample(list(passages), count)


def _ended(text: str) -> str:
    return f"{text.strip()}\n\n"


def _dialogue(generator: random.Random) -> tuple[str, str]:
    """A dialogue in which two people agree on something, and its summary."""
    one, other = generator.sample(NAMES, 2)
    day, late = generator.sample(DAYS, 2)
    place, thing = generator.choice(PLACES), generator.choice(THINGS)
    hour = generator.randint(8, 20)
    text = (
        f"Dialogue:\n{one}: Can we {thing} on {late}?\n{other}: {late} is bad for me. {day}?\n"
        f"{one}: Fine. At {hour}, at {place}?\n{other}: See you there."
    )
    return text, f"Summary: {one} and {other} meet at {place} on {day} at {hour} to {thing}.\n"
