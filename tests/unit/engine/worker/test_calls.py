"""Layers are called as their model calls them, whatever it passes and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kintsugi.core.errors import NotBlendable
from kintsugi.engine.worker.calls import LayerCalls, watch_calls
from kintsugi.fusor.stack import Hidden

WIDTH, LAYERS, VOCAB = 8, 3, 50
SAMPLES = (
    (torch.arange(11) * 7 % VOCAB, torch.arange(11)),
    (torch.arange(7) * 5 % VOCAB, torch.arange(5, 12)),
)


class Layer(nn.Module):
    """No token looks at another, so that rows may run alone."""

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator)

    def mix(self, states: Tensor, positions: Tensor) -> Tensor:
        return torch.tanh(states @ self.weight) + torch.sin(positions.float())[..., None]


class WithResidual(Layer):
    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden.clone()
        else:
            residual += hidden  # in place, as vLLM's norms
        return self.mix(residual, positions), residual


class StatesAlone(Layer):
    def forward(self, position_ids: Tensor, hidden: Tensor) -> Tensor:
        return hidden + self.mix(hidden, position_ids)


class ResidualIsNotPassedOn(Layer):
    def forward(self, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + self.mix(hidden, positions), hidden


class StatesFirst(WithResidual):
    def forward(  # type: ignore[override]
        self, x: Tensor, positions: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return super().forward(positions, x, residual)


class Named(Layer):
    """As transformers' layers: a batch of one, names, cosines and sines, and an embedding of its own."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert position_embeddings is not None
        assert kwargs["use_cache"] is False
        cos, sin = position_embeddings
        return hidden_states + self.mix(hidden_states, kwargs["position_ids"]) * cos + sin + kwargs["own"]


class Model(nn.Module):
    def __init__(self, kind: type[Layer], loop: Callable[[Model, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9))
        self.layers = nn.ModuleList(kind(index) for index in range(LAYERS))
        self.loop = loop

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self.loop(self, token_ids, positions, self.embedding[token_ids] * 3)


def with_residual(model: Model, _ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    residual = None
    for layer in model.layers:
        hidden, residual = layer(positions, hidden, residual)
    assert residual is not None
    return hidden + residual


def states_first(model: Model, _ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    residual = None
    for layer in model.layers:
        hidden, residual = layer(hidden, positions, residual)
    assert residual is not None
    return hidden + residual


def states_alone(model: Model, _ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden = layer(positions, hidden)
    return hidden


def residual_dropped(model: Model, _ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden, _ = layer(positions, hidden)
    return hidden


def named(model: Model, token_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    angles = positions.float()[None, :, None].expand(1, -1, WIDTH)
    both = (angles.cos(), angles.sin())
    own = model.embedding[token_ids].view(1, -1, 1, WIDTH).expand(1, -1, LAYERS, WIDTH)
    hidden, position_ids = hidden[None], positions[None]
    for index, layer in enumerate(model.layers):
        hidden = layer(
            hidden,
            attention_mask=None,
            position_embeddings=both,
            position_ids=position_ids,
            own=own[:, :, index] * index,
            use_cache=False,
        )
    return hidden[0]


MODELS = {
    "with residual": (WithResidual, with_residual),
    "states alone": (StatesAlone, states_alone),
    "residual not passed on": (ResidualIsNotPassedOn, residual_dropped),
    "states first": (StatesFirst, states_first),
    "named": (Named, named),
}


def watched(model: Model) -> LayerCalls:
    return watch_calls(list(model.layers), model, model, SAMPLES)


@pytest.mark.parametrize("name", MODELS)
def test_layers_run_alone_over_some_tokens_as_in_the_model(name: str) -> None:
    model = Model(*MODELS[name])
    token_ids, positions = torch.arange(20) % VOCAB, torch.arange(100, 120)
    expected = model(token_ids, positions)
    calls = watched(model)
    hidden = calls.embed(model, token_ids, positions)
    kept = torch.tensor([0, 3, 4, 11, 19])
    rows = torch.arange(20)
    for index, (layer, call) in enumerate(zip(model.layers, calls.calls, strict=True)):
        if index == 1:
            hidden, rows = hidden.take(kept), rows[kept]
        call.run(layer, hidden)
    got = hidden.states if hidden.residual is None else hidden.states + hidden.residual
    assert torch.allclose(got.reshape(len(kept), WIDTH), expected[kept], atol=1e-5)
    # The model itself is as it was.
    assert torch.equal(model(token_ids, positions), expected)


def test_what_layers_share_is_kept_once() -> None:
    calls = watched(Model(*MODELS["named"]))
    # Cosines, sines and positions of all layers; an embedding for each.
    assert len(calls.sources) == 3 + LAYERS


def test_embedding_runs_no_layer() -> None:
    model = Model(*MODELS["states alone"])
    calls = watched(model)
    model.layers[0].weight = None  # type: ignore[assignment]
    hidden = calls.embed(model, *SAMPLES[0])
    assert torch.equal(hidden.states, model.embedding[SAMPLES[0][0]] * 3)


def between(model: Model, _ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden = layer(positions, hidden) * 2
    return hidden


def in_place_between(model: Model, _ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden = layer(positions, hidden)
        hidden *= 2
    return hidden


def twice(model: Model, _ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    for layer in [*model.layers, *model.layers]:
        hidden = layer(positions, hidden)
    return hidden


class WithFirst(Layer):
    def forward(self, positions: Tensor, hidden: Tensor, first: Tensor) -> Tensor:
        return hidden + self.mix(first, positions)


def with_the_first_layers_output(model: Model, _ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
    first = torch.zeros_like(hidden)
    for index, layer in enumerate(model.layers):
        hidden = layer(positions, hidden, first)
        first = hidden + 1 if index == 0 else first
    return hidden


@pytest.mark.parametrize(
    ("kind", "loop", "feature"),
    [
        (StatesAlone, between, "layer 1 has an input that is not an output of the previous layer"),
        (StatesAlone, in_place_between, "layer 1 has an input that the model changes between the layers"),
        (StatesAlone, twice, "layers that do not run once each, in order: 0, 1, 2, 0, 1, 2"),
        (
            WithFirst,
            with_the_first_layers_output,
            "layer 1 has an argument that depends on the outputs of earlier",
        ),
    ],
)
def test_a_model_that_does_more_than_run_its_layers_is_declined(
    kind: type[Layer], loop: Callable[[Model, Tensor, Tensor, Tensor], Tensor], feature: str
) -> None:
    with pytest.raises(NotBlendable, match=feature) as raised:
        watched(Model(kind, loop))
    assert raised.value.reason == "layer_calls"


def test_a_single_layer_is_called_as_its_model_calls_it() -> None:
    model = Model(*MODELS["states alone"])
    del model.layers[1:]
    calls = watched(model)
    hidden = calls.embed(model, *SAMPLES[1])
    calls.calls[0].run(model.layers[0], hidden)
    assert torch.allclose(hidden.states, model(*SAMPLES[1]))
    assert isinstance(hidden, Hidden)
