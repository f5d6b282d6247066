"""Seven ways in which stored KV can be wrong under right digests, and how soon shadowing notices each.

The engine is gated by a real calibration report and all its requests are shadowed, twice: once only answers
are compared, once only stored chunks are audited. A damage counts where exact match falls by at least
`FALL_MIN` points; it is caught where one of the two trips the report within `SHADOWED_MAX` requests. Sound
chunks are audited to see how far they stay within their tolerance. Beside them, three mismatches of
checkpoints and reports, which fingerprints or the gate should stop.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.calibrated import default_of
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import Setup, bench_of, exact
from benchmarks.support.rewriting import Stored, put_back, stored
from kintsugi.core.layout import ChunkManifest, Codec
from kintsugi.core.prompt import PromptShape
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.engine.auditing import StoredCopy, find_stored_copies
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from kintsugi.fusor.audit import tolerance_of
from kintsugi.quality import metrics, reports
from kintsugi.quality.measure import NAMESPACE, Bench, Case, measure_selection
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from kintsugi.quality.shadow import Shadow, ShadowConfig
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store

SHADOWED_MAX = 300
UNTIL_MAX = 200
"""Shadowed requests after which a damage that counts has to be caught."""
FALL_MIN = 3.0
"""Points of exact match."""
AUDITED = 1000
"""Sound chunks that are audited; a tenth of them in every 8-bit codec, too."""
CLEAN_MAX = 0.5
"""Largest share of its codec's tolerance that a sound chunk may reach."""
NOISE = 0.2
"""Standard deviation of the noise in the noisy model's weights, as a share of each tensor's own."""

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
    """What one damage did, and what noticed it."""

    fall: float
    """Points of exact match against undamaged blends of the same prompts."""
    by_answers: int | None
    """Shadowed requests until comparing answers stopped blending; None where it did not."""
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


class Audits:
    """An engine whose full prefills are the blends' own answers, so that audits alone can find anything."""

    def __init__(self, running: LocalEngine) -> None:
        self._running = running
        self.answer: Generation | None = None
        """The blend that is shadowed."""

    def space(self, namespace: str) -> ChunkSpace:
        return self._running.space(namespace)

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        if all(prompt.params is not None for prompt in prompts):
            return self._running.generate(prompts)
        assert self.answer is not None
        return [self.answer for _ in prompts]


def measure(setup: Setup) -> list[Figure]:
    """Where it has to be quick, one damage alone."""
    default_of(setup)
    found, clean = _watch_damages(setup)
    undamaged = found.pop("undamaged")
    counted = [one for one in found.values() if one.counts]
    caught = sum(one.until is not None for one in counted) / len(counted)
    detail = ", ".join(f"{name}: {one}" for name, one in found.items())
    detail += f"; without damage {'nothing rings' if undamaged.until is None else f'FALSE ALARM {undamaged}'}"
    until = max(one.until or SHADOWED_MAX for one in counted)
    setup.details["damage"] = {name: dataclasses.asdict(one) for name, one in found.items()}
    holds = caught == 1.0 and undamaged.until is None
    figures = [
        Figure("damage_caught", caught, "", "1.0, no false alarm", holds, detail),
        Figure.at_most(
            "shadowed_until_caught",
            until,
            UNTIL_MAX,
            unit="requests",
            detail=f"worst of {len(counted)} that cost {FALL_MIN:g} points or more",
        ),
        clean,
    ]
    return figures if setup.quick else [*figures, _mismatches(setup)]


