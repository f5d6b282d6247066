"""The stream: which requests are measured, what their twins prove, and when blending closes."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable

import pytest

from kintsugi.core.accounting import Accounting, ChunkAudit, Outcome
from kintsugi.core.documents import FUTURE_MAX
from kintsugi.core.errors import Unavailable
from kintsugi.core.evidence import POSITIONS_MAX, Quality, Tally
from kintsugi.core.gate import LEARNING, UNMEASURED, GateState
from kintsugi.core.plan import Selection, selection_of
from kintsugi.core.report import LADDER, Cell, Closing, Report, ServedBlend, source_of
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span, TokenIds
from kintsugi.engine.auditing import StoredCopy
from kintsugi.engine.local import Generation, Prompt
from kintsugi.quality import stream
from kintsugi.quality.metrics import TOP_LOGPROBS
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.stream import (
    HOPELESS_PAIRS,
    PENDING_MAX,
    PENDING_S,
    Stream,
    choose_trials,
    compare_steps,
    count_positions,
)
from tests.fakes.reports import (
    AT,
    BINDING,
    CELL,
    ENOUGH_PAIRS,
    SAFEST,
    SOURCE,
    VERSIONS,
    entry_of,
    open_report,
    part_of,
    report_of,
)
from tests.unit.quality.fakes import distribution

NEXT, THIRD = LADDER[1], LADDER[2]
PARAMS = KintsugiParams("tenant", spans=(Span(0, 400), Span(400, 800)))
PROMPT = Prompt(range(1200), PARAMS)
SPACE = ChunkSpace(ModelFingerprint.of({"model": "fake"}), "tenant", (0,))
ELSEWHERE = Closing("elsewhere", AT, SOURCE)
DECLINED: dict[str, object] = {"outcome": "declined", "reason": f"{LEARNING}: 3 of about 40 prompts"}


def blended(selection: Selection = SAFEST) -> dict[str, object]:
    return {
        "outcome": "blended",
        "selector": str(selection.selector),
        "ratio": selection.ratio,
        "cost": selection.ratio,
        "chunks_hit": 5,
        "tokens_hit": 1000,
    }


def answer(accounting: dict[str, object] | None, token: int = 5, length: int = 3) -> Generation:
    return Generation([5] * length, top_logprobs=[distribution(token, 0.9)] * length, accounting=accounting)


class FakeTwins:
    """Blends answer ``blend_token``, full prefills 5, and audits find ``error``."""

    priority = 9

    def __init__(self) -> None:
        self.calls: list[tuple[str, Prompt]] = []
        self.blend_token = 5
        self.is_blended = True
        self.failure: Exception | None = None
        self.copies = [StoredCopy(SPACE, ChunkKey.of(SPACE, [one]), TokenIds.of([one])) for one in range(3)]
        self.error = 0.0
        self.deleted: list[ChunkKey] = []
        self.exchanged = 0
        self.of_others: list[ServedBlend] = []
        self.arrival: Callable[[], None] | None = None
        """Called once, while the engine computes what `arrives_in` names."""
        self.arrives_in = "blend"
        self.on_done: Callable[[], None] = lambda: None
        """Called whenever the engine has computed something."""

    async def _call(self, kind: str, prompt: Prompt) -> None:
        self.calls.append((kind, prompt))
        if self.arrival is not None and kind == self.arrives_in:
            arrive, self.arrival = self.arrival, None
            arrive()
        await asyncio.sleep(0)
        self.on_done()

    async def run(self, prompt: Prompt) -> Generation:
        if prompt.params is None:
            await self._call("full", prompt)
            return answer(None, length=len(prompt.forced or [0]))
        if prompt.params.op is Op.AUDIT:
            await self._call("audit", prompt)
            audit = ChunkAudit("raw", [0.0, 0.0], [0.0, self.error])
            return answer(Accounting(Outcome.AUDITED, audit=audit).to_mapping())
        await self._call("blend", prompt)
        if self.failure is not None:
            raise self.failure
        assert prompt.params.trial is not None
        accounting: dict[str, object] = (
            blended(selection_of(prompt.params.trial)) if self.is_blended else {"outcome": "declined"}
        )
        return answer(accounting, self.blend_token, len(prompt.forced or [0]))

    async def save_missing(self, prompt: Prompt) -> None:
        await self._call("save", prompt)

    async def stored_copies(self, prompt: Prompt) -> list[StoredCopy]:
        return [one for one in self.copies if one.key not in self.deleted]

    async def delete(self, space: ChunkSpace, key: ChunkKey) -> None:
        self.deleted.append(key)

    async def exchange(self, keeper: ReportKeeper) -> list[ServedBlend]:
        self.exchanged += 1
        found, self.of_others = self.of_others, []
        keeper.exchange()
        return found

    @property
    def trials(self) -> list[Selection]:
        """The configurations of all blends."""
        return [selection_of(prompt.params.trial) for kind, prompt in self.calls if kind == "blend"]  # type: ignore

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.calls]


class Life:
    """A stream, and its engine with a gate that reads the keeper's report at once."""

    def __init__(self, report: Report | None = None, versions: str = VERSIONS) -> None:
        self.now_s = 0.0
        self.twins = FakeTwins()
        self.keeper = ReportKeeper(None, BINDING, versions, Quality.BALANCED, clock=lambda: self.now_s)
        if report is not None:
            self.keeper.report = report
        self.stream = Stream(self.twins, self.keeper, self.gate, lambda: self.now_s)
        self._requests = 0

    def gate(self) -> GateState:
        return GateState(report=self.keeper.report, versions=self.keeper._part.versions)

    def serve(self, accounting: dict[str, object], prompt: Prompt = PROMPT, **more: int) -> bool:
        """Answer a request with this accounting; return whether it waits for its twins."""
        self._requests += 1
        # No prompt is sent twice, unless a test does.
        prompt = dataclasses.replace(prompt, token_ids=[*prompt.token_ids[:-1], self._requests])
        return self.send(accounting, prompt, **more)

    def send(self, accounting: dict[str, object], prompt: Prompt, **more: int) -> bool:
        marked = self.stream.prepare_prompt(f"request {self._requests}", prompt)
        return self.stream.take(marked, answer(accounting, **more))

    def run(self) -> None:
        asyncio.run(self.stream.run_one())

    def tally(self, selection: Selection = SAFEST, cell: Cell = CELL) -> Tally:
        return self.keeper.report.tally(cell, SOURCE, selection)

    @property
    def report(self) -> Report:
        return self.keeper.report


