"""Multi-chunk questions whose answer needs attention across chunks while later chunks are read.

A document is a short chronicle cut into chunks. Some sentences bind a reference ("Now meet Alice.",
"Falcon is Beth.", "dax means copper."), later chunks state facts through the reference only ("pearls hid
in attic by her.", "maps traded by Nora for dax."), and references are bound again and again. What a fact
says is therefore fixed where it stands: a model that reads a chunk alone cannot know it, and looking the
binding up when the question is asked finds several rivals. A filler sentence carries nothing.

Tasks (`TASKS`): `pronoun` and `place` follow one running topic or place; `alias` and `code` follow a name
that is bound anew; `chain` and `relay` compose two such bindings; `control` is answered by one sentence.

Everything is a pure function of a seed. Training seeds and evaluation seeds are disjoint ranges, and the
generator raises `SeedError` rather than mixing them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.testbed import words

CROSS_CHUNK_TASKS = ("pronoun", "alias", "chain", "place", "code", "relay")
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
        same_chunk_rate: share of facts that may use a reference bound in their own chunk.
        keys: how many aliases, codes or camps one document uses, least and most.
        rebind_after: how many chunks later a reference is bound anew, least and most.
        explicit_rate: share of facts that state their value themselves.
    """

    chunks: tuple[int, int] = (4, 6)
    facts_per_chunk: tuple[int, int] = (1, 3)
    fillers_per_chunk: tuple[int, int] = (2, 4)
    mechanisms: tuple[int, int] = (1, 2)
    same_chunk_rate: float = 0.1
    keys: tuple[int, int] = (1, 1)
    rebind_after: tuple[int, int] = (2, 3)
    explicit_rate: float = 0.2


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
class Verb:
    """How facts and questions with one verb read: "{obj} {stem} {subject} {link} {value}."

    Attributes:
        stem, link: words before and after the subject, which alone identifies a fact of this verb.
        subjects: what a subject may be; answers: what a value may be.
        asks: what kind of value a question asks for.
    """

    stem: tuple[str, ...]
    link: str
    subjects: tuple[str, ...]
    answers: tuple[str, ...]
    asks: str


VERBS = {
    "hide": Verb((" hid", " in"), " by", words.CONTAINERS, words.NAMES, " person"),
    "sell": Verb((" sold", " by"), " in", words.NAMES, words.CITIES, " city"),
    "trade": Verb((" traded", " by"), " for", words.NAMES, words.METALS, " metal"),
}

VERB_OF_TASK = {
    "pronoun": "hide",
    "alias": "hide",
    "chain": "hide",
    "place": "sell",
    "relay": "sell",
    "code": "trade",
}


@dataclass(frozen=True)
class Fact:
    """A statement that can be asked for.

    Attributes:
        task: the task a question about it belongs to.
        verb: a key of `VERBS`.
        obj, subject: what a question names.
        answer: the one-word answer.
        reference: the surface word that stands for the answer ("her", "Falcon", "dax"), if any.
        crosses: whether every binding it depends on stands in an earlier chunk.
    """

    task: str
    verb: str
    obj: str
    subject: str
    answer: str
    reference: str | None
    crosses: bool


@dataclass(frozen=True)
class Piece:
    """One token: a word with its leading space, or a mark; and what it stands for where it is read."""

    text: str
    stands_for: str | None = None


@dataclass(frozen=True)
class Document:
    """Chunks as pieces, and what they state."""

    chunks: tuple[tuple[Piece, ...], ...]
    facts: tuple[Fact, ...]
    bindings: dict[str, int]
    """How many distinct things each reference word stood for."""


@dataclass(frozen=True)
class Binding:
    """What a reference stands for now.

    Attributes:
        chunk: the chunk that bound it.
        linked: whether it was bound by way of another reference.
        crosses: for a linked one, whether that other was bound in an earlier chunk.
    """

    value: str
    chunk: int
    linked: bool = False
    crosses: bool = True


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
    for attempt in range(ATTEMPTS_MAX):
        rng = random.Random(f"eval:{task}:{seed}:{attempt}")
        document = build_document(rng, shape, must_have=None if task == CONTROL_TASK else task)
        eligible = [fact for fact in document.facts if fact.task == task and has_rival(document, fact)]
        if eligible:
            fact = rng.choice(eligible)
            chunks = tuple("".join(piece.text for piece in chunk) for chunk in document.chunks)
            return Example(task, chunks, "".join(question_words(fact)), fact.answer, seed)
    raise GenerationError(f"no {task} question in {ATTEMPTS_MAX} documents of {shape}")