def _watch_damages(setup: Setup) -> tuple[dict[str, Watched], Figure]:
    """What each damage did, and how far sound chunks are from theirs."""
    others = {} if setup.quick else {name: _frames_of(setup, alter) for name, alter in CHECKPOINTS.items()}
    url, store = _fresh_store()
    with _gated(setup, setup.model, url) as running:
        _publish(setup, running, store)
        cases = _cases(setup, running)
        keys = _save_one_by_one(running, store, cases)
        by_key = {chunk.manifest.key: chunk for chunk in stored(store)}
        sound = [by_key[key] for key in keys]
        bench = Bench(running, cases, max_tokens=1)
        chosen = reports.read(_report(setup)).choice.selection
        assert chosen is not None
        before = exact(measure_selection(bench, chosen, range(len(cases))))
        clean = _clean_errors(setup, running, store, cases)
        found = {}
        for name, chunks in _kinds(setup, running, sound, others):
            for chunk in chunks:
                put_back(store, chunk, Codec.RAW)
            _publish(setup, running, store)
            after = exact(measure_selection(bench, chosen, range(len(cases))))
            fall = 100 * (metrics.mean(before) - metrics.mean(after))
            by_answers = _watch_answers(setup, running, cases)
            found[name] = Watched(fall, by_answers, _watch_audits(running, store, cases))
            say(f"{name}: {found[name]}")
    return found, clean


def _watch_answers(setup: Setup, running: LocalEngine, cases: Sequence[Case]) -> int | None:
    """As `_watch`, without audits: shadowing is given a store that holds the report and no chunk."""
    _, apart = _fresh_store()
    reports.publish(apart, reports.read(_report(setup)))
    return _watch(running, apart, cases)


def _watch_audits(running: LocalEngine, store: RamStore, cases: Sequence[Case]) -> int | None:
    """As `_watch`, without comparing answers."""
    return _watch(running, store, cases, Audits(running))


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
    """Every damage with all chunks as it leaves them."""
    yield "undamaged", list(sound)
    for name, damage in damages(running.num_layers).items():
        yield name, [_altered(chunk, number, damage) for number, chunk in enumerate(sound)]
        if setup.quick:
            return
    for name, theirs in others.items():
        pairs = zip(sound, theirs, strict=True)
        yield name, [dataclasses.replace(mine, frames=other.frames) for mine, other in pairs]


def _altered(chunk: Stored, number: int, damage: Damage) -> Stored:
    """The chunk with other bytes, through a store of its own."""
    _, scratch = _fresh_store()
    put_back(scratch, chunk, Codec.RAW, lambda layer, key, value: damage(number, layer, key, value))
    (altered,) = stored(scratch)
    return altered


def _frames_of(setup: Setup, alter: Callable[[Path], None]) -> list[Stored]:
    """The chunks as another checkpoint computes them, in the order in which they are saved."""
    url, store = _fresh_store()
    with start_measuring_engine(
        MeasuringEngineSpec(str(_altered_checkpoint(setup, alter)), store=url)
    ) as running:
        keys = _save_one_by_one(running, store, _cases(setup, running))
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
        "stale_check_layer": _stale_check_layer(setup),
    }
    caught = sum(until is not None for until in found.values()) / len(found)
    detail = ", ".join(
        f"{name}: {'NOT CAUGHT' if until is None else f'after {until}'}" for name, until in found.items()
    )
    return Figure.at_least("mismatches_caught", caught, 1.0, unit="", detail=detail)


@contextmanager
def _gated(setup: Setup, model: Path, url: str) -> Iterator[LocalEngine]:
    """An engine that goes by the report in its store."""
    extra = {"allow_uncalibrated": False, "report_poll_ms": 60_000}
    with start_measuring_engine(MeasuringEngineSpec(str(model), store=url, extra_config=extra)) as running:
        yield running


def _cases(setup: Setup, running: LocalEngine) -> list[Case]:
    """Tasks take turns. Prompts whose lengths the report does not cover are not blended, and left out."""
    domain = reports.read(_report(setup)).domain
    count = 2 * SHADOWED_MAX // len(testbed.TASKS)
    asked = testbed.cases(running, testbed.questions(testbed.TASKS, testbed.WATCHED_FROM, count))
    shapes = [
        PromptShape(len(case.prompt.token_ids), tuple(span.num_tokens for span in case.prompt.spans))
        for case in asked
    ]
    inside = [case for case, shape in zip(asked, shapes, strict=True) if domain.departure(shape) is None]
    return inside[:SHADOWED_MAX]


