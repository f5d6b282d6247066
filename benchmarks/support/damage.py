"""Measures how soon an engine notices seven kinds of wrong KV whose digests are right.

All served blends are measured by `quality.stream`, twice: once only answers are compared, once only stored
chunks are audited. A kind of damage counts if exact match falls by at least `FALL_MIN` points. It is caught
if one of the two closes blending within `SERVED_MAX` blends. Sound chunks are audited to see how far they
stay within their tolerance. It also tests three mismatches of checkpoints and evidence, which fingerprints or
the trip test should stop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.codecs import SERVED
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import Setup, bench_of, exact_mean, trained
from benchmarks.support.rewriting import Stored, put_back, stored
from kintsugi.core.evidence import Quality
from kintsugi.core.gate import GateState
from kintsugi.core.layout import ChunkManifest, Codec
from kintsugi.core.plan import Selection
from kintsugi.core.report import ServedBlend
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.engine.auditing import StoredCopy, find_stored_copies
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from kintsugi.fusor.audit import tolerance_of
from kintsugi.quality.measure import NAMESPACE, Bench, Case, measure_selection
from kintsugi.quality.metrics import TOP_LOGPROBS
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.stream import Stream
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store
from tests.fakes.reports import passing_report

SERVED_MAX = 300
UNTIL_MAX = 200
"""Number of served blends within which damage that counts must be caught."""
FALL_MIN = 3.0
"""Points of exact match."""
AUDITED = 1000
"""Number of undamaged chunks to audit; a tenth of them also in every 8-bit codec."""
CLEAN_MAX = 0.5
"""Largest share of its codec's tolerance that a sound chunk may reach."""
NOISE = 0.2
"""Standard deviation of the noise in the noisy model's weights, as a share of each tensor's own."""
QUALITY = Quality.BALANCED
STALE = Selection(0.15, check_layer=1)
"""Loses more than the limit on the testbed's questions."""

