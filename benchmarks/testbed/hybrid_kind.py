"""The interface of a kind of recurrence that is trained in the place of the bundled model's attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.testbed.converted import write_files
from benchmarks.testbed.model import LOCAL_HEADS, Attention, ModelShape, TinyModel

ATTENDING = (1, 4)
"""Layers that keep their attention. Without it in layer 1 the bundled model resolves no reference, without it
in both no question; the other layers' attention it hardly uses, but the first's, which is local."""
TAPS = 4
"""Width of the convolution before a recurrence."""


class Kind(ABC):
    """A kind of recurrence, and the architecture that has it."""

    @abstractmethod
    def make_mixer(self, shape: ModelShape) -> nn.Module:
        """Return a recurrent layer that gives nothing yet."""

    @abstractmethod
    def look_back(self, mixer: Any, attention: Attention, inputs: Tensor) -> None:
        """Let a recurrent layer begin as what the local heads do. ``inputs`` `[tokens, hidden]` of the layer,
        after its norm."""

    def keep(self, attention: Attention, inputs: Tensor, shape: ModelShape) -> nn.Module:
        """Return an attention that stays, in the architecture's form."""
        return attention

    @abstractmethod
    def config_of(self, shape: ModelShape) -> dict[str, object]:
        """Return the checkpoint's config."""

    @abstractmethod
    def checkpoint_weights(self, model: TinyModel) -> dict[str, Tensor]:
        """Return the state dict by the architecture's names."""

    def write_checkpoint(self, model: TinyModel, folder: Path) -> None:
        """Write everything that transformers and vLLM load."""
        weights = self.checkpoint_weights(model)
        write_files(folder, self.config_of(model.shape), {n: t.contiguous() for n, t in weights.items()})


def layer_types(shape: ModelShape) -> list[str]:
    """Return the kinds of the layers, as configs name them."""
    count = shape.num_hidden_layers
    return ["full_attention" if index in ATTENDING else "linear_attention" for index in range(count)]


def constant_of(inputs: Tensor) -> Tensor:
    """Return `[hidden]`, whose product with every one of ``inputs`` `[tokens, hidden]` is nearly 1."""
    gram = inputs.T @ inputs + 1e-3 * len(inputs) * torch.eye(inputs.shape[1])
    found: Tensor = torch.linalg.solve(gram, inputs.sum(0))
    return found


def places_back() -> list[tuple[int, int, int]]:
    """Return (place, head, tokens back) of the local heads that a convolution reaches."""
    reached = [one for one in LOCAL_HEADS if one[1] < TAPS]
    return [(place, head, back) for place, (head, back) in enumerate(reached)]