def _publish(setup: Setup, running: LocalEngine, store: RamStore) -> None:
    assert setup.report is not None
    reports.publish(store, reports.read(setup.report))
    running.refresh_gate()


def _watch(
    running: LocalEngine, store: RamStore, cases: Sequence[Case], audits: Audits | None = None
) -> int | None:
    """Serve, shadowing everything. How many requests were shadowed until blending stopped; None if never.

    `audits`: what shadowing asks instead of the engine that serves.
    """
    shadow = Shadow(audits or running, store, running.binding, ShadowConfig(share=1.0))
    for number, case in enumerate(cases):
        params = KintsugiParams(NAMESPACE, spans=case.prompt.spans)
        prompt = shadow.prepare_prompt(f"{number}", Prompt(case.prompt.token_ids, params, max_tokens=1))
        (answer,) = running.generate([prompt])
        if (answer.accounting or {}).get("outcome") != "blended":
            return number
        if audits is not None:
            audits.answer = answer
        shadow.take(prompt, answer)
        shadow.run_pending()
        if shadow.counts.trips:
            return number + 1
    say(f"nothing rang: {shadow.counts.effect}; {shadow.counts.audited} chunks audited")
    return None


def _fresh_store() -> tuple[str, RamStore]:
    url = f"ram://damage-{uuid.uuid4().hex[:8]}"
    store = open_store(url)
    assert isinstance(store, RamStore)
    return url, store


def _altered_checkpoint(setup: Setup, alter: Callable[[Path], None]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kintsugi-altered-")) / "model"
    shutil.copytree(setup.model, folder)
    alter(folder)
    return folder


def _another_checkpoint(setup: Setup, alter: Callable[[Path], None]) -> int | None:
    """Chunks and report of one checkpoint, an engine of another that looks the same."""
    url, store = _fresh_store()
    with _gated(setup, setup.model, url) as running:
        _publish(setup, running, store)
        binding, cases = running.binding, _cases(setup, running)
        bench_of(running, cases)
    with _gated(setup, _altered_checkpoint(setup, alter), url) as running:
        # What a careless operator would do: let the old report speak for the new model.
        forged = dataclasses.replace(reports.read(_report(setup)), binding=running.binding)
        assert running.binding != binding
        reports.publish(store, forged)
        running.refresh_gate()
        return _watch(running, store, cases)


def _report(setup: Setup) -> Path:
    assert setup.report is not None
    return setup.report


def _other_rope(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = 10_000.0
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = 10_000.0
    path.write_text(json.dumps(config))


def _other_weights(folder: Path) -> None:
    """The same shapes, another training: as near as a copy can come, values rolled by one row."""
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


def _stale_check_layer(setup: Setup) -> int | None:
    """The report's numbers are of another check layer than the one that blends: an earlier one. Done to what
    passed and looks at a layer: the default need not."""
    url, store = _fresh_store()
    with _gated(setup, setup.model, url) as running:
        report = reports.read(_report(setup))
        passed = (report.choice.selection, *report.choice.limits.values())
        chosen = next(selection for selection in passed if selection and selection.check_layer > 1)
        stale = dataclasses.replace(chosen, check_layer=1, ratio=min(chosen.ratio, 0.15))
        entries = [
            dataclasses.replace(entry, selection=stale, place=0, error=0.0)
            for entry in report.entries
            if entry.selection == chosen
        ]
        forged = type(report).of(
            running.binding,
            report.created,
            "stale",
            0,
            report.noise,
            report.thresholds,
            report.domain,
            report.search,
            entries,
        )
        reports.publish(store, forged)
        running.refresh_gate()
        cases = _cases(setup, running)
        bench_of(running, cases)
        return _watch(running, store, cases)


CHECKPOINTS: Mapping[str, Callable[[Path], None]] = {
    "noisy_model": _noisy_weights,
    "another_model": _other_weights,
}
"""Those whose chunks are stored under the keys of the model that serves."""
