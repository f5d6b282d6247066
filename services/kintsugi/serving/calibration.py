"""Calibrates a model while it is served, with a separate engine on a Ray actor.

The serving engines do full prefills until they find the report in the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
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
"""Reasons for a closed gate that a calibration removes."""
REPORT_FILE = "calibration.json"
QUESTIONS_FILE = "questions.jsonl"
PUBLISH_RETRY_S = 0.5
BOUND = ("portable", "query_layers")
"""Connector settings that calibration must share with the serving engines."""


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration."""

    choice: str | None
    """The selection that blends may use; None: no blending."""
    why: str
    """The reason."""


class Calibrator:
    """A Ray actor that answers `progress` during `run`."""

    def __init__(
        self, model: Mapping[str, Any], engines: Mapping[str, Any], store_url: str, segments: bool
    ) -> None:
        """``segments``: cut prompts of bundled passages into segments, as discovery does."""
        self._model = load(ModelSpec, model, "model")
        self._engines = load(EngineSpec, engines, "engines")
        self._store_url = store_url
        self._segments = segments
        self._says = "starting vLLM"

    def progress(self) -> str:
        """Return the step that is running."""
        return self._says

    def _say(self, part: str) -> None:
        self._says = part

    def run(self) -> Calibrated:
        """Measure, and publish the report in the store. Takes minutes.

        Raises `Unavailable` if the engine does not start, and `InvalidField` for an invalid file of
        questions.
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
        from kintsugi.quality.calibrate import Budget, calibrate, prepare_bench
        from kintsugi.quality.questions import describe_prompts, read_questions
        from kintsugi.quality.shadow import utc_now

        budget, thresholds = Budget(), Thresholds()
        file = questions_file(self._model)
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
    """Publish the report beside the checkpoint if it has this `binding` and the store has none.

    Retries for `patience_s` while the store does not answer: it may still be starting. Returns whether the
    report was published. Raises `Corrupted` and `VersionMismatch` for an invalid report, and the store's
    errors.
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
                log.info("the store does not accept the calibration report yet (%s)", error)
                time.sleep(PUBLISH_RETRY_S)


def questions_file(model: ModelSpec) -> Path | None:
    """The file to calibrate on: the one beside the checkpoint, or None."""
    beside = Path(model.path) / QUESTIONS_FILE
    return beside if beside.is_file() else None


def start_calibrator(model: ModelSpec, engines: EngineSpec, store_url: str, segments: bool) -> Any:
    """Create a `Calibrator`. Ray starts it when the cluster has room for one more engine."""
    import ray

    from kintsugi.core.settings import non_default_fields

    actor = ray.remote(Calibrator).options(
        num_cpus=engines.cpus,
        num_gpus=engines.gpus,
        max_concurrency=2,
        max_restarts=0,
    )
    return actor.remote(non_default_fields(model), non_default_fields(engines), store_url, segments)
