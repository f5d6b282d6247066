"""Random mixes of everything an engine serves at once, each answer against the same request alone.

A mix is drawn from a seed: blends with random chunks, ratios and selectors, saves and plain requests
arrive at random steps, some are aborted, and one fault hits every stream that carries a certain chunk:
the chunk is lost at some layer, the store raises, or it answers only many steps later. What each request
has to answer follows from the fault: a chunk lost is a chunk missed; lost at two layers, a full prefill.
A store that does not answer one request is suspended for a moment, and others may then be declined.

`run_mixes` is all that others need.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from kintsugi.core.errors import DeadlineExceeded, Unavailable
from kintsugi.core.layout import HeadRange
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span
from kintsugi.engine.local import Generation, LocalEngine, Prompt, _Running, save_prompt
from kintsugi.store.protocol.interface import ChunkLost, ChunkStore, LayerFrame

NAMESPACE = "mixed"
TIE_LOGPROB_MAX = 0.05
"""Where the best two tokens are closer than this, another batch shape may round to the other one."""
STEPS_MAX = 20_000
DRAINS_MAX = 50
PROBES_MAX = 10
PROBE_S_MAX = 60.0
SUSPENDED = "store_unavailable: the store failed recently"
POOL_MAX = 24
SLOW_STEPS = (1, 40)
QUESTION_TOKENS_MIN = 40
"""More than a cache block, so that what a twin finds cached covers every chunk."""


class Fault(Enum):
    NONE = auto()
    LOST = auto()
    LOST_TWICE = auto()
    RAISES = auto()
    SLOW = auto()


ERRORS = (Unavailable("injected"), DeadlineExceeded("injected"), OSError("injected"))
"""The last is none that a store may raise; the engine has to survive it as well."""


@dataclass(frozen=True)
class Ask:
    """One request of a mix."""

    kind: str
    """`blend`, `plain` or `save`."""
    prompt: Prompt
    chunks: tuple[tuple[int, ...], ...]
    """Token ids of the chunks: a blend's in the order of its spans, a save's only one."""
    arrives: int
    """Step before which it is submitted."""
    aborted: int | None
    """Step before which it is aborted, if it still runs."""


@dataclass(frozen=True)
class Mix:
    """Everything about one mix, drawn before it runs."""

    asks: tuple[Ask, ...]
    fault: Fault
    victims: dict[tuple[int, ...], int]
    """Chunks that the fault hits, and the layer at which it does."""
    error: Exception
    released: int
    """Step at which a slow store answers."""

    def may_suspend(self, answers: Sequence[Generation | None]) -> bool:
        """Whether the store may have been suspended while these answers were given: it raised an error that
        says that it does not answer, and a request that it hit failed, or was aborted before we could see."""
        if self.fault is not Fault.RAISES or not isinstance(self.error, (Unavailable, DeadlineExceeded)):
            return False
        return any(
            self.victims.keys() & set(ask.chunks) and (answer is None or _outcome(answer) == "failed")
            for ask, answer in zip(self.asks, answers, strict=True)
            if ask.kind == "blend"
        )


@dataclass
class MixReport:
    """Counts over all mixes; `errors` is the figure."""

    seed: int
    mixes: int = 0
    answers: int = 0
    blended: int = 0
    failed_over: int = 0
    """Blends that an injected fault turned into a full prefill."""
    declined: int = 0
    """Blends that were full prefills because the store was suspended."""
    restarted: int = 0
    prefix_hits: int = 0
    saved: int = 0
    aborted: int = 0
    ties: int = 0
    """Answers that part from their solo run where the best two tokens are alike."""
    blocks_leaked: int = 0
    hangs: int = 0
    unlike: list[str] = field(default_factory=list)
    """What differs from its solo run, in words."""
    max_abs_dlogprob: float = 0.0
    """Over tokens before an answer parts from its solo run."""

    @property
    def errors(self) -> int:
        return len(self.unlike) + self.blocks_leaked + self.hangs


def run_mixes(
    engine: LocalEngine, seed: int, count: int, on_mix: Callable[[int], None] | None = None
) -> MixReport:
    """Run `count` mixes drawn from `seed` on an engine that nobody else uses.

    The engine's store has to live in this process (`ram://`), its deadlines have to be longer than the
    steps of a slow store take on this machine (`SLOW_STEPS`). Stops early only when a mix hangs.
    `on_mix` hears how many are done.
    """
    simulation = _Simulation(engine, seed)
    for index in range(count):
        simulation.run(_drawn(simulation.pool, random.Random(f"{seed}/{index}"), simulation.num_layers))
        simulation.report.mixes += 1
        if simulation.report.hangs:
            break
        if on_mix is not None:
            on_mix(index + 1)
    return simulation.report


def _tokens(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.randrange(3, 1000) for _ in range(count))


def _drawn(pool: Sequence[tuple[int, ...]], generator: random.Random, num_layers: int) -> Mix:
    asks: list[Ask] = []
    for _ in range(generator.randint(2, 6)):
        kind = generator.choices(("blend", "plain", "save", "twin"), (6, 2, 2, 1))[0]
        blends = [ask for ask in asks if ask.kind == "blend"]
        if kind == "twin" and blends:
            asks.append(replace(generator.choice(blends), arrives=generator.randint(0, 30), aborted=None))
        else:
            asks.append(_ask(kind if kind != "twin" else "blend", pool, generator))
    used = sorted({chunk for ask in asks if ask.kind == "blend" for chunk in ask.chunks})
    fault = generator.choice([*Fault, Fault.NONE]) if used else Fault.NONE
    wanted = {Fault.NONE: 0, Fault.LOST_TWICE: 2}.get(fault, 1)
    return Mix(
        asks=tuple(asks),
        fault=fault,
        victims={
            chunk: generator.randrange(num_layers) for chunk in generator.sample(used, min(wanted, len(used)))
        },
        error=generator.choice(ERRORS),
        released=generator.randint(*SLOW_STEPS),
    )


def _ask(kind: str, pool: Sequence[tuple[int, ...]], generator: random.Random) -> Ask:
    arrives = generator.randint(0, 12)
    aborted = arrives + generator.randint(0, 25) if generator.random() < 0.25 else None
    if kind == "save":
        chunk = _tokens(generator, generator.choice((1, 33, 64, generator.randint(2, 400))))
        return Ask(kind, save_prompt([0], chunk, NAMESPACE), (chunk,), arrives, aborted)
    max_tokens = generator.randint(1, 12)
    if kind == "plain":
        prompt = Prompt([0, *_tokens(generator, generator.randint(1, 600))], None, max_tokens)
        return Ask(kind, _scored(prompt), (), arrives, aborted)
    token_ids, spans, chunks = [0], [], []
    for _ in range(generator.randint(1, 5)):
        if generator.random() < 0.3:
            token_ids += _tokens(generator, generator.randint(1, 40))
        chunk = generator.choice(pool)
        spans.append(Span(len(token_ids), len(token_ids) + len(chunk)))
        chunks.append(chunk)
        token_ids += chunk
    token_ids += _tokens(generator, generator.randint(QUESTION_TOKENS_MIN, 80))
    params = KintsugiParams(
        NAMESPACE,
        spans=tuple(spans),
        ratio=generator.choice((0.0, 0.05, 0.15, 0.5, 1.0)),
        selector=generator.choice(list(SelectorName)),
    )
    return Ask(kind, _scored(Prompt(token_ids, params, max_tokens)), tuple(chunks), arrives, aborted)


def _scored(prompt: Prompt) -> Prompt:
    return replace(prompt, top_logprobs=5, ignore_eos=True)


class _Hang(Exception):
    """A mix did not end within `STEPS_MAX` steps."""


class _Simulation:
    def __init__(self, engine: LocalEngine, seed: int) -> None:
        self.engine = engine
        self.report = MixReport(seed)
        self.num_layers = engine.llm.llm_engine.model_config.get_total_num_hidden_layers()
        generator = random.Random(f"{seed}/pool")
        self.pool = [_tokens(generator, size) for size in (1, 17, 32, 64, 100, 257)]
        engine.reset_prefix_cache()
        self.engine.save([0], self.pool, NAMESPACE)

    def run(self, mix: Mix) -> None:
        self.engine.reset_prefix_cache()
        store = _store_of(self.engine)
        with _faulty(store, mix, _keys_of(self.engine, list(mix.victims))) as step_is:
            try:
                answers = self._stepped(mix, step_is)
            except _Hang:
                self.report.hangs += 1
                return
        self._drain()
        self._use_store_again()
        for ask, answer in zip(mix.asks, answers, strict=True):
            if answer is None:
                self.report.aborted += 1
            else:
                self._judge(mix, answers, ask, answer)

    def _stepped(self, mix: Mix, step_is: Callable[[int], None]) -> list[Generation | None]:
        """Step the engine until all requests have ended; None for an aborted one."""
        llm = self.engine.llm.llm_engine
        names = self.engine._ids(len(mix.asks))
        running: dict[str, _Running] = {}
        ended: dict[str, Generation | None] = {}
        for step in range(STEPS_MAX):
            step_is(step)
            for name, ask in zip(names, mix.asks, strict=True):
                if ask.arrives == step:
                    running[name] = _Running(0.0)
                    self.engine._submit(name, ask.prompt)
                if ask.aborted == step and name not in ended:
                    llm.abort_request([name])
                    ended[name] = None
            for output in llm.step():
                request = running[output.request_id]
                request.take(output, 0.0)
                if output.finished and output.request_id not in ended:
                    ended[output.request_id] = request.generation
            if len(ended) == len(names):
                return [ended[name] for name in names]
        raise _Hang

    def _drain(self) -> None:
        """What an aborted request held is given back within a few more steps."""
        for _ in range(DRAINS_MAX):
            if blocks_in_use(self.engine) == 0:
                return
            self.engine.generate([Prompt([0, 5], max_tokens=1)])
        self.report.blocks_leaked += blocks_in_use(self.engine)

    def _use_store_again(self) -> None:
        """Wait until a suspended store is used again. Its lookups work all the time, so a probe finds out."""
        lookups = _scheduler_of(self.engine)._lookups
        for _ in range(PROBES_MAX):
            lookups._prober.submit(int).result(PROBE_S_MAX)
            if lookups._breaker.is_closed:
                return
            lookups._begin_probe(list)
        self.report.unlike.append("the store answers probes, and stays suspended")

    def _judge(self, mix: Mix, answers: Sequence[Generation | None], ask: Ask, answer: Generation) -> None:
        report, accounting = self.report, answer.accounting or {}
        outcome = _outcome(answer)
        report.answers += 1
        if ask.kind == "save":
            self._judge_save(ask, outcome, accounting)
            return
        if ask.kind == "blend":
            report.blended += outcome == "blended"
            report.failed_over += outcome == "failed"
            report.declined += outcome == "declined"
            report.prefix_hits += outcome == "prefix_hit"
            report.restarted += accounting.get("restarts", 0) > 0
        expected, allowed = self._expected(mix, ask, accounting)
        if ask.kind == "blend" and mix.may_suspend(answers):
            expected = self._expected_while_suspended(mix, answers, ask, answer, expected)
            if (accounting.get("reason") or "").startswith(SUSPENDED):
                allowed = (*allowed, "declined")
        if outcome not in allowed:
            report.unlike.append(f"{ask.kind} ended as {outcome}, not {allowed}: {accounting}")
        self._compare(f"{ask.kind} {outcome} beside {mix.fault.name}", expected, answer)

    def _expected_while_suspended(
        self,
        mix: Mix,
        answers: Sequence[Generation | None],
        ask: Ask,
        answer: Generation,
        blended: Generation,
    ) -> Generation:
        """The solo run that this answer must equal: a full prefill if it was declined.

        The blocks of a declined request have the names of its blend. So of equal requests a declined one may
        find blended blocks, and one with a prefix hit exact blocks; then the nearer of both runs counts.
        """
        others = {"declined": {"blended", "prefix_hit", "aborted"}, "prefix_hit": {"declined", "aborted"}}
        outcome = _outcome(answer)
        twins = {
            "aborted" if other is None else _outcome(other)
            for one, other in zip(mix.asks, answers, strict=True)
            if one is not ask and one.prompt == ask.prompt
        }
        if outcome not in others:
            return blended
        full = self._alone(replace(ask.prompt, params=None))
        if twins & others[outcome]:
            return min(full, blended, key=lambda one: _distance(one, answer))
        return full if outcome == "declined" else blended

    def _judge_save(self, ask: Ask, outcome: str, accounting: dict[str, Any]) -> None:
        """A chunk that was saved beside others is exact behind its own prefix."""
        if outcome != "saved":
            self.report.unlike.append(f"save ended as {outcome}: {accounting}")
            return
        self.report.saved += 1
        (chunk,) = ask.chunks
        if len(self.pool) < POOL_MAX and chunk not in self.pool:
            self.pool.append(chunk)
        spans = (Span(1, 1 + len(chunk)),)
        reuse = KintsugiParams(NAMESPACE, spans=spans, ratio=0.0)
        prompt = _scored(Prompt([0, *chunk, 7, 8, 9], reuse, 4))
        self._compare("saved chunk", self._alone(replace(prompt, params=None)), self._alone(prompt))

    def _expected(self, mix: Mix, ask: Ask, accounting: dict[str, Any]) -> tuple[Generation, tuple[str, ...]]:
        """The solo run that this answer must equal, and how the request may have ended."""
        params = ask.prompt.params
        if params is None:
            return self._alone(ask.prompt), ("plain",)
        cached = accounting.get("tokens_prefix_cached", 0)
        if accounting.get("outcome") == "prefix_hit":
            cached = 0
        # Chunks that the prefix cache covered were not loaded, and so not hit by the fault.
        assert params.spans is not None
        loaded = {chunk for chunk, s in zip(ask.chunks, params.spans, strict=True) if s.end > cached}
        survived = _survived(mix, loaded)
        if survived is None:
            return self._alone(replace(ask.prompt, params=None)), ("failed", "prefix_hit")
        lost = loaded - survived
        spans = tuple(s for chunk, s in zip(ask.chunks, params.spans, strict=True) if chunk not in lost)
        without = replace(ask.prompt, params=replace(params, spans=spans))
        return self._alone(without, cached), ("blended", "prefix_hit")

    def _alone(self, prompt: Prompt, num_cached: int = 0) -> Generation:
        """The request by itself, behind `num_cached` tokens of exact prefix."""
        self.engine.reset_prefix_cache()
        if num_cached:
            exact = KintsugiParams(NAMESPACE, spans=())
            self.engine.generate([Prompt(prompt.token_ids[: num_cached + 1], exact, max_tokens=1)])
        return self.engine.generate([prompt])[0]

    def _compare(self, what: str, expected: Generation, answer: Generation) -> None:
        report = self.report
        for mine, theirs, a, b in zip(
            answer.top_logprobs, expected.top_logprobs, answer.token_ids, expected.token_ids, strict=True
        ):
            shared = mine.keys() & theirs.keys()
            if a == b:
                worst = max(abs(mine[token] - theirs[token]) for token in shared)
                report.max_abs_dlogprob = max(report.max_abs_dlogprob, worst)
                continue
            best, second = sorted(theirs.values(), reverse=True)[:2]
            if best - second < TIE_LOGPROB_MAX and a in theirs:
                report.ties += 1
            else:
                report.unlike.append(f"{what}: {answer.token_ids} alone {expected.token_ids}")
            return


def _outcome(answer: Generation) -> str:
    """How a request ended; `plain` where nothing was asked of us."""
    return str((answer.accounting or {}).get("outcome", "plain"))


def _distance(one: Generation, other: Generation) -> float:
    """How far the first tokens' probabilities are apart."""
    mine, theirs = one.top_logprobs[0], other.top_logprobs[0]
    shared = mine.keys() & theirs.keys()
    return max((abs(mine[token] - theirs[token]) for token in shared), default=math.inf)


