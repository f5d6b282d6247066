"""Which requests are marked for a watcher, and what it is shown, over a client that answers from a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.accounting import TICKET, TOLD
from kintsugi.core.plan import Selection, make_trial
from kintsugi.core.request import KintsugiParams, Op, SelectorName
from kintsugi.core.spaces import Span
from kintsugi.engine.local import Generation, Prompt
from kintsugi.engine.watching import TOLD_S, LoadMeter, WatchedClient, blend_trial, prefill_in_full

ACCOUNTING = {"outcome": "blended"}


class ScriptedClient:
    """Two outputs: a first token that was drawn from far behind the best, and the end."""

    def __init__(
        self,
        max_logprobs: int = 20,
        mode: str = "raw_logprobs",
        accounting: Mapping[str, Any] | None = ACCOUNTING,
        cumulative: bool = False,
    ) -> None:
        self.accounting = accounting
        self.cumulative = cumulative
        self.model_config = SimpleNamespace(
            max_logprobs=max_logprobs, logprobs_mode=mode, get_vocab_size=lambda: 1000
        )
        self.closed = 0

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        try:
            best = {token: SimpleNamespace(logprob=-float(token)) for token in range(1, 21)}
            first = [{500: SimpleNamespace(logprob=-30.0), **best}]
            yield _output(first if sampling.logprobs else None, finished=False)
            last = [*(first if self.cumulative else []), {7: SimpleNamespace(logprob=0.0)}]
            yield _output(last if sampling.logprobs else None, finished=True, accounting=self.accounting)
        finally:
            self.closed += 1


def _output(
    logprobs: Any, finished: bool, accounting: Mapping[str, Any] | None = None, stop: str | None = None
) -> Any:
    token_ids = [next(iter(row)) for row in logprobs or ()]
    completion = SimpleNamespace(
        logprobs=logprobs,
        token_ids=token_ids,
        finish_reason="length" if finished else None,
        stop_reason=stop,
    )
    transfer = {"kintsugi": accounting} if accounting else None
    return SimpleNamespace(
        outputs=[completion], finished=finished, kv_transfer_params=transfer, num_cached_tokens=3
    )


class Noting:
    """Wants every request."""

    def __init__(self, positions: int = 2) -> None:
        self.positions = positions
        self.arrivals: list[int] = []
        self.marks: list[str] = []
        self.taken: list[tuple[Prompt, Generation]] = []

    def note_arrival(self, priority: int) -> None:
        self.arrivals.append(priority)

    def prepare_prompt(self, request_id: str, prompt: Prompt) -> Prompt:
        self.marks.append(request_id)
        return Prompt(prompt.token_ids, prompt.params, top_logprobs=20)

    def take(self, prompt: Prompt, generation: Generation) -> bool:
        self.taken.append((prompt, generation))
        return True


def sampling(params: KintsugiParams | None = KintsugiParams("acme"), **more: Any) -> Any:
    extra = None if params is None else {"kv_transfer_params": params.to_mapping()}
    values = {
        "n": 1,
        "logprobs": None,
        "logprob_token_ids": None,
        "structured_outputs": None,
        "stop": [],
        **more,
    }
    values.setdefault("output_kind", SimpleNamespace(name="DELTA"))
    return SimpleNamespace(extra_args=extra, **values)


def ask(client: WatchedClient, wanted: Any, pieces: int = 2) -> None:
    async def run() -> None:
        prompt = {"prompt_token_ids": [1, 2, 3]}
        async with aclosing(client.generate(prompt, wanted, "r")) as outputs:
            for _ in range(pieces):
                await anext(outputs)
            if pieces == 2:
                assert [one async for one in outputs] == []

    asyncio.run(run())


@pytest.mark.parametrize(("positions", "token_ids"), [(1, [500]), (2, [500, 7]), (3, [500, 7])])
@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_a_watcher_is_shown_the_best_of_as_many_positions_as_it_wants(
    positions: int, token_ids: list[int], kind: str
) -> None:
    client = WatchedClient(ScriptedClient(cumulative=kind == "CUMULATIVE"), LoadMeter())
    watcher = client.watcher = Noting(positions)
    wanted = sampling(output_kind=SimpleNamespace(name=kind))
    ask(client, wanted)
    assert wanted.logprobs == 20
    ((prompt, seen),) = watcher.taken
    assert list(prompt.token_ids) == [1, 2, 3]
    assert prompt.params is not None
    assert prompt.params.namespace == "acme"
    first = {token: -float(token) for token in range(1, 21)}
    assert seen.top_logprobs == [first, {7: 0.0}][:positions], "without the drawn one of the first"
    assert (seen.token_ids, seen.accounting, seen.finish_reason) == (token_ids, ACCOUNTING, "length")


@pytest.mark.parametrize(
    "wanted",
    [
        sampling(None),
        sampling(KintsugiParams("acme", Op.OFF)),
        sampling(KintsugiParams("acme", Op.SAVE, (Span(0, 2),))),
        sampling(KintsugiParams("acme", ratio=0.4)),
        sampling(KintsugiParams("acme", selector=SelectorName.HKVD)),
        sampling(n=2),
        sampling(logprobs=0),
        sampling(logprobs=3),
        sampling(logprob_token_ids=[5]),
        sampling(structured_outputs=SimpleNamespace(choice=["yes", "no"])),
    ],
)
def test_what_cannot_be_compared_with_what_was_calibrated_is_left_alone(
    wanted: Any,
) -> None:
    client, watcher = WatchedClient(ScriptedClient(), LoadMeter()), Noting()
    client.watcher = watcher
    before = wanted.logprobs
    ask(client, wanted)
    assert wanted.logprobs == before
    assert watcher.taken == []


@pytest.mark.parametrize("spans", [None, (Span(0, 2), Span(2, 3))])
def test_a_watcher_knows_the_chunks_of_a_prompt(spans: tuple[Span, ...] | None) -> None:
    client, watcher = WatchedClient(ScriptedClient(), LoadMeter()), Noting()
    client.watcher = watcher
    ask(client, sampling(KintsugiParams("acme", spans=spans)))
    ((prompt, _),) = watcher.taken
    assert prompt.params == KintsugiParams("acme", spans=spans)


@pytest.mark.parametrize(("max_logprobs", "watched"), [(20, True), (-1, True), (19, False)])
def test_no_more_logprobs_are_asked_for_than_the_engine_gives(max_logprobs: int, watched: bool) -> None:
    client, watcher = WatchedClient(ScriptedClient(max_logprobs), LoadMeter()), Noting()
    client.watcher = watcher
    ask(client, sampling())
    assert bool(watcher.taken) is watched


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_what_is_not_the_models_own_logprobs_is_shown_to_nobody(mode: str) -> None:
    client, watcher = WatchedClient(ScriptedClient(mode=mode), LoadMeter()), Noting()
    client.watcher = watcher
    wanted = sampling()
    ask(client, wanted)
    assert wanted.logprobs is None
    assert watcher.taken == []


def test_callers_do_not_choose_whether_they_are_looked_at() -> None:
    client, watcher = WatchedClient(ScriptedClient(), LoadMeter()), Noting()
    client.watcher = watcher
    for _ in range(2):
        ask(client, sampling())
    assert len(watcher.taken) == 2
    assert len({"r", *watcher.marks}) == 3, "of one request id"


def test_without_a_watcher_or_an_end_nobody_is_shown_anything() -> None:
    scripted, watcher = ScriptedClient(), Noting()
    client = WatchedClient(scripted, LoadMeter())
    wanted = sampling()
    ask(client, wanted)
    assert wanted.logprobs is None
    client.watcher = watcher
    ask(client, sampling(), pieces=1)
    assert watcher.taken == []
    assert scripted.closed == 2, "closing reaches the engine"


@pytest.mark.parametrize(
    ("accounting", "noted"),
    [
        ({"outcome": "failed", "reason": "weights_changed: load_weights was called"}, True),
        ({"outcome": "declined", "reason": "sliding_window: of this prompt alone"}, False),
        ({"outcome": "blended", "reason": None}, False),
        (None, False),
    ],
)
def test_an_answer_that_tells_of_changed_weights_is_remembered(
    accounting: dict[str, Any] | None, noted: bool
) -> None:
    scripted = ScriptedClient(accounting=accounting)
    client = WatchedClient(scripted, LoadMeter())
    ask(client, sampling())
    scripted.accounting = ACCOUNTING
    ask(client, sampling())
    reason = accounting["reason"] if accounting and noted else None
    assert client.weights_changed == reason


class StoppedClient:
    """Ends an answer with a stop string. What vLLM's core tells of it comes with the first token, or a moment
    later."""

    def __init__(self, pieces: int, moment_s: float = 0.0, stop: str | None = "x") -> None:
        self.model_config = ScriptedClient().model_config
        self.logger_manager = SimpleNamespace(stat_loggers=[])
        self.pieces, self.moment_s, self.stop = pieces, moment_s, stop

    def tell(self, sampling: Any) -> None:
        (logger,) = self.logger_manager.stat_loggers
        logger.record(None, None)
        told = {TOLD: {"another": {}, (sampling.extra_args or {}).get(TICKET): ACCOUNTING}}
        for counted in (None, {}, told, told):  # each answer of several has the ticket
            logger.record(SimpleNamespace(kv_connector_stats=counted), None, engine_idx=0)

    async def generate(self, prompt: Any, sampling: Any, *args: Any) -> AsyncGenerator[Any, None]:
        if self.moment_s:
            asyncio.get_running_loop().call_later(self.moment_s, self.tell, sampling)
        for number in range(1, self.pieces + 1):
            is_last = number == self.pieces
            yield _output(None, finished=is_last, stop=self.stop if is_last else None)
            if number == 1 and not self.moment_s:
                self.tell(sampling)


async def last_of(client: WatchedClient, wanted: Any) -> Any:
    async for output in client.generate({"prompt_token_ids": [1]}, wanted, "r"):
        last = output
    return last.kv_transfer_params


@pytest.mark.parametrize(("pieces", "moment_s"), [(2, 0.0), (3, 0.0), (1, 0.01)])
def test_an_answer_that_a_stop_string_ends_has_its_accounting(pieces: int, moment_s: float) -> None:
    """vLLM aborts the request in its core, and drops what that says of it."""

    async def run() -> None:
        client = WatchedClient(StoppedClient(pieces, moment_s), LoadMeter())
        assert await last_of(client, sampling(stop=["x"])) == {"kintsugi": ACCOUNTING}
        assert not client._told._expected

    asyncio.run(run())


@pytest.mark.parametrize(
    "wanted",
    [sampling(), sampling(None, stop=["x"]), sampling(KintsugiParams("acme", Op.OFF), stop=["x"])],
)
def test_nothing_is_told_of_who_has_no_stop_string_or_nothing_of_ours(wanted: Any) -> None:
    async def run() -> None:
        client = WatchedClient(StoppedClient(2), LoadMeter())
        assert await last_of(client, wanted) is None
        assert TICKET not in (wanted.extra_args or {})

    asyncio.run(run())


def test_a_ticket_is_no_callers_to_choose() -> None:
    """With a stop string it gets another one, and without it none."""

    async def run() -> None:
        for stop in ([], ["x"]):
            wanted = sampling(stop=stop)
            wanted.extra_args[TICKET] = "mine"
            await last_of(WatchedClient(StoppedClient(2), LoadMeter()), wanted)
            assert wanted.extra_args.get(TICKET) != "mine"
            assert (TICKET in wanted.extra_args) == bool(stop)

    asyncio.run(run())


def test_an_answer_that_something_else_ends_waits_for_nothing() -> None:
    async def run() -> None:
        began_s = time.monotonic()
        aborted = StoppedClient(1, moment_s=60.0, stop=None)
        assert await last_of(WatchedClient(aborted, LoadMeter()), sampling(stop=["x"])) is None
        assert time.monotonic() - began_s < TOLD_S

    asyncio.run(run())


def test_an_engine_that_tells_nothing_delays_a_first_token_by_a_moment_and_no_other() -> None:
    async def run() -> None:
        began_s = time.monotonic()
        for pieces, waits in ((2, False), (1, True)):
            silent = StoppedClient(pieces, moment_s=60.0)
            assert await last_of(WatchedClient(silent, LoadMeter()), sampling(stop=["x"])) is None
            assert (time.monotonic() - began_s >= TOLD_S) == waits

    asyncio.run(run())


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_request_counts_as_load_until_its_answer_ends(pieces: int) -> None:
    load = LoadMeter()
    client = WatchedClient(ScriptedClient(), load)

    async def run() -> None:
        async with aclosing(client.generate({"prompt_token_ids": [1, 2, 3]}, sampling(), "r")) as outputs:
            assert load.stats().running == 0
            for _ in range(pieces):
                await anext(outputs)
                assert (load.stats().running, load.stats().waiting) == (1, 0)

    asyncio.run(run())
    assert load.stats().running == 0


class PrefillingClient:
    """Answers each pass with distributions that name their position: token 1000 + position is the best.

    vLLM's two model runners report prompt logprobs differently: for all of the prompt, or from the first
    token that was not found in the prefix cache.
    """

    def __init__(self, cached: int, whole_prompt: bool, prefix_cache: bool = True) -> None:
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=prefix_cache))
        self.cached = cached
        self.whole_prompt = whole_prompt
        self.passes: list[tuple[list[int], str, Any]] = []

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, priority: int
    ) -> AsyncGenerator[Any, None]:
        token_ids = prompt["prompt_token_ids"]
        self.passes.append((token_ids, prompt["cache_salt"], sampling))
        rows = [_naming(position) for position in range(1, len(token_ids))]
        if not self.whole_prompt:
            rows = rows[self.cached :]
        completion = SimpleNamespace(
            logprobs=[_naming(len(token_ids))], token_ids=[1000 + len(token_ids)], finish_reason="length"
        )
        yield SimpleNamespace(
            outputs=[completion],
            finished=True,
            prompt_logprobs=[None, *rows] if sampling.prompt_logprobs else None,
            kv_transfer_params={"kintsugi": {"pass": len(self.passes)}},
            num_cached_tokens=0,
        )


def _naming(position: int) -> dict[int, Any]:
    likely = {1000 + position: -0.1, 1: -3.0, 2: -4.0, 3: -9.0}
    return {token: SimpleNamespace(logprob=logprob) for token, logprob in likely.items()}


def prefilled(client: PrefillingClient, length: int, forced: tuple[int, ...] | None) -> Generation:
    pytest.importorskip("vllm")
    prompt = Prompt(list(range(length)), None, cache_salt="acme", max_tokens=1, top_logprobs=3, forced=forced)
    return asyncio.run(prefill_in_full(client, prompt, "r", 7))


@pytest.mark.parametrize("whole_prompt", [True, False])
@pytest.mark.parametrize("forced", [(41, 42), (41, 42, 43, 44, 45)])
def test_a_full_prefill_along_an_answer_takes_two_passes(whole_prompt: bool, forced: tuple[int, ...]) -> None:
    client = PrefillingClient(cached=16, whole_prompt=whole_prompt)
    full = prefilled(client, 20, forced)
    assert [max(step, key=lambda token: step[token]) for step in full.top_logprobs] == [
        1020 + position for position in range(len(forced))
    ]
    assert {len(step) for step in full.top_logprobs} == {3}
    assert full.token_ids == list(forced)
    (first, salt, fresh), (second, same_salt, rest) = client.passes
    assert (first, second) == (list(range(20)), [*range(20), *forced[:-1]])
    assert salt == same_salt != "acme", "nobody else's blocks are read, and nobody reads these"
    assert (fresh.skip_reading_prefix_cache, rest.skip_reading_prefix_cache) == (True, False)
    assert (fresh.prompt_logprobs, rest.prompt_logprobs) == (None, 3)


@pytest.mark.parametrize(("forced", "prefix_cache"), [(None, True), ((41, 42), False)])
def test_the_first_position_alone_takes_one_pass(forced: tuple[int, ...] | None, prefix_cache: bool) -> None:
    client = PrefillingClient(0, whole_prompt=True, prefix_cache=prefix_cache)
    full = prefilled(client, 20, forced)
    assert len(client.passes) == len(full.top_logprobs) == len(full.token_ids) == 1


@pytest.mark.parametrize("whole_prompt", [True, False])
@pytest.mark.parametrize("forced", [(41,), (41, 42, 43)])
def test_a_trial_along_an_answer_takes_one_pass(whole_prompt: bool, forced: tuple[int, ...]) -> None:
    pytest.importorskip("vllm")
    client = PrefillingClient(cached=19, whole_prompt=whole_prompt)
    trial = make_trial(Selection(0.4))
    prompt = Prompt(list(range(20)), KintsugiParams("acme", trial=trial), top_logprobs=3, forced=forced)
    blend = asyncio.run(blend_trial(client, prompt, "r", 7))
    found = [max(step, key=lambda token: step[token]) for step in blend.top_logprobs]
    assert found == [1020 + position for position in range(len(forced))]
    assert (blend.accounting, blend.token_ids) == ({"pass": 1}, list(forced))
    ((token_ids, salt, asked),) = client.passes
    assert (token_ids, salt) == ([*range(20), *forced[:-1]], "acme")
    sent = KintsugiParams.from_mapping(asked.extra_args["kv_transfer_params"]["kintsugi"])
    assert sent.trial == replace(trial, answer_tokens=len(forced) - 1)
    assert asked.prompt_logprobs == (3 if len(forced) > 1 else None)
    assert not asked.skip_reading_prefix_cache, "such a request would be prefilled in full"
