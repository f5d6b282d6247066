"""What a pass changes about vLLM's model while it runs, and what its attention builders are told."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs

from kintsugi.core.errors import NotBlendable
from kintsugi.engine.worker.calls import LayerCalls
from kintsugi.engine.worker.model import (
    CacheGroup,
    Layer,
    LoadedModel,
    _cache_groups,
    _disabled_ops,
    _layers_by_spec,
    _owners_of,
    _require_attention,
    _require_blendable_states,
    _require_one_each,
    _require_text_embeddings,
    _without_graphs,
)

CUDA = torch.device("cuda")


class OnGpu(nn.Module):
    """A decoder layer whose weights lie on a GPU, as far as anybody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.act = SiluAndMul()

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=CUDA)])


@pytest.fixture
def config() -> Any:
    """vLLM's, with the operations disabled as for a model that it compiles."""
    config = VllmConfig()
    config.compilation_config.custom_ops = ["none"]
    with set_current_vllm_config(config):
        yield config


def model_of(config: VllmConfig, ops: tuple[CustomOp, ...] = ()) -> LoadedModel:
    attention = SimpleNamespace(num_kv_heads=2, head_size=16, head_size_v=16)
    layers: Any = (SimpleNamespace(attention=attention),) * 8
    calls, kv_heads = LayerCalls((), (), ()), tuple[int, ...]()
    return LoadedModel(config, nn.Module(), layers, CUDA, torch.bfloat16, 0.2, calls, kv_heads, ops)


def test_layer_calls_run_the_fused_operations_and_the_engine_does_not(config: VllmConfig) -> None:
    layer = OnGpu()
    plain = layer.act._forward_method
    assert plain != layer.act.forward_cuda
    ops = _disabled_ops(config, [layer])
    assert ops == (layer.act,)
    with model_of(config, ops).custom_ops_on():
        assert layer.act._forward_method == layer.act.forward_cuda
    assert layer.act._forward_method is plain
    with pytest.raises(RuntimeError, match="within"), model_of(config, ops).custom_ops_on():
        raise RuntimeError("within")
    assert layer.act._forward_method is plain


def test_operations_that_vllm_has_enabled_are_left_alone(config: VllmConfig) -> None:
    layer = OnGpu()
    config.compilation_config.disabled_custom_ops.clear()
    assert _disabled_ops(config, [layer]) == ()


def test_a_cpu_keeps_its_own_operations(config: VllmConfig) -> None:
    assert _disabled_ops(config, [nn.Sequential(SiluAndMul(), nn.Linear(1, 1))]) == ()


def test_builders_are_told_of_no_graphs() -> None:
    """FlashAttention 3 sizes a buffer by `max_num_seqs` with them, and more runs than that are an error."""
    config = VllmConfig()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    assert _without_graphs(config).compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL


@pytest.mark.parametrize("name", ["FLASHINFER", "TRITON_FLASHINFER", "FLEX_ATTENTION"])
def test_a_backend_that_keeps_one_batch_is_declined_before_its_builder_is_made(name: str) -> None:
    """A pass prepares several batches, of more pseudo-requests than `max_num_seqs`, and runs them later."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    groups: Any = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)])
    backend = type("Backend", (), {"get_name": staticmethod(lambda: name)})
    attentions = {"layer.0": SimpleNamespace(attn_backend=backend)}
    with pytest.raises(NotBlendable, match=f"the attention backend {name}, whose metadata") as raised:
        _cache_groups(VllmConfig(), groups, attentions, CUDA)
    assert raised.value.reason == "attention_backend"
    assert str(raised.value).endswith("start vLLM with attention_backend FLASH_ATTN or TRITON_ATTN")


@dataclass
class PrefillBackend:
    """Stands in for vLLM's, which computes with the batch that was prepared last."""

    prepared: Any = None

    def clone(self) -> PrefillBackend:
        return PrefillBackend()


class LatentBuilder:
    """Stands in for vLLM's of latent attention: all of its metadata is about one prefill backend."""

    def __init__(self) -> None:
        self._prefill_backend = PrefillBackend()

    def build(self, common_prefix_len: int, common: Any) -> PrefillBackend:
        self._prefill_backend.prepared = common
        return self._prefill_backend


def test_metadata_of_latents_outlives_the_next_batch() -> None:
    """Two passes prepare a batch each before either computes."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    group = CacheGroup(0, 0, spec, ("layer.0",), 16, 16, LatentBuilder(), kernel_serves=False)
    batches: list[Any] = ["one", "two"]
    metadata = [group.build_metadata(batch) for batch in batches]
    assert [one.prepared for one in metadata] == batches


class Attention:
    def __init__(self, shares_with: str | None = None) -> None:
        self.kv_sharing_target_layer_name = shares_with


class ChunkedLocalAttention(Attention):
    """As Llama 4's."""


class MLAAttention:
    """As DeepSeek-V3's; as V3.2's where an index chooses."""

    def __init__(self, use_sparse: bool = False) -> None:
        self.use_sparse = use_sparse


class CompressedMLAAttention(MLAAttention):
    """Any subclass may keep what it likes."""


class MambaBase:
    """What vLLM's recurrent layers have in common."""


class KimiDeltaAttention(MambaBase):
    """As Kimi Linear's."""


class ShortConv(MambaBase):
    """As LFM2's."""


class IndexerCache:
    """As DeepSeek V3.2's."""


class EncoderOnlyAttention(Attention):
    """Any other subclass may see what it likes."""