# --- Comparing


def test_distributions_are_compared_where_both_have_them() -> None:
    same, other = distribution(5, 0.9), distribution(4, 0.9)
    found = compare_steps([same] * 4, [same, other, same], 3)
    assert found.changed == pytest.approx(1 / 3)
    assert found.kl > 1
    assert compare_steps([same] * 3, [same, same, other], 2).changed == 0, "only so many are compared"
    tie, other_way = {4: math.log(0.39), 5: math.log(0.4)}, {4: math.log(0.4), 5: math.log(0.39)}
    assert compare_steps([tie], [other_way], 1).changed == 0, "a near tie"


@pytest.mark.parametrize(
    ("length", "steps", "finish_reason", "positions"),
    [
        (3, 3, "length", 3),
        (3, 3, "stop", 2),
        (1, 1, "stop", 1),
        (5, 3, None, 3),
        (99, 99, "length", POSITIONS_MAX),
        (33, 33, "stop", 32),
    ],
)
def test_the_token_that_ends_an_answer_is_not_compared(
    length: int, steps: int, finish_reason: str | None, positions: int
) -> None:
    one = Generation([5] * length, top_logprobs=[{5: 0.0}] * steps, finish_reason=finish_reason)
    assert count_positions(one) == positions


# --- What is measured


def test_a_full_prefill_gets_blends_along_its_answer() -> None:
    life = Life()
    assert life.serve(DECLINED)
    life.run()
    assert life.twins.kinds == ["save", *["blend"] * len(LADDER)]
    assert life.twins.trials == [*LADDER]
    trial = life.twins.calls[1][1]
    assert trial.forced == [5, 5, 5]
    assert trial.top_logprobs == TOP_LOGPROBS
    assert life.tally().pairs == life.tally(NEXT).pairs == 1
    assert (life.tally().loss, life.tally().cost) == (0.0, SAFEST.ratio)
    assert life.tally().sizes == ((7, 1),), "200 tokens a chunk"
    assert life.stream.counts.pairs == len(LADDER)


