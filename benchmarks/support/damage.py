"""Five ways in which stored KV can be wrong, and what notices each: fingerprint, self-test, gate or shadow.

The engine is gated by a real calibration report and its requests are shadowed, all of them. A damage is
caught where no blend happens at all, or where shadowing trips the report within `SHADOWED_MAX` requests.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.calibrated import default_of
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import Setup
from benchmarks.support.rewriting import put_back, stored
from kintsugi.core.layout import Codec
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.quality import reports
from kintsugi.quality.measure import NAMESPACE, Case
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from kintsugi.quality.shadow import Shadow, ShadowConfig
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store

SHADOWED_MAX = 400
Damage = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def measure(setup: Setup) -> list[Figure]:
    """Where it has to be quick, one damage alone: every other takes an engine of its own, or two."""
    default_of(setup)
    if setup.quick:
        swapped = _swapped_kv(setup)
        detail = f"swapped_kv: {swapped or 'NOT CAUGHT'}; no other is tried"
        return [Figure("damage_caught", float(swapped is not None), "", "1.0", swapped is not None, detail)]
    found = {
        "rope_base": _another_checkpoint(setup, _other_rope),
        "another_model": _another_checkpoint(setup, _other_weights),
        "swapped_kv": _swapped_kv(setup),
        "scales_doubled": _damaged(setup, lambda key, value: (2 * key, 2 * value), every_layer=False),
        "stale_check_layer": _stale_check_layer(setup),
        "undamaged": _damaged(setup, lambda key, value: (key, value), every_layer=True),
    }
    undamaged = found.pop("undamaged")
    caught = sum(by is not None for by in found.values()) / len(found)
    detail = ", ".join(f"{name}: {by or 'NOT CAUGHT'}" for name, by in found.items())
    holds = caught == 1.0 and undamaged is None
    detail += "; without damage " + ("nothing rings" if undamaged is None else f"FALSE ALARM: {undamaged}")
    return [Figure("damage_caught", caught, "", "1.0, no false alarm", holds, detail)]


def _swapped_kv(setup: Setup) -> str | None:
    return _damaged(setup, lambda key, value: (value, key), every_layer=True)


@contextmanager
def _gated(setup: Setup, model: Path, url: str) -> Iterator[LocalEngine]:
    """An engine that goes by the report in its store."""
    extra = {"allow_uncalibrated": False, "report_poll_ms": 60_000}
    with start_measuring_engine(MeasuringEngineSpec(str(model), store=url, extra_config=extra)) as running:
        yield running


def _cases(running: LocalEngine) -> list[Case]:
    """Tasks take turns."""
    count = SHADOWED_MAX // len(testbed.TASKS) + 1
    asked = testbed.questions(testbed.TASKS, testbed.WATCHED_FROM, count)
    return testbed.cases(running, asked)[:SHADOWED_MAX]


def _store(running: LocalEngine, cases: Sequence[Case]) -> None:
    distinct = list(dict.fromkeys(chunk.token_ids for case in cases for chunk in case.prompt.chunks))
    for saved in running.save(cases[0].prompt.prefix, distinct, NAMESPACE):
        assert (saved.accounting or {}).get("outcome") == "saved", saved.accounting


def _publish(setup: Setup, running: LocalEngine, store: RamStore) -> None:
    assert setup.report is not None
    reports.publish(store, reports.read(setup.report))
    running.refresh_gate()


def _watch(running: LocalEngine, store: RamStore, cases: Sequence[Case]) -> str | None:
    """Serve, shadowing everything. What stopped blending, or None where nothing did."""
    shadow = Shadow(running, store, running.binding, ShadowConfig(share=1.0))
    for number, case in enumerate(cases):
        params = KintsugiParams(NAMESPACE, spans=case.prompt.spans)
        prompt = shadow.prepare_prompt(f"{number}", Prompt(case.prompt.token_ids, params, max_tokens=1))
        (answer,) = running.generate([prompt])
        accounting = answer.accounting or {}
        if accounting.get("outcome") != "blended":
            return f"no blend ({str(accounting.get('reason')).split(':')[0]} after {number})"
        shadow.take(prompt, answer)
        shadow.run_pending()
        running.refresh_gate()
    say(f"nothing rang: mean KL {shadow.counts.kl_sum / len(cases):.4f}, {shadow.counts.disagreed} differ")
    return None


def _fresh_store() -> tuple[str, RamStore]:
    url = f"ram://damage-{uuid.uuid4().hex[:8]}"
    store = open_store(url)
    assert isinstance(store, RamStore)
    return url, store


def _damaged(setup: Setup, damage: Damage, every_layer: bool) -> str | None:
    """Chunks whose bytes are wrong under right digests, as a defective writer would leave them."""
    url, store = _fresh_store()
    with _gated(setup, setup.model, url) as running:
        _publish(setup, running, store)
        cases = _cases(running)
        _store(running, cases)
        _rewrite(store, damage, every_layer)
        caught = _watch(running, store, cases)
    say(f"damaged chunks: {caught}")
    return caught


def _rewrite(store: RamStore, damage: Damage, every_layer: bool) -> None:
    for chunk in stored(store):
        assert chunk.manifest.codec is Codec.RAW
        middle = chunk.manifest.layout.num_layers // 2

        def alter(
            layer: int, key: torch.Tensor, value: torch.Tensor, middle: int = middle
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return damage(key, value) if every_layer or layer == middle else (key, value)

        put_back(store, chunk, Codec.RAW, alter)


def _another_checkpoint(setup: Setup, alter: Callable[[Path], None]) -> str | None:
    """Chunks and report of one checkpoint, an engine of another that looks the same."""
    url, store = _fresh_store()
    with _gated(setup, setup.model, url) as running:
        _publish(setup, running, store)
        binding, cases = running.binding, _cases(running)
        _store(running, cases)
    folder = Path(tempfile.mkdtemp(prefix="kintsugi-altered-")) / "model"
    shutil.copytree(setup.model, folder)
    alter(folder)
    with _gated(setup, folder, url) as running:
        # What a careless operator would do: let the old report speak for the new model.
        forged = dataclasses.replace(reports.read(_report(setup)), binding=running.binding)
        assert running.binding != binding
        reports.publish(store, forged)
        running.refresh_gate()
        caught = _watch(running, store, cases)
    say(f"another checkpoint: {caught}")
    return caught


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
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {name: tensor.roll(1, 0).contiguous() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


def _stale_check_layer(setup: Setup) -> str | None:
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
        cases = _cases(running)
        _store(running, cases)
        caught = _watch(running, store, cases)
    say(f"stale check layer: {caught}")
    return caught