@pytest.mark.parametrize("layer", [Attention(), ChunkedLocalAttention(), MLAAttention(), ShortConv()])
def test_known_layers_are_driven(layer: Any) -> None:
    _require_attention("model.layers.3.self_attn.attn", layer)


@pytest.mark.parametrize(
    ("layer", "reason", "feature"),
    [
        (CompressedMLAAttention(), "mla", "layer 3 has multi-head latent attention of another kind"),
        (
            MLAAttention(use_sparse=True),
            "indexed_attention",
            "layer 3 has attention to tokens that an index chooses",
        ),
        (KimiDeltaAttention(), "recurrent", "layer 3 has a recurrent layer of a kind that is not blended"),
        (IndexerCache(), "indexed_attention", "layer 3 has attention to tokens that an index chooses"),
        (Attention("model.layers.1.attn"), "shared_kv", "layer 3 has the KV of model.layers.1.attn"),
        (EncoderOnlyAttention(), "attention", "layer 3 has an unknown kind of attention"),
        (None, "attention", "NoneType"),
    ],
)
def test_another_attention_is_declined_in_the_words_of_its_kind(
    layer: Any, reason: str, feature: str
) -> None:
    with pytest.raises(NotBlendable, match=feature) as raised:
        _require_attention("model.layers.3.mixer", layer)
    assert raised.value.reason == reason
    assert "prefix caching works as before" in str(raised.value)


class Model(nn.Module):
    """What vLLM's models have in common; `scale` stands for whatever a wrapper does to embeddings."""

    def __init__(self, inner: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def compute_logits(self) -> None:
        raise NotImplementedError

    def embed_input_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        inner: Any = self.inner
        embedded: torch.Tensor = (
            inner.embed_input_ids(token_ids) if isinstance(inner, Model) else inner(token_ids)
        )
        return embedded * self.scale


def test_the_language_model_is_found_within_the_model_that_vllm_runs() -> None:
    embedding = nn.Embedding(16, 4)
    language = Model(embedding)
    assert _owners_of([embedding]) == (language, language)
    whole = Model(language)
    assert _owners_of([embedding]) == (language, whole)
    _require_text_embeddings(language, whole)


def test_a_wrapper_with_embeddings_of_its_own_is_declined() -> None:
    language = Model(nn.Embedding(16, 4))
    _require_text_embeddings(language, language)
    other: Any = nn.Module()
    for whole in (Model(language, 2.0), other):
        with pytest.raises(NotBlendable, match="embeddings of text") as raised:
            _require_text_embeddings(language, whole)
        assert raised.value.reason == "multimodal"


def test_layers_of_one_cache_group_have_metadata_of_their_own_shape() -> None:
    def spec_of(kv_heads: int) -> FullAttentionSpec:
        return FullAttentionSpec(block_size=16, num_kv_heads=kv_heads, head_size=32, dtype=torch.bfloat16)

    names = ["layer.0", "layer.1", "layer.2"]
    uniform = UniformTypeKVCacheSpecs(16, dict(zip(names, map(spec_of, (2, 1, 2)), strict=True)))
    assert _layers_by_spec(uniform, names) == {spec_of(2): ["layer.0", "layer.2"], spec_of(1): ["layer.1"]}
    assert _layers_by_spec(spec_of(2), names) == {spec_of(2): names}


@pytest.mark.parametrize(
    ("places", "recurrent", "expected"),
    [
        ([0, 2, 2, 3], [True, False, True, False], "recurrent: layer 2 has an attention beside a recurrence"),
        ([0, 0], [False, False], "architecture: layer 0 has several attentions"),
    ],
)
def test_a_decoder_layer_that_mixes_tokens_twice_is_declined(
    places: list[int], recurrent: list[bool], expected: str
) -> None:
    with pytest.raises(NotBlendable, match=expected):
        _require_one_each(places, recurrent)


def test_decoder_layers_may_mix_no_tokens() -> None:
    _require_one_each([0, 2, 5], [True, False, True])


@pytest.mark.parametrize(
    ("recurrent", "ranks", "feature"),
    [
        ([True, True], 1, "no layer that attends, only recurrent ones"),
        ([True, False], 2, "recurrent layers, whose inputs are not split over tensor-parallel ranks"),
        ([True, False], 1, None),
        ([False, False], 2, None),
    ],
)
def test_recurrent_layers_are_declined_without_attention_and_on_several_ranks(
    recurrent: list[bool], ranks: int, feature: str | None
) -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks))
    layers: Any = [SimpleNamespace(group=SimpleNamespace(is_recurrent=one)) for one in recurrent]
    if feature is None:
        _require_blendable_states(config, layers)
        return
    with pytest.raises(NotBlendable, match=feature) as raised:
        _require_blendable_states(config, layers)
    assert raised.value.reason == "recurrent"
    assert "every prompt is prefilled in full" in str(raised.value)


def test_a_layer_is_called_with_the_modules_behind_it() -> None:
    modules, called = tuple(nn.Linear(1, 1) for _ in range(3)), list[nn.Module]()
    call: Any = SimpleNamespace(run=lambda module, _hidden: called.append(module))
    calls = LayerCalls(modules, (call,) * 3, ())
    layers = tuple(
        Layer(index, "", modules[steps.start], None, cast(Any, None), steps)
        for index, steps in enumerate((range(2), range(2, 3)))
    )
    model = LoadedModel(cast(Any, None), nn.Module(), layers, CUDA, torch.bfloat16, 0.2, calls, (1, 1))
    model.run_layer(layers[0], cast(Any, None))
    assert called == [*modules[:2]]