def test_with_more_answers_waiting_one_configuration_is_tried() -> None:
    life = Life()
    life.serve(DECLINED)
    life.serve(DECLINED)
    life.run()
    assert life.twins.trials == [SAFEST]


def test_a_prompt_that_no_blend_takes_is_no_pair() -> None:
    life = Life()
    life.twins.is_blended = False
    life.serve(DECLINED)
    life.run()
    assert life.twins.kinds == ["save", "blend"], "no other configuration is tried"
    assert life.stream.counts.pairs == life.tally().pairs == 0


def test_a_failed_twin_is_the_worst_loss() -> None:
    life = Life()
    life.twins.failure = Unavailable("the engine was busy for 300 s")
    life.serve(DECLINED)
    life.run()
    assert life.tally().lost == life.tally().pairs == 1
    assert (life.stream.counts.failed, life.stream.counts.pairs) == (len(LADDER), 0)


@pytest.mark.parametrize(
    ("accounting", "is_measured"),
    [
        (DECLINED, True),
        (DECLINED | {"reason": "drift: wrong answers"}, True),
        (DECLINED | {"reason": "blending_is_slower: by 3 ms"}, True),
        (DECLINED | {"reason": "prompt_logprobs: need a full prefill"}, False),
        (DECLINED | {"reason": None}, False),
        ({"outcome": "saved"}, False),
        ({}, False),
    ],
)
def test_full_prefills_are_measured_where_a_blend_was_not_allowed(
    accounting: dict[str, object], is_measured: bool
) -> None:
    assert Life().serve(accounting) is is_measured


def test_a_prompt_that_is_sent_again_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "REMEMBERED_MAX", 2)
    life = Life()
    other = dataclasses.replace(PROMPT, params=dataclasses.replace(PARAMS, namespace="other"))
    assert [life.send(DECLINED, one) for one in (PROMPT, PROMPT, other)] == [True, False, True]
    assert life.serve(DECLINED)
    assert life.send(DECLINED, PROMPT), "forgotten"


@pytest.mark.parametrize(
    "params", [dataclasses.replace(PARAMS, no_store=True), dataclasses.replace(PARAMS, learn=False)]
)
def test_a_request_or_a_namespace_may_be_left_out(params: KintsugiParams) -> None:
    life = Life()
    left_out = dataclasses.replace(PROMPT, params=params)
    assert life.stream.prepare_prompt("a", left_out) is left_out
    plain = dataclasses.replace(PROMPT, params=None)
    assert life.stream.prepare_prompt("a", plain) is plain
    assert not life.serve(DECLINED, left_out)


def test_where_nothing_is_tested_nothing_is_measured() -> None:
    life = Life()
    stream = Stream(life.twins, life.keeper, GateState)
    assert stream.prepare_prompt("a", PROMPT) is PROMPT


def test_a_measured_prompt_is_dated_so_that_a_later_erasure_removes_its_chunks() -> None:
    life = Life()
    marked = life.stream.prepare_prompt("a", PROMPT)
    assert marked.params is not None
    assert marked.params.asked_at_s > FUTURE_MAX.total_seconds()
    dated = dataclasses.replace(PROMPT, params=dataclasses.replace(PARAMS, asked_at_s=7.0))
    kept = life.stream.prepare_prompt("a", dated)
    assert kept.params is not None
    assert kept.params.asked_at_s == 7.0


def test_at_most_so_many_answers_wait() -> None:
    life = Life()
    marked = life.stream.prepare_prompt("early", PROMPT)
    assert [life.serve(DECLINED) for _ in range(PENDING_MAX + 2)] == [True] * PENDING_MAX + [False] * 2
    assert life.stream.prepare_prompt("late", PROMPT) is PROMPT
    assert not life.stream.take(marked, answer(DECLINED)), "the last place was taken meanwhile"
    assert life.stream.pending == PENDING_MAX


