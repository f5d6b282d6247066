"""Multi-chunk questions whose answer needs attention across chunks while later chunks are read.

A document is a short chronicle cut into chunks. Some sentences bind a reference ("Now meet Alice.",
"Falcon is Alice.", "dax means copper."), later chunks state facts through the reference only ("pearls hid
by her in attic.", "pearls hid by Falcon in attic.", "maps traded by Beth for dax."), and references are
bound again and again. What a fact says is therefore fixed where it stands: a model that reads a chunk alone
cannot know it, and looking the binding up when the question is asked finds several rivals. A filler
sentence carries nothing.

Tasks (`TASKS`): `pronoun` and `place` follow one running topic or place; `alias` and `code` follow a name
that is bound anew; `chain` and `relay` compose two such bindings; `control` is answered by one sentence.

Everything is a pure function of a seed. Training seeds and evaluation seeds are disjoint ranges, and the
generator raises `SeedError` rather than mixing them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.testbed import words

CROSS_CHUNK_TASKS = ("pronoun", "alias", "chain", "place", "code", "relay")
VALUE_TASKS = ("place", "code", "relay")
"""Tasks whose reference stands for the answer; in the others it stands for the person."""
CONTROL_TASK = "control"
TASKS = (*CROSS_CHUNK_TASKS, CONTROL_TASK)

TRAIN_SEEDS = range(1 << 40)
EVAL_SEEDS = range(1 << 40, 1 << 41)

ATTEMPTS_MAX = 400


class SeedError(ValueError):
    """A seed of one split was used to make an example of the other."""


class GenerationError(RuntimeError):
    """No document of this shape holds a question of this task, within `ATTEMPTS_MAX` attempts."""


@dataclass(frozen=True)
class Shape:
    """How large and how dense a document is.

    Attributes:
        chunks: least and most chunks.
        facts_per_chunk: least and most facts a chunk states.
        fillers_per_chunk: least and most filler sentences of a chunk (6 tokens each).
        mechanisms: how many of the cross-chunk tasks share one document, least and most.
        appositive_rate: share of references directly followed by what they stand for ("by her Alice in ...").
            Training text has some, which rewards resolving a reference where it stands; evaluation has none.
        same_chunk_rate: share of facts that may use a reference bound in their own chunk.
        keys: how many aliases, codes or camps one document uses, least and most.
        rebind_after: how many chunks later a reference is bound anew, least and most.
    """

    chunks: tuple[int, int] = (4, 6)
    facts_per_chunk: tuple[int, int] = (1, 3)
    fillers_per_chunk: tuple[int, int] = (2, 4)
    mechanisms: tuple[int, int] = (1, 2)
    appositive_rate: float = 0.0
    same_chunk_rate: float = 0.1
    keys: tuple[int, int] = (1, 1)
    rebind_after: tuple[int, int] = (2, 3)


EVAL_SHAPE = Shape()


@dataclass(frozen=True)
class Example:
    """One question over several chunks.

    Attributes:
        task: one of `TASKS`.
        chunks: chunk texts in order; the prompt is their plain concatenation followed by `question`.
        question: the question's text, up to its last word.
        answer: the one word that follows, without its leading space.
        seed: the seed that makes this very example again.
    """

    task: str
    chunks: tuple[str, ...]
    question: str
    answer: str
    seed: int


@dataclass(frozen=True)
class Fact:
    """A statement that can be asked for.

    Attributes:
        task: the task a question about it belongs to.
        verb: "hide", "sell" or "trade".
        person, obj: whom and what a question names; one person does one thing with each verb.
        answer: the one-word answer.
        reference: the surface word that stands for the person or the value ("her", "Falcon", "here", "dax").
        chunk: index of the chunk it stands in.
        crosses: whether every binding it depends on stands in an earlier chunk.
    """

    task: str
    verb: str
    person: str
    obj: str
    answer: str
    reference: str
    chunk: int
    crosses: bool


@dataclass(frozen=True)
class Document:
    """Chunks as lists of pieces (a word with its leading space, or a mark), and what they state."""

    chunks: tuple[tuple[str, ...], ...]
    facts: tuple[Fact, ...]
    bindings: dict[str, int]
    """How many distinct things each reference word stood for."""


@dataclass(frozen=True)
class Binding:
    """What a reference stands for now: its value, the chunk that bound it, whether a link made it."""

    value: str
    chunk: int
    linked: bool = False
    crosses: bool = True


@dataclass(frozen=True)
class Verb:
    """How facts and questions with one verb read, and what they are answered with."""

    past: str
    asks: str
    preposition: str
    answers: tuple[str, ...]


VERBS = {
    "hide": Verb("hid", "where", "in", words.CONTAINERS),
    "sell": Verb("sold", "where", "in", words.CITIES),
    "trade": Verb("traded", "what", "for", words.METALS),
}


def require_split(seed: int, allowed: range) -> None:
    """Refuses a seed outside `allowed`.

    Raises:
        SeedError: the seed belongs to another split.
    """
    if seed not in allowed:
        raise SeedError(f"seed {seed} is outside {allowed.start}..{allowed.stop - 1}: splits never mix")


def eval_example(task: str, index: int, shape: Shape = EVAL_SHAPE) -> Example:
    """The `index`-th evaluation example of a task."""
    return make_eval_example(task, EVAL_SEEDS.start + index, shape)


def make_eval_example(task: str, seed: int, shape: Shape = EVAL_SHAPE) -> Example:
    """One fresh question. The document has a rival that reads the same and answers otherwise.

    Raises:
        SeedError: `seed` is no evaluation seed.
        GenerationError: documents of this shape cannot hold such a question.
    """
    require_split(seed, EVAL_SEEDS)
    shape = replace(shape, appositive_rate=0.0)
    for attempt in range(ATTEMPTS_MAX):
        rng = random.Random(f"eval:{task}:{seed}:{attempt}")
        document = build_document(rng, shape, must_have=None if task == CONTROL_TASK else task)
        eligible = [fact for fact in document.facts if fact.task == task and has_rival(document, fact)]
        if eligible:
            fact = rng.choice(eligible)
            chunks = tuple("".join(chunk) for chunk in document.chunks)
            return Example(task, chunks, "".join(question_pieces(fact)), fact.answer, seed)
    raise GenerationError(f"no {task} question in {ATTEMPTS_MAX} documents of {shape}")


def make_training_text(seed: int, shape: Shape, pieces_max: int) -> tuple[list[str], list[float]]:
    """One training text: a document, then as many questions and answers about it as fit.

    Returns:
        (pieces, weights), both of length <= `pieces_max`: `weights[i]` is how much piece i counts as a
        target. Answers count fully, appositives nearly, the rest, which nothing determines, a little.

    Raises:
        SeedError: `seed` is no training seed.
    """
    require_split(seed, TRAIN_SEEDS)
    rng = random.Random(f"train:{seed}")
    document = build_document(rng, shape, must_have=None)
    pieces: list[str] = []
    weights: list[float] = []
    for chunk in document.chunks:
        for piece in chunk:
            appositive = piece.endswith(APPOSITIVE_MARK)
            pieces.append(piece.removesuffix(APPOSITIVE_MARK))
            weights.append(APPOSITIVE_WEIGHT if appositive else TEXT_WEIGHT)
    facts = [fact for fact in document.facts if fact.task != CONTROL_TASK or rng.random() < CONTROL_SHARE]
    rng.shuffle(facts)
    for fact in facts:
        asked = question_pieces(fact)
        if len(pieces) + len(asked) + 2 > pieces_max:
            break
        pieces += [*asked, " " + fact.answer, END]
        weights += [0.0] * len(asked) + [ANSWER_WEIGHT, TEXT_WEIGHT]
    return pieces[:pieces_max], weights[:pieces_max]


ANSWER_WEIGHT = 1.0
APPOSITIVE_WEIGHT = 0.75
TEXT_WEIGHT = 0.03
CONTROL_SHARE = 0.2
"""Share of the explicit facts that training asks about: they are learned first and easily."""
END = "<|end|>"
APPOSITIVE_MARK = "\x00"


def question_pieces(fact: Fact) -> list[str]:
    """Pieces of "Q: where were pearls hid by Alice" and its like: the answer comes next."""
    verb = VERBS[fact.verb]
    return ["Q", ":", f" {verb.asks}", " were", f" {fact.obj}", f" {verb.past}", " by", f" {fact.person}"]


def has_rival(document: Document, fact: Fact) -> bool:
    """Whether the document holds what a reader of isolated chunks would confuse with this fact."""
    others = [other for other in document.facts if other is not fact and other.verb == fact.verb]
    if fact.task == CONTROL_TASK:
        return any(other.answer != fact.answer for other in others)
    if not fact.crosses or document.bindings[fact.reference] < 2:
        return False
    if fact.task in VALUE_TASKS:
        return True
    return any(other.reference == fact.reference and other.answer != fact.answer for other in others)


@dataclass
class Writer:
    """Writes one document: the state of every reference, and the facts stated so far."""

    rng: random.Random
    shape: Shape
    mechanisms: frozenset[str]
    chunk: int = 0
    topic: Binding | None = None
    place: Binding | None = None
    aliases: dict[str, Binding] = field(default_factory=dict)
    codes: dict[str, Binding] = field(default_factory=dict)
    camps: dict[str, Binding] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    past: dict[str, set[str]] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)
    asked: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        rng, active = self.rng, self.mechanisms
        references: list[str] = []
        if active & {"pronoun", "chain"}:
            references.append("her")
        if active & {"place", "relay"}:
            references.append("here")
        if active & {"alias", "chain"}:
            references += self.some_of(words.ALIASES)
        if "code" in active:
            references += self.some_of(words.CODES)
        if "relay" in active:
            references += self.some_of(words.CAMPS)
        for reference in references:
            first = reference in ("her", "here") or not active & {"chain", "relay"}
            self.due[reference] = rng.choice((0, 0, 1)) if first else rng.choice((1, 1, 2))

    def some_of(self, pool: Sequence[str]) -> list[str]:
        """As many references of a kind as the shape asks for."""
        return self.rng.sample(pool, self.rng.randint(*self.shape.keys))

    def references_due(self) -> list[str]:
        """References to bind anew in this chunk."""
        return [reference for reference, chunk in self.due.items() if chunk <= self.chunk]

    def bind(self, reference: str) -> list[str]:
        """Binds a reference to something it did not stand for before; returns the sentence's pieces."""
        self.due[reference] = self.chunk + self.rng.randint(*self.shape.rebind_after)
        if reference == "her":
            name = self.fresh(reference, words.NAMES)
            self.topic = Binding(name, self.chunk)
            return [" Now", " meet", f" {name}", "."]
        if reference == "here":
            city = self.fresh(reference, words.CITIES)
            self.place = Binding(city, self.chunk)
            return [" We", " reach", f" {city}", "."]
        if reference in words.ALIASES:
            return self.bind_alias(reference)
        if reference in words.CODES:
            metal = self.fresh(reference, words.METALS)
            self.codes[reference] = Binding(metal, self.chunk)
            return [f" {reference}", " means", f" {metal}", "."]
        return self.bind_camp(reference)

    def bind_alias(self, alias: str) -> list[str]:
        """Names a person, or the running topic's ("Falcon is her.")."""
        past = self.past.setdefault(alias, set())
        topic = self.topic
        link = "chain" in self.mechanisms and topic is not None and topic.value not in past
        if link and "alias" in self.mechanisms:
            link = self.rng.random() < 0.6
        if link and topic is not None:
            past.add(topic.value)
            crosses = topic.chunk < self.chunk
            self.aliases[alias] = Binding(topic.value, self.chunk, linked=True, crosses=crosses)
            return [f" {alias}", " is", " her", *self.appositive(topic.value), "."]
        name = self.fresh(alias, words.NAMES)
        self.aliases[alias] = Binding(name, self.chunk)
        return [f" {alias}", " is", f" {name}", "."]

    def bind_camp(self, camp: str) -> list[str]:
        """Says "Delta lies here." where a place runs that the camp did not have; else nothing."""
        place = self.place
        past = self.past.setdefault(camp, set())
        if place is None or place.value in past:
            self.due[camp] = self.chunk + 1
            return []
        past.add(place.value)
        crosses = place.chunk < self.chunk
        self.camps[camp] = Binding(place.value, self.chunk, linked=True, crosses=crosses)
        return [f" {camp}", " lies", " here", *self.appositive(place.value), "."]

    def fresh(self, reference: str, pool: Sequence[str]) -> str:
        """A value this reference never had in this document, so that each answer is unambiguous."""
        past = self.past.setdefault(reference, set())
        value = self.rng.choice([word for word in pool if word not in past])
        past.add(value)
        return value

    def appositive(self, value: str) -> list[str]:
        """What a reference stands for, spelled out behind it, at the shape's rate."""
        if self.rng.random() < self.shape.appositive_rate:
            return [f" {value}{APPOSITIVE_MARK}"]
        return []

    def usable(self, bindings: dict[str, Binding], linked: bool) -> list[str]:
        """References bound directly, or by a link, that a fact of this chunk may use."""
        same_chunk = self.rng.random() < self.shape.same_chunk_rate
        return [
            reference
            for reference, binding in bindings.items()
            if binding.linked == linked and (same_chunk or binding.chunk < self.chunk)
        ]

    def fact(self, task: str) -> list[str]:
        """States a fact of a task; where no reference can carry it yet, an explicit one or none."""
        if task == "pronoun":
            return self.fact_by(task, {"her": self.topic} if self.topic else {})
        if task in ("alias", "chain"):
            usable = self.usable(self.aliases, linked=task == "chain")
            if task == "chain" and not usable:
                return self.fact("pronoun")
            return self.fact_by(task, {key: self.aliases[key] for key in usable})
        if task == "place":
            return self.fact_with(task, "sell", {"here": self.place} if self.place else {})
        if task == "relay":
            camps = self.usable(self.camps, linked=True)
            if not camps:
                return self.fact("place")
            return self.fact_with(task, "sell", {key: self.camps[key] for key in camps})
        if task == "code":
            codes = self.usable(self.codes, linked=False)
            return self.fact_with(task, "trade", {key: self.codes[key] for key in codes})
        return self.fact_explicit()

    def fact_by(self, task: str, bindings: dict[str, Binding]) -> list[str]:
        """A fact whose reference stands for the person: "pearls hid by her in attic." and its like."""
        bindings = {key: binding for key, binding in bindings.items() if self.may_use(binding)}
        if not bindings:
            return self.fact_instead()
        reference = self.rng.choice(list(bindings))
        binding = bindings[reference]
        free = [verb for verb in VERBS if (verb, binding.value) not in self.asked]
        if not free:
            return []
        rivals = [
            fact
            for fact in self.facts
            if fact.reference == reference and fact.person != binding.value and fact.verb in free
        ]
        verb, obj = self.rng.choice(free), self.rng.choice(words.OBJECTS)
        if rivals and self.rng.random() < 0.75:
            rival = self.rng.choice(rivals)
            verb, obj = rival.verb, rival.obj
        answer = self.rng.choice(VERBS[verb].answers)
        self.state(task, verb, binding.value, obj, answer, reference, binding)
        spelled = self.appositive(binding.value)
        past, preposition = VERBS[verb].past, VERBS[verb].preposition
        return [f" {obj}", f" {past}", " by", f" {reference}", *spelled, f" {preposition}", f" {answer}", "."]

    def fact_with(self, task: str, verb: str, bindings: dict[str, Binding]) -> list[str]:
        """A fact whose reference stands for the answer: "maps sold by Beth here." and its like."""
        bindings = {key: binding for key, binding in bindings.items() if self.may_use(binding)}
        if not bindings:
            return self.fact_instead()
        reference = self.rng.choice(list(bindings))
        binding = bindings[reference]
        pair = self.pick_pair(verb)
        if pair is None:
            return []
        person, obj = pair
        self.state(task, verb, person, obj, binding.value, reference, binding)
        link = {"here": [], "sell": [" at"], "trade": [" for"]}["here" if reference == "here" else verb]
        spelled = self.appositive(binding.value)
        past = VERBS[verb].past
        return [f" {obj}", f" {past}", " by", f" {person}", *link, f" {reference}", *spelled, "."]

    def fact_instead(self) -> list[str]:
        """Where a reference stands for nothing yet."""
        return self.fact_explicit() if self.rng.random() < 0.15 else []

    def fact_explicit(self) -> list[str]:
        """A fact that one sentence states: the control."""
        verb = self.rng.choice(tuple(VERBS))
        pair = self.pick_pair(verb)
        if pair is None:
            return []
        person, obj = pair
        answer = self.rng.choice(VERBS[verb].answers)
        self.state(CONTROL_TASK, verb, person, obj, answer, "", None)
        past, preposition = VERBS[verb].past, VERBS[verb].preposition
        return [f" {obj}", f" {past}", " by", f" {person}", f" {preposition}", f" {answer}", "."]

    def may_use(self, binding: Binding) -> bool:
        """Whether a fact of this chunk may use the binding: always an earlier chunk's, rarely its own."""
        return binding.chunk < self.chunk or self.rng.random() < self.shape.same_chunk_rate

    def pick_pair(self, verb: str) -> tuple[str, str] | None:
        """A person who has not used the verb, if any is left, and an object, often one used with it."""
        free = [name for name in words.NAMES if (verb, name) not in self.asked]
        used = [fact.obj for fact in self.facts if fact.verb == verb]
        if not free:
            return None
        obj = self.rng.choice(used if used and self.rng.random() < 0.5 else words.OBJECTS)
        return self.rng.choice(free), obj

    def state(
        self,
        task: str,
        verb: str,
        person: str,
        obj: str,
        answer: str,
        reference: str,
        binding: Binding | None,
    ) -> None:
        """Records a fact."""
        self.asked.add((verb, person))
        crosses = binding is not None and binding.chunk < self.chunk and binding.crosses
        self.facts.append(Fact(task, verb, person, obj, answer, reference, self.chunk, crosses))

    def filler(self) -> list[str]:
        """A sentence that binds and states nothing."""
        pick = self.rng.choice
        return [
            " The",
            f" {pick(words.FILLER_ADJECTIVES)}",
            f" {pick(words.FILLER_NOUNS)}",
            f" {pick(words.FILLER_VERBS)}",
            f" {pick(words.FILLER_ADVERBS)}",
            ".",
        ]

    def write_chunk(self) -> tuple[str, ...]:
        """One chunk: due bindings, facts and fillers in any order."""
        shape, rng = self.shape, self.rng
        tasks = sorted(self.mechanisms) * 4 + [CONTROL_TASK]
        facts = [rng.choice(tasks) for _ in range(rng.randint(*shape.facts_per_chunk))]
        due = self.references_due()
        items = [("bind", reference) for reference in due] + [("fact", task) for task in facts]
        items += [("filler", "")] * rng.randint(*shape.fillers_per_chunk)
        rng.shuffle(items)
        pieces = ["-"]
        for kind, what in items:
            if kind == "bind":
                pieces += self.bind(what)
            elif kind == "fact":
                pieces += self.fact(what)
            else:
                pieces += self.filler()
        pieces.append("\n")
        self.chunk += 1
        return tuple(pieces)


def build_document(rng: random.Random, shape: Shape, must_have: str | None) -> Document:
    """Writes a document with a random set of mechanisms, `must_have` among them."""
    count = rng.randint(*shape.mechanisms)
    chosen = rng.sample(CROSS_CHUNK_TASKS, count)
    if must_have is not None and must_have not in chosen:
        chosen[-1] = must_have
    writer = Writer(rng, shape, frozenset(chosen))
    chunks = tuple(writer.write_chunk() for _ in range(rng.randint(*shape.chunks)))
    bindings = {reference: len(values) for reference, values in writer.past.items()}
    return Document(chunks, tuple(writer.facts), bindings)
