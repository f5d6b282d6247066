"""What a config says of the layers behind it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from kintsugi.core.layout import KVLayout, Part, PartKind
from kintsugi.models.layers import (
    ADVICE,
    Decline,
    DeclineReason,
    LayerKind,
    LayerSpec,
    ModelLayers,
    describe_layers,
    longrope_factors,
)


def described(model_type: str, **fields: Any) -> ModelLayers:
    config = AutoConfig.for_model(model_type, **fields).to_dict()
    # What transformers fills in for defaults does not count where the test says otherwise.
    return describe_layers(config | fields)


def windows(model: ModelLayers) -> list[int | None]:
    return [layer.window for layer in model.layers]


def rotates(model: ModelLayers) -> list[bool]:
    return [layer.rotation is not None for layer in model.layers]


def test_a_llama_is_uniform() -> None:
    model = described(
        "llama", num_hidden_layers=3, hidden_size=128, num_attention_heads=4, num_key_value_heads=2
    )
    assert model.declines == ()
    assert model.layout("bfloat16") == KVLayout.uniform(3, 2, 32, "bfloat16")


def test_a_model_without_kv_heads_has_one_for_each_query_head() -> None:
    (layer,) = described("gptj", n_layer=1, n_embd=128, n_head=4, rotary_dim=8).layers
    assert (layer.kv_heads, layer.key_width, layer.value_width) == (4, 32, 32)
    assert layer.rotation is not None
    assert layer.rotation.share == 0.25


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("cohere2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("exaone4", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
        ("llama4_text", {"no_rope_layers": [1, 0]}),
    ],
)
def test_some_layers_do_not_rotate(model_type: str, fields: dict[str, Any]) -> None:
    model = described(model_type, num_hidden_layers=2, **fields)
    assert rotates(model) == [True, False]
    assert model.declines == ()


def test_windows_are_those_of_the_named_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = described("gemma2", num_hidden_layers=2, sliding_window=200, layer_types=kinds)
    assert windows(model) == [200, None]
    assert {layer.softcap for layer in model.layers} == {50.0}


def test_gpt_oss_has_sinks_and_yarn() -> None:
    model = described("gpt_oss", num_hidden_layers=2)
    assert all(layer.has_sinks for layer in model.layers)
    assert {layer.rotation.scaling for layer in model.layers if layer.rotation} == {"yarn"}


def test_sections_of_a_rotation_over_several_axes_are_told() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    (layer,) = described("llama", num_hidden_layers=1, rope_parameters=rope).layers
    assert layer.rotation is not None
    assert layer.rotation.sections == (16, 24, 24)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
TRAINED = {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "max_model_len", "factors"),
    [
        ({"rope_parameters": LONGROPE, **TRAINED}, 4096, "short"),
        ({"rope_parameters": LONGROPE, **TRAINED}, 4097, "long"),
        ({"rope_parameters": LONGROPE, **TRAINED}, None, "short"),
        ({"rope_parameters": LONGROPE, **TRAINED}, -1, "short"),
        ({"rope_parameters": {**LONGROPE, **TRAINED}, "max_position_embeddings": 8192}, None, "long"),
        ({"rope_parameters": LONGROPE}, 10, "long"),
        ({"rope_scaling": {"type": "su", **TRAINED}}, 8192, "long"),
        ({"rope_parameters": {"full_attention": {**LONGROPE, **TRAINED}}}, 8192, "long"),
        ({"text_config": {"rope_parameters": LONGROPE, **TRAINED}}, 100, "short"),
        ({"rope_parameters": {"rope_type": "yarn", **TRAINED}}, 8192, None),
        ({}, 8192, None),
    ],
)
def test_longrope_rotates_by_factors_that_the_engine_s_length_chooses(
    config: dict[str, Any], max_model_len: int | None, factors: str | None
) -> None:
    assert longrope_factors(config, max_model_len) == factors


def test_a_latent_is_stored_once_for_all_heads() -> None:
    model = described("deepseek_v3", num_hidden_layers=2)
    group = model.layout("bfloat16").groups[0]
    assert (group.heads, group.parts) == (1, (Part(PartKind.LATENT, 512), Part(PartKind.ROTARY, 64)))
    assert model.declines == ()


def test_a_latent_without_a_rotary_key_is_declined() -> None:
    model = described("deepseek_v3", num_hidden_layers=2, qk_rope_head_dim=0)
    assert [(decline.reason, decline.layer) for decline in model.declines] == [(DeclineReason.MLA, 0)]


def test_latents_that_an_index_chooses_from_are_declined() -> None:
    model = described("deepseek_v3", num_hidden_layers=2, index_topk=2048)
    assert [decline.reason for decline in model.declines] == [DeclineReason.INDEXED]


@pytest.mark.parametrize(
    ("model_type", "fields", "reason", "layer"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "recurrent", 0),
        ("mamba2", {}, "recurrent", 0),
        ("falcon_h1", {}, "recurrent", 0),
        ("jamba", {}, "recurrent", 0),
        ("inkling_text", {"layer_types": ["hybrid_sliding", "hybrid"]}, "recurrent", 0),
        ("gpt2", {}, "learned_positions", None),
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention"] * 2},
            "shared_kv",
            1,
        ),
    ],
)
def test_declines_name_reason_and_layer(
    model_type: str, fields: dict[str, Any], reason: str, layer: int | None
) -> None:
    model = described(model_type, num_hidden_layers=2, **fields)
    assert (model.declines[0].reason, model.declines[0].layer) == (reason, layer)
    error = model.declines[0].error()
    assert (error.reason, str(error).startswith(f"{reason}: ")) == (reason, True)
    assert "prefix caching works" in str(error)


def test_a_model_with_inputs_beside_text_is_described_by_its_language_model() -> None:
    text = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64}
    model = describe_layers({"text_config": text, "vision_config": {"depth": 1}})
    assert (len(model.layers), model.declines) == (1, ())
    hybrid = {"text_config": {**text, "layer_types": ["linear_attention"]}, "audio_config": {"depth": 1}}
    assert [decline.reason for decline in describe_layers(hybrid).declines] == [DeclineReason.RECURRENT]


def test_a_config_that_only_lists_its_layers_has_as_many() -> None:
    model = describe_layers({"layers_block_type": ["mamba", "moe", "attention"]})
    assert [layer.kind for layer in model.layers] == [
        LayerKind.RECURRENT,
        LayerKind.NONE,
        LayerKind.ATTENTION,
    ]
    assert model.declines[0].reason is DeclineReason.RECURRENT


def test_a_config_without_layers_is_declined() -> None:
    (decline,) = describe_layers({"model_type": "unheard of"}).declines
    assert decline.reason is DeclineReason.ARCHITECTURE


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(DeclineReason)
    text = str(Decline(DeclineReason.ROPE, 3, "a rotation by content"))
    assert text.startswith("rope: layer 3 has a rotation by content; ")


def test_layers_that_share_kv_have_no_frame() -> None:
    own = LayerSpec(LayerKind.ATTENTION, 2, 64, 64)
    shared = LayerSpec(LayerKind.ATTENTION, 2, 64, 64, shares_kv_with=0)
    wide = LayerSpec(LayerKind.ATTENTION, 1, 128, 128, value_is_key=True)
    layout = ModelLayers((own, shared, wide)).layout("bfloat16")
    assert layout.num_layers == 2
    assert [group.parts for group in layout.groups] == [own.parts, (Part(PartKind.KV, 128),)]