def test_an_answer_that_waited_too_long_is_dropped_and_counted_by_length() -> None:
    life = Life()
    life.serve(DECLINED)
    life.now_s = PENDING_S / 2
    life.serve(DECLINED)
    life.now_s = PENDING_S + 1
    life.run()
    assert life.stream.counts.dropped == {1: 1}
    assert life.tally().pairs == 1, "the second one"
    assert life.stream.pending == 0
    life.serve(DECLINED)
    life.now_s *= 3
    life.stream.drop_late()
    assert (life.stream.pending, life.stream.counts.dropped.total()) == (0, 2)
    life.run()
    assert life.tally().pairs == 1


def test_a_configuration_beyond_the_limit_is_no_longer_measured() -> None:
    bad = report_of(part_of(entry_of(pairs=HOPELESS_PAIRS, loss=0.5)))
    assert not Life(bad).serve(DECLINED)
    few = report_of(part_of(entry_of(pairs=HOPELESS_PAIRS - 1, loss=0.5)))
    assert Life(few).serve(DECLINED)
    elsewhere = Prompt(range(400), PARAMS)
    assert Life(bad).serve(DECLINED, elsewhere), "another cell"


def test_trials_follow_what_passed() -> None:
    def trials(report: Report, most: int | None = None) -> list[Selection]:
        return choose_trials(GateState(report=report, versions=VERSIONS), CELL, SOURCE, most)

    assert trials(report_of()) == [*LADDER]
    assert trials(open_report()) == [*LADDER[1:]]
    beyond = entry_of(pairs=HOPELESS_PAIRS, loss=0.5, selection=THIRD)
    assert trials(open_report().with_part(part_of(beyond, writer="other"), AT)) == [NEXT]
    assert trials(open_report(), 1) == [NEXT]
    assert trials(open_report(rungs=len(LADDER))) == []
    assert choose_trials(GateState(), CELL, SOURCE, 2) == []


# --- Opening


def test_a_stream_of_equal_answers_opens_and_publishes_at_once() -> None:
    life = Life()
    while not life.gate().allowance(CELL, SOURCE):
        life.serve(DECLINED)
        exchanged = life.twins.exchanged
        life.run()
        assert life.tally().pairs < 60
    assert life.twins.exchanged > exchanged
    (part,) = life.report.parts
    assert [one.selection for one in part.openings][:1] == [SAFEST]


def test_a_stream_of_other_answers_never_opens() -> None:
    life = Life()
    life.twins.blend_token = 4
    while life.serve(DECLINED):
        life.run()
    assert life.tally().lost == life.tally().pairs == HOPELESS_PAIRS
    assert life.gate().allowance(CELL, SOURCE) is None


def test_evidence_is_exchanged_before_the_first_pair_and_then_now_and_again() -> None:
    life = Life()
    for _ in range(3):
        life.serve(DECLINED)
        life.run()
    assert life.twins.exchanged == 1
    life.now_s = 30.0
    life.serve(DECLINED)
    life.run()
    assert life.twins.exchanged == 2


def test_a_prompt_with_unmeasured_chunks_is_measured_with_what_is_open() -> None:
    life = Life(open_report())
    assert life.serve(DECLINED | {"reason": f"{UNMEASURED}: chunks of about 900 tokens"})
    life.run()
    assert life.twins.trials == [SAFEST]


# --- While open


def test_a_blend_gets_a_full_prefill_an_audit_and_cheaper_blends() -> None:
    life = Life(open_report())
    assert life.serve(blended())
    assert life.stream.is_next_blend
    life.run()
    assert life.twins.kinds == ["full", "audit", *["blend"] * (len(LADDER) - 1)]
    full = life.twins.calls[0][1]
    assert (full.params, full.forced) == (None, [5, 5, 5])
    assert life.twins.trials == [*LADDER[1:]]
    assert life.tally().pairs == ENOUGH_PAIRS + 1
    assert life.tally(NEXT).pairs == life.tally(THIRD).pairs == 1
    assert life.stream.counts.audited == 1