@dataclass(frozen=True)
class TrainingText:
    """A document and questions about it; all fields have one entry a piece.

    Attributes:
        pieces: what is read.
        weights: how much a piece counts as a target: answers fully, the rest, which little determines,
            a little, words of a question not at all.
        stands_for: what a piece stands for, where it stands for something.
    """

    pieces: list[str]
    weights: list[float]
    stands_for: list[str | None]


ANSWER_WEIGHT = 1.0
TEXT_WEIGHT = 0.03
END = "<|end|>"


def make_training_text(seed: int, shape: Shape, pieces_max: int) -> TrainingText:
    """One training text: a document, then as many questions and answers about it as fit `pieces_max`.

    Raises:
        SeedError: `seed` is no training seed.
    """
    require_split(seed, TRAIN_SEEDS)
    rng = random.Random(f"train:{seed}")
    document = build_document(rng, shape, must_have=None)
    read = [piece for chunk in document.chunks for piece in chunk]
    pieces = [piece.text for piece in read]
    weights = [TEXT_WEIGHT] * len(read)
    for fact in rng.sample(document.facts, len(document.facts)):
        asked = question_words(fact)
        if len(pieces) + len(asked) + 2 > pieces_max:
            break
        pieces += [*asked, " " + fact.answer, END]
        weights += [0.0] * len(asked) + [ANSWER_WEIGHT, TEXT_WEIGHT]
    stands_for = [piece.stands_for for piece in read] + [None] * (len(pieces) - len(read))
    return TrainingText(pieces[:pieces_max], weights[:pieces_max], stands_for[:pieces_max])


def question_words(fact: Fact) -> list[str]:
    """ "Q: what city were maps sold by Nora in" and its like: the answer comes next."""
    verb = VERBS[fact.verb]
    subject = f" {fact.subject}"
    return ["Q", ":", " what", verb.asks, " were", f" {fact.obj}", *verb.stem, subject, verb.link]


def has_rival(document: Document, fact: Fact) -> bool:
    """Whether the document holds what a reader of isolated chunks would confuse with this fact."""
    if fact.reference is None:
        others = [other for other in document.facts if other is not fact and other.verb == fact.verb]
        return any(other.answer != fact.answer for other in others)
    return fact.crosses and document.bindings[fact.reference] >= 2


