"""Calibrate a model that is being served: an engine of its own beside it, on a Ray actor.

The engines that serve read the report from the store once it is there; until then they prefill in full.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kintsugi.core.deploy import EngineSpec, ModelSpec
from kintsugi.core.errors import Unavailable
from kintsugi.core.report import Binding, CalibrationReport, Thresholds, describe_selection
from kintsugi.core.schema import load
from kintsugi.engine.asynchronous import AsyncSpec
from kintsugi.models.prompt_form import PromptForm

log = logging.getLogger(__name__)

NEEDS_CALIBRATION = ("not_calibrated", "calibration_outdated")
"""Reasons of a closed gate that a calibration ends."""
REPORT_FILE = "calibration.json"
QUESTIONS_FILE = "questions.jsonl"
PUBLISH_RETRY_S = 0.5
BOUND = ("portable", "query_layers")
"""Fields of the connector's configuration that calibration must share with the engines that serve."""


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration."""

    choice: str | None
    """The selection that may be blended; None: nothing may."""
    why: str
    """Why this choice, or why none."""


class Calibrator:
    """A Ray actor that answers `progress` while it is in `run`."""

    def __init__(
        self, model: Mapping[str, Any], engines: Mapping[str, Any], store_url: str, segments: bool
    ) -> None:
        """``segments``: prompts made of the bundled passages are cut as discovery cuts them."""
        self._model = load(ModelSpec, model, "model")
        self._engines = load(EngineSpec, engines, "engines")
        self._store_url = store_url
        self._segments = segments
        self._says = "starting vLLM"

    def progress(self) -> str:
        """The part that is running."""
        return self._says

    def _say(self, part: str) -> None:
        self._says = part

    def run(self) -> Calibrated:
        """Measure, and publish the report in the store. Minutes.

        Raises `Unavailable` where the engine does not start, and `InvalidField` for questions that cannot be
        read.
        """
        from kintsugi.quality import reports
        from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
        from kintsugi.store.client.registry import open_store

        serving = AsyncSpec.of(self._model, self._engines, self._store_url)
        form = serving.prompt_form
        connector = {name: value for name, value in serving.extra_config.items() if name in BOUND}
        spec = MeasuringEngineSpec(
            serving.model,
            codec=self._model.codec,
            form=form,
            context_token_ids=serving.context_token_ids,
            extra_config=connector,
            vllm_args=serving.vllm_args,
        )
        with start_measuring_engine(spec) as engine:
            report = self._measure_report(engine, form)
        with closing(open_store(self._store_url)) as store:
            reports.publish(store, report)
        chosen = report.choice.selection
        return Calibrated(None if chosen is None else describe_selection(chosen), report.choice.why)

    def _measure_report(self, engine: Any, form: PromptForm) -> CalibrationReport:
        from kintsugi.quality.calibrate import Budget, calibrate, describe_prompts, prepare_bench
        from kintsugi.quality.questions import read_questions
        from kintsugi.quality.shadow import utc_now

        budget, thresholds = Budget(), Thresholds()
        file = questions_file(self._model, self._engines)
        given = None if file is None else read_questions(file)
        segments = self._segments and given is None
        bench, _ = prepare_bench(engine, form, given, budget, segments)
        calibration = calibrate(
            bench,
            engine.num_layers,
            engine.binding,
            budget,
            thresholds,
            describe_prompts(None if file is None else file.name, segments),
            utc_now(),
            form.name.value,
            self._say,
        )
        return calibration.report


def publish_shipped(model: ModelSpec, store_url: str, binding: Binding, patience_s: float = 0.0) -> bool:
    """Publish the report beside the checkpoint if it is of this `binding` and the store has none.

    A store that does not answer is asked again for `patience_s`: it may be starting as well.

    Returns whether it was published. Raises `Corrupted` and `VersionMismatch` for a file that is no report of
    ours, and the store's errors.
    """
    from kintsugi.quality import reports
    from kintsugi.store.client.registry import open_store

    file = Path(model.path) / REPORT_FILE
    if not file.is_file():
        return False
    report = reports.read(file)
    if report.binding != binding:
        return False
    until_s = time.monotonic() + patience_s
    with closing(open_store(store_url)) as store:
        while True:
            try:
                return reports.publish_shipped(store, report)
            except Unavailable as error:
                if time.monotonic() >= until_s:
                    raise
                log.info("the store does not take the calibration report yet (%s)", error)
                time.sleep(PUBLISH_RETRY_S)


def questions_file(model: ModelSpec, engines: EngineSpec) -> Path | None:
    """The file to calibrate on: the configured one, else the one beside the checkpoint, else None."""
    if engines.questions:
        return Path(engines.questions)
    beside = Path(model.path) / QUESTIONS_FILE
    return beside if beside.is_file() else None


def start_calibrator(model: ModelSpec, engines: EngineSpec, store_url: str, segments: bool) -> Any:
    """Start the actor, which waits until the cluster has room for one more engine. ``segments``: see
    `Calibrator`."""
    import ray

    from kintsugi.core.settings import non_default_fields

    actor = ray.remote(Calibrator).options(
        num_cpus=engines.cpus,
        num_gpus=engines.gpus,
        max_concurrency=2,
        max_restarts=0,
        runtime_env={"env_vars": dict(engines.env)},
    )
    engine_fields = non_default_fields(replace(engines, env={}))
    return actor.remote(non_default_fields(model), engine_fields, store_url, segments)