@pytest.mark.parametrize(
    ("served", "counted"),
    [
        (SAFEST, SAFEST),
        (NEXT, NEXT),
        (dataclasses.replace(NEXT, ratio=0.6), None),
        (dataclasses.replace(SAFEST, ratio=0.9), None),
        (THIRD, None),
    ],
)
def test_a_blend_counts_for_the_configuration_that_it_was_served_with(
    served: Selection, counted: Selection | None
) -> None:
    life = Life(open_report(rungs=2))
    life.serve(blended(served))
    life.run()
    for one in LADDER[:2]:
        assert life.tally(one).pairs == ENOUGH_PAIRS + (one == counted)


def test_where_nothing_cheaper_is_left_few_blends_are_measured() -> None:
    life = Life(open_report(rungs=len(LADDER)))
    measured = 0
    for number in range(3000):
        life.now_s = number / 10
        if life.serve(blended(LADDER[-1])):
            measured += 1
            life.run()
    assert 3 <= measured <= 60, "one a minute, or half a percent"


def test_on_probation_a_quarter_of_the_blends_is_measured() -> None:
    life = Life(open_report(rungs=len(LADDER)), versions="kintsugi 2")
    measured = 0
    for number in range(400):
        life.now_s = number / 10
        if life.serve(blended(LADDER[-1])):
            measured += 1
            life.stream._pending.clear()
    assert 60 <= measured <= 140


def damaged_life(report: Report, versions: str = VERSIONS) -> Life:
    life = Life(report, versions)
    life.twins.error = 1e6
    return life


def test_a_damaged_chunk_is_deleted_and_two_close_for_all() -> None:
    life = damaged_life(open_report())
    life.serve(blended())
    life.run()
    assert len(life.twins.deleted) == life.stream.counts.damaged == 1
    assert not life.report.closings, "one may come from a bad disk"
    life.serve(blended())
    life.run()
    assert len(life.twins.deleted) == 2
    closings = life.report.closings
    closing = next(iter(closings))
    assert (len(closings), closing.source) == (1, "")
    assert "2 audited chunks differ from what the model computes" in closing.reason
    assert life.gate().allowance(CELL, SOURCE) is None
    assert life.stream.counts.closings == 1


def test_on_probation_the_first_damaged_chunk_closes() -> None:
    life = damaged_life(open_report(), "kintsugi 2")
    while not life.serve(blended()):
        pass
    life.run()
    assert [one.source for one in life.report.closings] == [""]


def test_blends_that_become_wrong_trip_their_namespace_alone() -> None:
    other = entry_of(source_of("other"), slot=2)
    life = Life(report_of(part_of(entry_of(), other)))
    runs = 0
    while not life.report.closings:
        life.serve(blended(), token=4)
        life.run()
        runs += 1
        assert runs < 30
    (closing,) = life.report.closings
    assert closing.source == SOURCE
    assert "the mean loss of served blends is above 0." in closing.reason
    assert life.gate().allowance(CELL, SOURCE) is None
    assert life.gate().allowance(CELL, source_of("other")) is not None
    before = life.tally().pairs
    assert life.serve(DECLINED | {"reason": f"drift: {closing.reason}"}), "it learns anew"
    life.run()
    assert life.tally().pairs == before + 1


def test_losses_that_other_engines_measured_trip_too() -> None:
    life = Life(open_report())
    life.twins.of_others = [ServedBlend(SOURCE, (1.0, 1.0, 1.0), (0.125, 0.25, 0.25))] * 30
    life.serve(blended())
    life.run()
    assert [one.source for one in life.report.closings] == [SOURCE]


def test_a_closing_by_another_engine_restarts_the_trip_test() -> None:
    life = Life(open_report())
    life.twins.of_others = [ServedBlend(SOURCE, (1.0, 1.0, 1.0), (0.125, 0.25, 0.25))] * 4
    life.serve(blended())
    life.run()
    assert life.report.closings == ()
    closed = open_report().with_part(
        part_of(
            entry_of(epoch=1, pairs=2 * ENOUGH_PAIRS),
            writer="other",
            closings=[ELSEWHERE],
        ),
        AT,
    )
    life.keeper.report = closed
    life.now_s = 60.0
    life.twins.of_others = [ServedBlend(SOURCE, (1.0, 1.0, 1.0), (0.125, 0.25, 0.25))] * 4
    life.serve(blended())
    life.run()
    assert life.report.closings == (ELSEWHERE,)