Damage = Callable[[int, int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Number of the chunk, layer, K before RoPE, V -> K and V."""


def rolled(
    number: int, layer: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token has its neighbour's KV."""
    return key.roll(1, 0), value.roll(1, 0)


def zeroed(num_layers: int) -> Damage:
    """The middle layer is lost."""

    def damage(
        number: int, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (0 * key, 0 * value) if layer == num_layers // 2 else (key, value)

    return damage


def damages(num_layers: int) -> dict[str, Damage]:
    return {
        "tokens_rolled": rolled,
        "heads_rolled": lambda number, layer, key, value: (key.roll(1, 1), value.roll(1, 1)),
        "tenth_rolled": lambda number, layer, key, value: (
            (key, value) if number % 10 else rolled(number, layer, key, value)
        ),
        "values_x1.5": lambda number, layer, key, value: (key, 1.5 * value),
        "layer_zeroed": zeroed(num_layers),
    }


@dataclass(frozen=True)
class Watched:
    """The effect of one kind of damage, and when it was noticed."""

    fall: float
    """Points of exact match against undamaged blends of the same prompts."""
    by_answers: int | None
    """Served blends until the comparison of answers closed blending; None if it did not."""
    by_audits: int | None
    """The same for audits of stored chunks."""

    @property
    def until(self) -> int | None:
        return min((one for one in (self.by_answers, self.by_audits) if one is not None), default=None)

    @property
    def counts(self) -> bool:
        return self.fall >= FALL_MIN

    def __str__(self) -> str:
        caught = "NOT CAUGHT" if self.until is None else f"after {self.until}"
        return f"{self.fall:.1f} points, {caught} (answers {self.by_answers}, audits {self.by_audits})"


class LocalTwins:
    """The twins of an engine in this process; the report stays in memory. Either answers are compared, or
    stored chunks are audited: the full prefill of an audited blend is the blend itself."""

    priority = 0

    def __init__(self, running: LocalEngine, store: RamStore, audits: bool) -> None:
        self._running, self._store, self._audits = running, store, audits
        self.served: Generation | None = None
        """The blend that is measured."""

    async def run(self, prompt: Prompt) -> Generation:
        if self._audits and prompt.params is None:
            assert self.served is not None
            return self.served
        (answer,) = self._running.generate([prompt])
        return answer

    async def save_missing(self, prompt: Prompt) -> None:
        raise AssertionError("only blends are measured")

    async def stored_copies(self, prompt: Prompt) -> list[StoredCopy]:
        if not self._audits:
            return []
        assert prompt.params is not None
        space = self._running.space(NAMESPACE)
        return find_stored_copies(self._store, space, prompt.token_ids, prompt.params.spans)

    async def delete(self, space: ChunkSpace, key: ChunkKey) -> None:
        self._store.delete(space.namespace, [key])

    async def exchange(self, keeper: ReportKeeper) -> list[ServedBlend]:
        return []


def measure(setup: Setup) -> list[Figure]:
    """With `--quick`, only one kind of damage."""
    found, clean = _watch_damages(setup)
    undamaged = found.pop("undamaged")
    counted = [one for one in found.values() if one.counts]
    caught = sum(one.until is not None for one in counted) / len(counted)
    detail = ", ".join(f"{name}: {one}" for name, one in found.items())
    detail += f"; without damage {'nothing rings' if undamaged.until is None else f'FALSE ALARM {undamaged}'}"
    until = max(one.until or SERVED_MAX for one in counted)
    setup.details["damage"] = {name: dataclasses.asdict(one) for name, one in found.items()}
    holds = caught == 1.0 and undamaged.until is None
    figures = [
        Figure("damage_caught", caught, "", "1.0, no false alarm", holds, detail),
        Figure.at_most(
            "blends_until_caught",
            until,
            UNTIL_MAX,
            unit="blends",
            detail=f"worst of {len(counted)} that cost {FALL_MIN:g} points or more",
        ),
        clean,
    ]
    return figures if setup.quick else [*figures, _mismatches(setup)]


def _watch_damages(setup: Setup) -> tuple[dict[str, Watched], Figure]:
    """Measure the effect of each kind of damage, and the errors of undamaged chunks relative to their
    tolerance."""
    others = {} if setup.quick else {name: _frames_of(setup, alter) for name, alter in CHECKPOINTS.items()}
    url, store = _fresh_store()
    with trained(setup, url=url) as running:
        cases = _cases(running)
        keys = _save_one_by_one(running, store, cases)
        by_key = {chunk.manifest.key: chunk for chunk in stored(store)}
        sound = [by_key[key] for key in keys]
        bench = Bench(running, cases, max_tokens=1)
        before = exact_mean(measure_selection(bench, SERVED, range(len(cases))))
        clean = _clean_errors(setup, running, store, cases)
        found = {}
        for name, chunks in _kinds(setup, running, sound, others):
            for chunk in chunks:
                put_back(store, chunk, Codec.RAW)
            after = exact_mean(measure_selection(bench, SERVED, range(len(cases))))
            by_answers, by_audits = (_watch(running, store, cases, audits) for audits in (False, True))
            found[name] = Watched(100 * (before - after), by_answers, by_audits)
            say(f"{name}: {found[name]}")
    return found, clean


def _clean_errors(setup: Setup, running: LocalEngine, store: RamStore, cases: Sequence[Case]) -> Figure:
    """The largest error of sound chunks as a share of their codec's tolerance."""
    space = running.space(NAMESPACE)
    found = {
        chunk.key: chunk
        for case in cases
        for chunk in find_stored_copies(store, space, case.prompt.token_ids, case.prompt.spans)
    }
    by_key = {chunk.manifest.key: chunk for chunk in stored(store)}
    shares, details = [], []
    for codec in Codec:
        count = AUDITED if codec is Codec.RAW else AUDITED // 10
        audited = [*found.values()][: count // 10 if setup.quick else count]
        for chunk in audited:
            put_back(store, by_key[chunk.key], codec)
        worst = max(_worst_error(running, chunk) for chunk in audited)
        shares.append(worst / tolerance_of(codec))
        details.append(f"{codec.name.lower()} {worst:.4f} of {tolerance_of(codec):g} ({len(audited)} chunks)")
    say(f"sound chunks: {', '.join(details)}")
    return Figure.at_most(
        "audit_error_clean", max(shares), CLEAN_MAX, unit="of the tolerance", detail=", ".join(details)
    )


def _worst_error(running: LocalEngine, chunk: StoredCopy) -> float:
    (answer,) = running.generate([chunk.prompt])
    accounting = answer.accounting or {}
    assert accounting.get("outcome") == "audited", accounting
    return float(max(*accounting["audit"]["key_errors"], *accounting["audit"]["value_errors"]))


def _kinds(
    setup: Setup, running: LocalEngine, sound: Sequence[Stored], others: Mapping[str, Sequence[Stored]]
) -> Iterator[tuple[str, list[Stored]]]:
    """Measure every kind of damage, with all chunks damaged."""
    yield "undamaged", list(sound)
    for name, damage in damages(running.num_layers).items():
        yield name, [_damaged(chunk, number, damage) for number, chunk in enumerate(sound)]
        if setup.quick:
            return
    for name, theirs in others.items():
        pairs = zip(sound, theirs, strict=True)
        yield name, [dataclasses.replace(mine, frames=other.frames) for mine, other in pairs]


def _damaged(chunk: Stored, number: int, damage: Damage) -> Stored:
    """The chunk with other bytes, through a store of its own."""
    _, scratch = _fresh_store()
    put_back(scratch, chunk, Codec.RAW, lambda layer, key, value: damage(number, layer, key, value))
    (altered,) = stored(scratch)
    return altered


def _frames_of(setup: Setup, alter: Callable[[Path], None]) -> list[Stored]:
    """The chunks as another checkpoint computes them, in the order in which they are saved."""
    url, store = _fresh_store()
    with trained(_altered(setup, alter), url=url) as running:
        keys = _save_one_by_one(running, store, _cases(running))
    by_key = {chunk.manifest.key: chunk for chunk in stored(store)}
    return [by_key[key] for key in keys]


def _save_one_by_one(running: LocalEngine, store: RamStore, cases: Sequence[Case]) -> list[ChunkKey]:
    """Store the chunks of all cases. Returns their keys in the order in which they were put: the order is the
    same for every checkpoint, the keys are not."""
    keys: list[ChunkKey] = []
    put = store.put

    def note(manifest: ChunkManifest, *more: Any, **named: Any) -> bool:
        keys.append(manifest.key)
        return put(manifest, *more, **named)

    store.put = note  # type: ignore[method-assign]
    for chunk in dict.fromkeys(chunk.token_ids for case in cases for chunk in case.prompt.chunks):
        (saved,) = running.save(cases[0].prompt.prefix, [chunk], NAMESPACE)
        assert (saved.accounting or {}).get("outcome") == "saved", saved.accounting
    del store.put
    assert len(keys) == len(set(keys))
    return keys


def _mismatches(setup: Setup) -> Figure:
    found: Mapping[str, int | None] = {
        "rope_base": _another_checkpoint(setup, _other_rope),
        "another_checkpoint": _another_checkpoint(setup, _other_weights),
        "stale_evidence": _stale_evidence(setup),
    }
    caught = sum(until is not None for until in found.values()) / len(found)
    detail = ", ".join(
        f"{name}: {'NOT CAUGHT' if until is None else f'after {until}'}" for name, until in found.items()
    )
    return Figure.at_least("mismatches_caught", caught, 1.0, unit="", detail=detail)


def _cases(running: LocalEngine) -> list[Case]:
    """Tasks take turns."""
    count = -(-SERVED_MAX // len(testbed.TASKS))
    asked = testbed.questions(testbed.TASKS, testbed.WATCHED_FROM, count)
    return testbed.cases(running, asked)[:SERVED_MAX]


def _watch(
    running: LocalEngine,
    store: RamStore,
    cases: Sequence[Case],
    audits: bool,
    served: Selection = SERVED,
) -> int | None:
    """Serve blends, and measure all of them. Return how many were served until blending was closed; None if
    it never was.

    ``audits``: as in `LocalTwins`. The engine tests nothing itself, so that it goes on with ``served``,
    whatever the evidence is; the stream takes `SERVED` for what passed.
    """
    report = passing_report(running.binding, [SERVED], versions=running.versions)
    state = GateState(report=report, quality=QUALITY, versions=running.versions)
    twins = LocalTwins(running, store, audits)
    stream = Stream(twins, ReportKeeper(None, running.binding, running.versions, QUALITY), lambda: state)
    running.plan_with(served)
    for number, case in enumerate(cases):
        params = KintsugiParams(NAMESPACE, spans=case.prompt.spans)
        prompt = Prompt(case.prompt.token_ids, params, max_tokens=1, top_logprobs=TOP_LOGPROBS)
        (twins.served,) = running.generate([prompt])
        if (twins.served.accounting or {}).get("outcome") != "blended":
            return number
        assert stream.take(prompt, twins.served)
        asyncio.run(stream.run_one())
        if stream.counts.closings:
            return number + 1
    say(f"blending stays open: {stream.counts.pairs} blends compared, {stream.counts.audited} chunks audited")
    return None


def _fresh_store() -> tuple[str, RamStore]:
    url = f"ram://damage-{uuid.uuid4().hex[:8]}"
    store = open_store(url)
    assert isinstance(store, RamStore)
    return url, store


def _altered(setup: Setup, alter: Callable[[Path], None]) -> Setup:
    """The same with another checkpoint of the same shape."""
    folder = Path(tempfile.mkdtemp(prefix="kintsugi-altered-")) / "model"
    shutil.copytree(setup.model, folder)
    alter(folder)
    return dataclasses.replace(setup, model=folder)


def _another_checkpoint(setup: Setup, alter: Callable[[Path], None]) -> int | None:
    """Serve chunks of one checkpoint with an engine of another checkpoint of the same shape."""
    url, store = _fresh_store()
    with trained(setup, url=url) as running:
        binding, cases = running.binding, _cases(running)
        bench_of(running, cases)
    with trained(_altered(setup, alter), url=url) as running:
        assert running.binding != binding
        return _watch(running, store, cases, audits=False)


def _other_rope(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = 10_000.0
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = 10_000.0
    path.write_text(json.dumps(config))


def _other_weights(folder: Path) -> None:
    """The same shapes with other weights: each tensor's values are rolled by one row."""
    _rewrite_weights(folder, lambda tensor: tensor.roll(1, 0))


def _noisy_weights(folder: Path) -> None:
    """The same model, damaged a little."""
    torch.manual_seed(0)
    _rewrite_weights(folder, lambda tensor: tensor + NOISE * tensor.float().std() * torch.randn(tensor.shape))


def _rewrite_weights(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {name: change(tensor).to(tensor.dtype).contiguous() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


def _stale_evidence(setup: Setup) -> int | None:
    """A configuration that the evidence does not cover: an earlier check layer."""
    url, store = _fresh_store()
    with trained(setup, url=url) as running:
        cases = _cases(running)
        bench_of(running, cases)
        return _watch(running, store, cases, audits=False, served=STALE)


CHECKPOINTS: Mapping[str, Callable[[Path], None]] = {
    "noisy_model": _noisy_weights,
    "another_model": _other_weights,
}
"""Checkpoints whose chunks are stored under the keys of the serving model."""