def _survived(mix: Mix, loaded: set[tuple[int, ...]]) -> set[tuple[int, ...]] | None:
    """Chunks that a blend ends up with; None where it ends as a full prefill."""
    hit = {chunk: layer for chunk, layer in mix.victims.items() if chunk in loaded}
    if not hit or mix.fault in (Fault.NONE, Fault.SLOW):
        return loaded
    # A pass restarts once, without what was lost at the first layer that lost anything.
    first = min(hit.values())
    left = loaded - {chunk for chunk, layer in hit.items() if layer == first}
    again = any(layer > first for layer in hit.values())
    return None if mix.fault is Fault.RAISES or again or not left else left


Frames = Generator[LayerFrame | ChunkLost, None, None]


@contextmanager
def _faulty(store: ChunkStore, mix: Mix, victims: Sequence[ChunkKey]) -> Iterator[Callable[[int], None]]:
    """Put the mix's fault between the store and the engine; yields what hears the number of each step."""
    original, released = store.stream, threading.Event()
    layer_of = dict(zip(victims, mix.victims.values(), strict=True))

    def stream(
        namespace: str, keys: Sequence[ChunkKey], layers: range, heads: HeadRange, deadline_s: float
    ) -> Frames:
        frames = original(namespace, keys, layers, heads, deadline_s)
        return _through(frames, [layer_of.get(key) for key in keys], mix, released)

    def step_is(step: int) -> None:
        if step >= mix.released:
            released.set()

    store.stream = stream  # type: ignore[method-assign]
    try:
        yield step_is
    finally:
        released.set()
        del store.stream


