"""The engine that a service's configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.deploy import EngineExpert, EngineSpec, ModelExpert, ModelSpec
from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.evidence import Quality
from kintsugi.engine.asynchronous import AsyncSpec, arguments_for
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint
from kintsugi.models.context import tokenize_context
from kintsugi.models.reference import REFERENCE

STORE = "grpc://127.0.0.1:1"


@pytest.mark.parametrize(
    ("path", "name", "expected"), [("org/large", "", "large"), ("org/large", "mine", "mine"), ("/", "", "/")]
)
def test_a_model_is_called_by_its_name_or_its_folders(path: str, name: str, expected: str) -> None:
    assert AsyncSpec.of(ModelSpec(path, name), EngineSpec(), STORE).name == expected


def test_the_reference_model_keeps_its_name_and_loads_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINTSUGI_CACHE", str(tmp_path))
    REFERENCE.folder.mkdir(parents=True)
    spec = AsyncSpec.of(ModelSpec(REFERENCE.name), EngineSpec(), STORE)
    assert (spec.model, spec.name) == (str(REFERENCE.folder), REFERENCE.name)
    assert arguments_for(spec)["dtype"] == "float32", "in bfloat16 answers differ from CPU to CPU"
    engines = EngineSpec(vllm={"dtype": "bfloat16"})
    assert arguments_for(AsyncSpec.of(ModelSpec(REFERENCE.name), engines, STORE))["dtype"] == "bfloat16"


def test_the_bundled_model_is_served_by_its_name() -> None:
    spec = AsyncSpec.of(ModelSpec(BUNDLED_NAME), EngineSpec(), STORE)
    assert (spec.model, spec.name) == (str(bundled_checkpoint()), BUNDLED_NAME)
    assert arguments_for(spec)["dtype"] == "auto"


def test_what_is_configured_reaches_vllm_and_the_connector() -> None:
    model = ModelSpec("m", codec="int8")
    engines = EngineSpec(
        quality="off",
        vllm={"max_num_seqs": 4, "tool_call_parser": "hermes"},
        expert=EngineExpert(ratio=0.4, load_deadline_ms=900),
    )
    spec = AsyncSpec.of(model, engines, STORE)
    assert spec.vllm_args == {"max_num_seqs": 4}
    assert spec.openai.tool_call_parser == "hermes"
    config = spec.config
    assert (config.codec, config.ratio, config.quality) == ("int8", 0.4, Quality.OFF)
    assert (config.lookup_deadline_ms, config.layer_deadline_ms) == (900, 900)
    assert config.prefix_token_ids is None


@pytest.mark.parametrize("form", ["auto", "chat", "plain"])
def test_a_system_prompt_is_the_prefix_of_chunks(form: str) -> None:
    model = ModelSpec(str(bundled_checkpoint()), system_prompt="You answer.", expert=ModelExpert(form=form))
    spec = AsyncSpec.of(model, EngineSpec(), STORE)
    assert spec.config.prefix_token_ids == list(spec.prompt_form.head)
    assert len(spec.prompt_form.head) > 1
    assert spec.prompt_form.name.value == form.replace("auto", "chat")


def test_a_context_reaches_the_connector() -> None:
    path = str(bundled_checkpoint())
    spec = AsyncSpec.of(ModelSpec(path, expert=ModelExpert(context="bundled")), EngineSpec(), STORE)
    assert spec.context_token_ids == tokenize_context("bundled", path)
    assert spec.config.context_token_ids == list(spec.context_token_ids)
    with pytest.raises(NotFound, match=r"absent\.txt is not a file"):
        AsyncSpec.of(ModelSpec(path, expert=ModelExpert(context="absent.txt")), EngineSpec(), STORE)


def test_a_store_of_another_process_is_asked_for() -> None:
    with pytest.raises(InvalidField, match="store"):
        _ = AsyncSpec.of(ModelSpec("m"), EngineSpec(), "ram://here").config


def test_form_and_context_load_the_tokenizer_once_at_the_revision_that_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    load = transformers.AutoTokenizer.from_pretrained
    loaded: list[dict[str, Any]] = []

    def record(folder: str, **options: Any) -> Any:
        loaded.append(options)
        return load(folder)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", record)
    engines = EngineSpec(vllm={"revision": "older", "trust_remote_code": True})
    spec = AsyncSpec.of(
        ModelSpec(str(bundled_checkpoint()), expert=ModelExpert(context="bundled")), engines, STORE
    )
    assert spec.prompt_form.tokenizer is not None
    assert spec.config.context_token_ids
    assert spec.config.prefix_token_ids == list(spec.prompt_form.head), "so the engine need not load it"
    assert loaded == [{"revision": "older", "trust_remote_code": True}]
