"""All parts agree on what chunks are prefilled behind by default: otherwise every chunk misses."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.cli.commands.precompute import CorpusOptions
from kintsugi.cli.session import Asked, build_prompt
from kintsugi.core.deploy import EngineSpec, ModelExpert, ModelSpec
from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import FormName
from kintsugi.engine.asynchronous import AsyncSpec
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.scheduler.gate import prefix_of
from kintsugi.models.bundled import bundled_checkpoint, bundled_report
from kintsugi.models.prompt_form import load_form
from kintsugi.precompute.spec import JobSpec, ModelFacts
from kintsugi.quality import reports
from tests.fakes.chat_templates import CHATML, write_tokenizer
from tests.fakes.random_models.factory import make_checkpoint_once

STORE = "grpc://127.0.0.1:1"


def vllm_config(folder: Path) -> Any:
    model = SimpleNamespace(model=str(folder), revision=None, trust_remote_code=False)
    return SimpleNamespace(model_config=model)


@pytest.fixture(params=["no template", "a BOS", "no BOS", "bundled"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "bundled":
        return bundled_checkpoint()
    copied = Path(shutil.copytree(make_checkpoint_once("tiny-llama"), tmp_path / "model"))
    template = None if request.param == "no template" else CHATML
    return write_tokenizer(copied, template, adds_bos=request.param != "no BOS")


def test_engines_precompute_commands_and_calibration_agree(folder: Path) -> None:
    form = load_form(folder)
    spec = AsyncSpec.of(ModelSpec(str(folder)), EngineSpec(), STORE)
    job = JobSpec(source="x", model=str(folder), store=STORE, namespace="acme")
    assert prefix_of(EngineConfig(), vllm_config(folder)) == form.head
    assert prefix_of(spec.config, vllm_config(folder)) == form.head
    assert spec.prompt_form == form, "whose foot the gateway writes"
    assert ModelFacts.of(job).space.prefix_token_ids == form.head
    assert build_prompt(form, Asked([("", "Tea.")], "Why?")).prefix == form.head


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_service_in_the_plain_form_agrees_with_a_job_in_it(system: str | None, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(make_checkpoint_once("tiny-llama"), tmp_path / "model"))
    folder = write_tokenizer(copied, CHATML)
    spec = AsyncSpec.of(
        ModelSpec(str(folder), system_prompt=system, expert=ModelExpert(form="plain")), EngineSpec(), STORE
    )
    (tmp_path / "system.txt").write_text(system or "")
    documents = CorpusOptions(
        source="x",
        model=str(folder),
        namespace="acme",
        form=FormName.PLAIN,
        system=None if system is None else tmp_path / "system.txt",
    )
    job = ModelFacts.of(documents.job_spec())
    assert prefix_of(spec.config, vllm_config(folder)) == job.space.prefix_token_ids
    written = load_form(folder).tokenizer.decode(job.space.prefix_token_ids)
    assert written == "<s>" + (system or "")


def test_a_template_that_gives_no_prefix_asks_for_one(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(make_checkpoint_once("tiny-llama"), tmp_path / "model"))
    folder = write_tokenizer(copied, "{{ raise_exception('no messages here') }}")
    with pytest.raises(InvalidField, match=r"prefix_token_ids: must be given .*no messages here"):
        prefix_of(EngineConfig(), vllm_config(folder))
    assert prefix_of(EngineConfig(prefix_token_ids=[3]), vllm_config(folder)) == (3,)
    with pytest.raises(InvalidField, match=r"prefix_token_ids: must be given .*no tokenizer"):
        prefix_of(EngineConfig(), vllm_config(tmp_path))


def test_the_bundled_report_is_of_the_prefix_that_engines_use() -> None:
    binding = reports.read(bundled_report()).binding
    head = load_form(bundled_checkpoint()).head
    assert binding.prefix == binding.of(_fingerprint(), head, "raw").prefix


def _fingerprint() -> Any:
    return ModelFacts.of(
        JobSpec(source="x", model=str(bundled_checkpoint()), store=STORE, namespace="acme")
    ).space.fingerprint
