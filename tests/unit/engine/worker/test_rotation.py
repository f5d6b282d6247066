"""A layer's rotation is found by what it does to keys, wherever the model applies it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kintsugi.core.errors import NotBlendable
from kintsugi.engine.worker.calls import LayerCall, PerToken
from kintsugi.engine.worker.rotation import KeyRotation, Projected, RotationFinder, sources_of
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.stack import Hidden

HIDDEN, HEADS, HEAD_DIM, POSITIONS = 24, 2, 16, 3000


def rotary_of(share: float = 1.0, is_neox: bool = True, scale: float = 1.0) -> Rotary:
    half = int(HEAD_DIM * share) // 2
    angles = torch.arange(POSITIONS)[:, None] * 100.0 ** -(torch.arange(half) / half)
    return Rotary(angles.cos() * scale, angles.sin() * scale, is_neox)


class Rotation(nn.Module):
    """As vLLM's: positions first, heads flat, in place."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        for flat in (query, key):
            flat.copy_(self.rotary.rotate(flat.view(len(flat), -1, HEAD_DIM), positions).flatten(1))
        return query, key


Change = Callable[[Tensor, Tensor], Tensor]
"""Of keys or values `[tokens, heads, head_dim]`, at positions."""


class Layer(nn.Module):
    def __init__(
        self, rotation: nn.Module | None = None, key: Change | None = None, value: Change | None = None
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(2, HIDDEN, HEADS * HEAD_DIM, generator=generator)
        self.rotary_emb, self.key, self.value = rotation, key, value

    def project(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (states @ weight for weight in self.weight)
        if self.rotary_emb is not None:
            _, key = self.rotary_emb(positions, key.repeat(1, 2), key)
        key, value = (one.view(len(one), HEADS, HEAD_DIM) for one in (key, value))
        key = key if self.key is None else self.key(key, positions)
        return key, value if self.value is None else self.value(value, positions)


def found(
    layer: Layer,
    beside: Callable[[Tensor], tuple[Tensor, ...]] = lambda _: (),
    learned: float = 0.0,
) -> KeyRotation:
    def embed(positions: Tensor) -> Hidden:
        states = torch.ones(len(positions), HIDDEN) + learned * positions[:, None]
        return Hidden(states, None, beside(positions))

    def project(_layer: int, hidden: Hidden, positions: Tensor) -> Projected:
        projected = Projected(torch.empty(0), torch.empty(0))
        hooks = sources_of(layer, positions, projected.sources)
        projected.key, projected.value = layer.project(hidden.states, positions)
        for hook in hooks:
            hook.remove()
        return projected

    slots = [PerToken(0, slot) for slot in range(len(beside(torch.arange(2))))]
    layout = pytree.tree_structure((tuple(range(len(slots))), {}))
    call = LayerCall(layout, tuple(slots), 0, None, layout, 0, None)
    return RotationFinder(embed, project, [call], POSITIONS).find(0)


def assert_same(got: Rotary | None, expected: Rotary) -> None:
    assert got is not None
    keys = torch.randn(40, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    positions = torch.randint(0, POSITIONS, (40,), generator=torch.Generator().manual_seed(2))
    assert torch.allclose(got.rotate(keys, positions), expected.rotate(keys, positions), atol=1e-5)


ROTARIES = {
    "halves": rotary_of(),
    "neighbours": rotary_of(is_neox=False),
    "half of the head, scaled": rotary_of(0.5, scale=1.3),
    "a quarter, neighbours": rotary_of(0.25, is_neox=False),
}


@pytest.mark.parametrize("kind", ROTARIES)
def test_a_module_that_a_layer_calls(kind: str) -> None:
    rotation = found(Layer(Rotation(ROTARIES[kind])))
    assert_same(rotation.rotary, ROTARIES[kind])
    assert rotation.source is not None
    assert isinstance(rotation.source.module, Rotation)
    assert rotation.source.key == 2


def test_a_module_that_a_layer_owns_and_does_not_call() -> None:
    layer = Layer()
    layer.rotary_emb = None
    layer.unused = Rotation(rotary_of())
    assert found(layer) == KeyRotation(None)


def test_keys_that_are_normalised_behind_the_rotation() -> None:
    """As Llama 4's: the rotation is the module's, the stored key follows from what attention gets."""

    def normalise(key: Tensor, _: Tensor) -> Tensor:
        return key / key.square().mean(-1, keepdim=True).sqrt()

    rotation = found(Layer(Rotation(rotary_of()), key=normalise))
    assert_same(rotation.rotary, rotary_of())
    assert rotation.source is None


@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_keys_that_a_norm_weighs_behind_the_rotation(spread: float) -> None:
    """As Hunyuan's: elements of a pair have weights of their own, so no rotation gives the key elsewhere."""
    weights = 1 + spread * torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(4))

    def normalise(key: Tensor, _: Tensor) -> Tensor:
        return (key / key.square().mean(-1, keepdim=True).sqrt() * weights).bfloat16()

    with pytest.raises(NotBlendable, match="such as keys weighted by a norm after the rotation") as raised:
        found(Layer(Rotation(rotary_of()), key=normalise))
    assert raised.value.reason == "rope"


def repeated(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers hands them on: a batch of one, each column twice."""
    if rotary.is_neox:
        tables = [torch.cat((table, table), -1) for table in (rotary.cos, rotary.sin)]
    else:
        tables = [table.repeat_interleave(2, -1) for table in (rotary.cos, rotary.sin)]
    cos, sin = (table[positions][:, None] for table in tables)
    return cos, sin


@pytest.mark.parametrize("kind", ROTARIES)
def test_a_function_that_is_given_cosines_and_sines(kind: str) -> None:
    rotary = ROTARIES[kind]
    rotation = found(Layer(key=rotary.rotate), lambda positions: (positions, *repeated(rotary, positions)))
    assert_same(rotation.rotary, rotary)
    assert rotation.source is None


def test_cosines_and_sines_that_a_layer_does_not_use() -> None:
    assert found(Layer(), lambda positions: repeated(rotary_of(), positions)) == KeyRotation(None)


def test_a_rotation_by_the_longest_position() -> None:
    near, far = rotary_of(), rotary_of(scale=2.0)

    def at(positions: Tensor) -> Rotary:
        return far if int(positions.max()) > 2000 else near

    layer = Layer(key=lambda key, positions: at(positions).rotate(key, positions))
    with pytest.raises(NotBlendable) as raised:
        found(layer, lambda positions: repeated(at(positions), positions))
    assert raised.value.reason == "rope_length"
    assert "max_model_len" in str(raised.value)


def test_a_slow_pair_that_turns_by_another_angle_in_long_prompts() -> None:
    """Near positions do not show it, and the table is made of long prompts."""

    def at(positions: Tensor) -> Rotary:
        slow = 1e-5 if int(positions.max()) < 2000 else 4e-5
        angles = torch.arange(POSITIONS)[:, None] * torch.tensor([1.0, slow])
        return Rotary(angles.cos(), angles.sin(), is_neox=True)

    layer = Layer(key=lambda key, positions: at(positions).rotate(key, positions))
    with pytest.raises(NotBlendable) as raised:
        found(layer, lambda positions: repeated(at(positions), positions))
    assert raised.value.reason == "rope_length"


class NormAndRotation(Rotation):
    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(positions, query, key / key.square().mean(-1, keepdim=True).sqrt())


def test_a_module_that_does_more_than_rotate() -> None:
    """Its argument is not the key before the rotation."""
    rotation = found(Layer(NormAndRotation(rotary_of())))
    assert rotation.source is None
    # What a norm makes of unit vectors scales the table, which taking it off and putting it on undoes.
    assert rotation.rotary is not None
    keys, at, to = torch.randn(9, HEADS, HEAD_DIM), torch.arange(9), torch.arange(9) + 700
    moved = rotation.rotary.rotate(rotation.rotary.unrotate(rotary_of().rotate(keys, at), at), to)
    assert torch.allclose(moved, rotary_of().rotate(keys, to), atol=1e-4)


def test_a_module_that_turns_a_part_of_the_head_which_does_not_lead() -> None:
    """As MiniCPM 3's: the module sees that part alone, one for all heads."""
    part = HEAD_DIM // 2
    angles = torch.arange(POSITIONS)[:, None] * 100.0 ** -(torch.arange(part // 2) / part)
    rotary = Rotary(angles.cos(), angles.sin(), is_neox=True)

    class PartRotation(nn.Module):
        def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return rotary.rotate(query, positions), rotary.rotate(key, positions)

    def turn_last_part(key: Tensor, positions: Tensor) -> Tensor:
        shared = key[:, :1, part:]
        _, turned = rotation(positions, shared, shared)
        return torch.cat((key[..., :part], turned.expand(-1, HEADS, -1)), -1)

    rotation = PartRotation()
    layer = Layer(key=turn_last_part)
    layer.part = rotation
    with pytest.raises(NotBlendable, match="a rotation without a table") as raised:
        found(layer)
    assert raised.value.reason == "rope"


def test_embeddings_of_absolute_positions() -> None:
    with pytest.raises(NotBlendable, match="the model has learned embeddings") as raised:
        found(Layer(), learned=1e-3)
    assert raised.value.reason == "learned_positions"


def test_values_that_depend_on_their_position() -> None:
    with pytest.raises(NotBlendable) as raised:
        found(Layer(value=lambda value, positions: value + positions[:, None, None]))
    assert raised.value.reason == "learned_positions"


@pytest.mark.parametrize("beside", [lambda _: (), lambda positions: repeated(rotary_of(0.5), positions)])
def test_keys_that_no_table_explains(beside: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    layer = Layer(key=lambda key, positions: key * (1 + positions[:, None, None]))
    with pytest.raises(NotBlendable) as raised:
        found(layer, beside)
    assert raised.value.reason == "rope"
    assert "layer 0 has keys that depend on more than their position" in str(raised.value)
