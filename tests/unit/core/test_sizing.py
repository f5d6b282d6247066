"""Sizes and break-even speeds: against published figures, and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField, NotBlendable
from kintsugi.core.layout import Codec
from kintsugi.core.sizing import (
    SizingWorkload,
    blend_s,
    codec_size,
    engine_dtype,
    model_size,
    pace_to_hide_loading,
)

MISTRAL_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = MISTRAL_7B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
H100_FLOPS = 0.6 * 989e12


@pytest.mark.parametrize(
    ("config", "devices", "num_tokens", "expected_ms"),
    [
        (MISTRAL_7B, 1, 3072, 76),
        (MISTRAL_7B, 1, 32768, 1245),
        (LLAMA_70B, 4, 3072, 183),
        (LLAMA_70B, 4, 32768, 2484),
    ],
)
def test_prefill_times_are_those_computed_elsewhere(
    config: dict[str, object], devices: int, num_tokens: int, expected_ms: float
) -> None:
    flops = model_size(config).prefill_flops(num_tokens)
    assert flops / (devices * H100_FLOPS) * 1e3 == pytest.approx(expected_ms, rel=0.02)


@pytest.mark.parametrize(("config", "kib"), [(MISTRAL_7B, 128), (LLAMA_70B, 320)])
def test_bytes_per_token(config: dict[str, object], kib: int) -> None:
    layout = model_size(config).layout
    work = SizingWorkload(corpus_tokens=512)
    assert codec_size(layout, Codec.RAW, work).bytes_per_token == kib * 1024
    assert codec_size(layout, Codec.INT8, work).bytes_per_token == pytest.approx(kib * 512, rel=0.02)


def test_a_corpus_takes_whole_chunks_on_every_replica() -> None:
    layout = model_size(MISTRAL_7B).layout
    one = codec_size(layout, Codec.RAW, SizingWorkload(corpus_tokens=512))
    two = codec_size(layout, Codec.RAW, SizingWorkload(corpus_tokens=513, replication=3))
    assert two.corpus_bytes == 6 * one.corpus_bytes


def test_only_active_experts_are_computed() -> None:
    moe = MISTRAL_7B | {"num_experts_per_tok": 2, "moe_intermediate_size": 7168}
    assert model_size(moe).active_parameters == model_size(MISTRAL_7B).active_parameters


def test_the_decoder_of_a_model_of_several_modalities_counts() -> None:
    assert model_size({"hidden_size": 1, "text_config": MISTRAL_7B}) == model_size(MISTRAL_7B)


def test_float32_is_served_as_bfloat16_unless_told() -> None:
    config = MISTRAL_7B | {"torch_dtype": "float32"}
    assert model_size(config).layout.dtype == "bfloat16"
    assert model_size(config, "float32").layout.dtype == "float32"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"torch_dtype": "float8"}, "layout.dtype"),
        ({"num_hidden_layers": 10**6}, "layout.groups"),
    ],
)
def test_a_config_that_is_no_decoders_is_refused(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        model_size(MISTRAL_7B | change)
    assert caught.value.field == field


DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}


def test_a_latent_is_576_elements_a_layer() -> None:
    size = model_size(DEEPSEEK_V3)
    assert size.layout.chunk_bytes(Codec.RAW, 1) == 61 * 576 * 2
    assert [codec for codec in Codec if size.layout.holds(codec)] == [Codec.RAW]
    # As published: 187 M parameters of attention in each layer.
    attention = size.active_parameters / 61 - 3 * 7168 * 2048 * 8
    assert attention == pytest.approx(187.1e6, rel=1e-3)
    assert size.head_dim == (192 + 128) / 2


def test_attention_to_what_an_index_chooses_is_not_blended() -> None:
    with pytest.raises(NotBlendable, match="indexed_attention"):
        model_size(DEEPSEEK_V3 | {"index_topk": 2048})


prompts = st.integers(1, 10**12)
layers = st.integers(1, 200)
seconds = st.floats(1e-4, 1e4)
costs = st.floats(0.01, 0.95)
speeds = st.floats(1e3, 1e13)


@given(prompts, layers, seconds, costs)
def test_at_the_break_even_speed_a_blend_takes_a_full_prefill(
    prompt_bytes: int, num_layers: int, full_s: float, cost: float
) -> None:
    pace = pace_to_hide_loading(prompt_bytes, num_layers, full_s, cost)
    at = blend_s(prompt_bytes, num_layers, full_s, cost, pace.pays_bytes_per_s)
    assert at == pytest.approx(full_s, rel=1e-6)
    assert blend_s(prompt_bytes, num_layers, full_s, cost, pace.pays_bytes_per_s * 1.01) < full_s
    assert blend_s(prompt_bytes, num_layers, full_s, cost, pace.pays_bytes_per_s * 0.99) > full_s


@given(prompts, layers, seconds, costs, speeds, st.floats(1, 1e3))
def test_a_faster_network_never_slows_a_blend(
    prompt_bytes: int, num_layers: int, full_s: float, cost: float, bytes_per_s: float, factor: float
) -> None:
    slow = blend_s(prompt_bytes, num_layers, full_s, cost, bytes_per_s)
    fast = blend_s(prompt_bytes, num_layers, full_s, cost, bytes_per_s * factor)
    assert fast <= slow * (1 + 1e-9)
    assert fast >= cost * full_s


@given(prompts, layers, seconds, costs)
def test_where_loading_hides_only_the_first_layer_is_waited_for(
    prompt_bytes: int, num_layers: int, full_s: float, cost: float
) -> None:
    pace = pace_to_hide_loading(prompt_bytes, num_layers, full_s, cost)
    at = blend_s(prompt_bytes, num_layers, full_s, cost, pace.hides_bytes_per_s)
    first_layer_s = prompt_bytes / num_layers / pace.hides_bytes_per_s
    assert at == pytest.approx(cost * full_s + first_layer_s, rel=1e-6)


@given(st.integers(1, 10**9), st.integers(1, 4096), st.integers(1, 5), st.sampled_from(list(Codec)))
def test_sizes_grow_with_the_corpus_and_fit_the_tiers(
    corpus_tokens: int, chunk_tokens: int, replication: int, codec: Codec
) -> None:
    layout = model_size(MISTRAL_7B).layout
    work = SizingWorkload(corpus_tokens, chunk_tokens, replication=replication)
    size = codec_size(layout, codec, work)
    more = codec_size(layout, codec, SizingWorkload(corpus_tokens * 2, chunk_tokens, replication=replication))
    assert size.corpus_bytes <= more.corpus_bytes <= 2 * size.corpus_bytes
    assert size.ram_bytes <= size.corpus_bytes < size.ssd_bytes
    assert size.corpus_bytes >= size.bytes_per_token * corpus_tokens * replication * (1 - 1e-9)


def test_the_dtype_is_the_one_that_the_engine_runs_in() -> None:
    assert engine_dtype({"torch_dtype": "float32"}) == "bfloat16"
    assert engine_dtype({"torch_dtype": "float32"}, "float32") == "float32"
    assert engine_dtype({"dtype": "float16", "text_config": {"dtype": "bfloat16"}}) == "float16"
    assert engine_dtype({"text_config": {"torch_dtype": "float16"}}) == "float16"
    assert engine_dtype({}) == "bfloat16"


def test_recurrent_layers_store_their_inputs() -> None:
    shared = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
    qwen3_next = shared | {
        "num_hidden_layers": 48,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    assert model_size(qwen3_next).layout.chunk_bytes(Codec.RAW, 1) == 2 * (36 * 8256 + 12 * 1024)
    as_published = qwen3_next | {"layer_types": None, "full_attention_interval": 4}
    assert model_size(as_published).layout == model_size(qwen3_next).layout
    lfm2 = shared | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    assert model_size(lfm2).layout.chunk_bytes(Codec.RAW, 1) == 2 * (2048 + 1024)
    granite = shared | {
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
    }
    assert model_size(granite).layout.chunk_bytes(Codec.RAW, 1) == 2 * (3072 + 256 + 48 + 1024)
    mamba2 = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
    nemotron_h = shared | mamba2 | {"hybrid_override_pattern": "M-M*-ME"}
    layout = model_size(nemotron_h).layout
    assert (layout.num_layers, layout.chunk_bytes(Codec.RAW, 1)) == (4, 2 * (3 * (10240 + 128) + 1024))