@dataclass
class Writer:
    """Writes one document: the state of every reference, and the facts stated so far."""

    rng: random.Random
    shape: Shape
    mechanisms: frozenset[str]
    chunk: int = 0
    bound: dict[str, Binding] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    past: dict[str, set[str]] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, active = self.rng, self.mechanisms
        running = [
            reference
            for reference, tasks in {"her": {"pronoun", "chain"}, "here": {"place", "relay"}}.items()
            if active & tasks
        ]
        named: list[str] = []
        for tasks, pool in (
            ({"alias", "chain"}, words.ALIASES),
            ({"code"}, words.CODES),
            ({"relay"}, words.CAMPS),
        ):
            if active & tasks:
                named += rng.sample(pool, rng.randint(*self.shape.keys))
        linking = bool(active & {"chain", "relay"})
        for reference in running + named:
            first = reference in running or not linking
            self.due[reference] = rng.choice((0, 0, 1)) if first else rng.choice((1, 1, 2))

    def bind(self, reference: str) -> list[Piece]:
        """Binds a reference to something it did not stand for before; the sentence that says so."""
        self.due[reference] = self.chunk + self.rng.randint(*self.shape.rebind_after)
        if reference == "her":
            return [*said(" Now", " meet"), *self.bind_directly(reference, words.NAMES)]
        if reference == "here":
            return [*said(" We", " reach"), *self.bind_directly(reference, words.CITIES)]
        if reference in words.CODES:
            return [*said(f" {reference}", " means"), *self.bind_directly(reference, words.METALS)]
        if reference in words.CAMPS:
            return self.bind_by_link(reference, "here", " lies")
        both = "alias" in self.mechanisms and self.rng.random() < 0.4
        if "chain" in self.mechanisms and not both:
            return self.bind_by_link(reference, "her", " is")
        return [*said(f" {reference}", " is"), *self.bind_directly(reference, words.NAMES)]

    def bind_directly(self, reference: str, pool: Sequence[str]) -> list[Piece]:
        """To a word of a pool that it never stood for in this document: each answer is unambiguous."""
        past = self.past.setdefault(reference, set())
        value = self.rng.choice([word for word in pool if word not in past])
        past.add(value)
        self.bound[reference] = Binding(value, self.chunk)
        return said(f" {value}", ".")

    def bind_by_link(self, reference: str, running: str, link: str) -> list[Piece]:
        """Bind a reference to the present topic or place, unless it stood for that before; then do
        nothing."""
        past = self.past.setdefault(reference, set())
        origin = self.bound.get(running)
        if origin is None or origin.value in past:
            self.due[reference] = self.chunk + 1
            return []
        past.add(origin.value)
        crosses = origin.chunk < self.chunk
        self.bound[reference] = Binding(origin.value, self.chunk, linked=True, crosses=crosses)
        return [*said(f" {reference}", link), Piece(f" {running}", origin.value), Piece(".")]

    def usable(self, task: str) -> list[str]:
        """References that a fact of this task may use in this chunk."""
        kinds: dict[str, tuple[Sequence[str], bool]] = {
            "pronoun": (("her",), False),
            "place": (("here",), False),
            "alias": (words.ALIASES, False),
            "chain": (words.ALIASES, True),
            "code": (words.CODES, False),
            "relay": (words.CAMPS, True),
        }
        pool, linked = kinds[task]
        own = self.rng.random() < self.shape.same_chunk_rate
        return [
            reference
            for reference, binding in self.bound.items()
            if reference in pool and binding.linked == linked and (own or binding.chunk < self.chunk)
        ]

    def state(self, task: str) -> list[Piece]:
        """States a fact of a task; where no reference can carry it yet, rarely an explicit one."""
        verb_name = VERB_OF_TASK[task if task != CONTROL_TASK else self.rng.choice(sorted(self.mechanisms))]
        usable = self.usable(task) if task != CONTROL_TASK else []
        if not usable and task != CONTROL_TASK:
            if self.rng.random() >= EXPLICIT_INSTEAD:
                return []
            task = CONTROL_TASK
        verb = VERBS[verb_name]
        stated = [fact for fact in self.facts if fact.verb == verb_name]
        taken = {fact.subject for fact in stated}
        free = [subject for subject in verb.subjects if subject not in taken]
        if not free:
            return []
        again = bool(stated) and self.rng.random() < 0.5
        obj = self.rng.choice([fact.obj for fact in stated] if again else words.OBJECTS)
        subject = self.rng.choice(free)
        if task == CONTROL_TASK:
            value = reference = self.rng.choice(verb.answers)
            fact = Fact(task, verb_name, obj, subject, value, None, crosses=False)
        else:
            reference = self.rng.choice(usable)
            binding = self.bound[reference]
            crosses = binding.chunk < self.chunk and binding.crosses
            fact = Fact(task, verb_name, obj, subject, binding.value, reference, crosses)
        self.facts.append(fact)
        words_before = said(f" {obj}", *verb.stem, f" {subject}", verb.link)
        return [*words_before, Piece(f" {reference}", fact.answer), Piece(".")]

    def filler(self) -> list[Piece]:
        """A sentence that binds and states nothing."""
        kinds = (words.FILLER_ADJECTIVES, words.FILLER_NOUNS, words.FILLER_VERBS, words.FILLER_ADVERBS)
        return said(" The", *(f" {self.rng.choice(kind)}" for kind in kinds), ".")

    def write_chunk(self) -> tuple[Piece, ...]:
        """One chunk: due bindings, facts and fillers in any order."""
        shape, rng = self.shape, self.rng
        items = [("bind", reference) for reference, chunk in self.due.items() if chunk <= self.chunk]
        for _ in range(rng.randint(*shape.facts_per_chunk)):
            explicit = rng.random() < shape.explicit_rate
            items.append(("state", CONTROL_TASK if explicit else rng.choice(sorted(self.mechanisms))))
        items += [("filler", "")] * rng.randint(*shape.fillers_per_chunk)
        rng.shuffle(items)
        pieces = [Piece("-")]
        for kind, what in items:
            if kind == "bind":
                pieces += self.bind(what)
            elif kind == "state":
                pieces += self.state(what)
            else:
                pieces += self.filler()
        pieces.append(Piece("\n"))
        self.chunk += 1
        return tuple(pieces)


EXPLICIT_INSTEAD = 0.15


def said(*texts: str) -> list[Piece]:
    """Pieces that stand for nothing but themselves."""
    return [Piece(text) for text in texts]


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