def _through(frames: Frames, layer_of_chunk: list[int | None], mix: Mix, released: threading.Event) -> Frames:
    gone: set[int] = set()
    for frame in frames:
        if isinstance(frame, LayerFrame) and layer_of_chunk[frame.chunk] == frame.layer:
            if mix.fault is Fault.RAISES:
                raise mix.error
            if mix.fault is Fault.SLOW:
                released.wait()
            else:
                gone.add(frame.chunk)
                yield ChunkLost(frame.chunk, frame.layer, "injected")
        if frame.chunk not in gone:
            yield frame


def _connector(engine: LocalEngine) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    assert engine.llm is not None
    return get_kv_transfer_group()


def _store_of(engine: LocalEngine) -> ChunkStore:
    store: ChunkStore = _connector(engine)._worker._store
    return store


def _scheduler_of(engine: LocalEngine) -> Any:
    """Our scheduler's side."""
    return engine.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler


def _keys_of(engine: LocalEngine, chunks: Sequence[tuple[int, ...]]) -> list[ChunkKey]:
    """Keys of stored chunks, by the engine's own naming."""
    side = _scheduler_of(engine)
    space = ChunkSpace(side.fingerprint, NAMESPACE, side.prefix_token_ids, side.config.portable)
    return [ChunkKey.of(space, chunk) for chunk in chunks]


def blocks_in_use(engine: LocalEngine) -> int:
    """Cache blocks that some request holds."""
    pool = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
