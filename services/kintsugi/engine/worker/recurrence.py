"""Stores a recurrent layer's inputs per token, and runs vLLM's own code for the layer over chosen tokens.

The state of such a layer belongs to no single token, but its inputs do: for a short convolution, the values
that it convolves; for Gated DeltaNet, the projected q, k and v and the inputs of decay and write strength;
for Mamba-2, x, B, C and dt. They are stored like the K and V of attention (docs/adr/0018).

vLLM computes convolution and scan of all requests of a step in one operation of `torch.ops.vllm`, between the
projections of the layer. Here the operation is replaced for one layer call: so the projections, the gate and
the output projection run over the computed tokens alone, and the operation over all tokens.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kintsugi.core.layout import Part, PartKind
from kintsugi.engine.worker.calls import replace_forward


class RecurrentKV(ABC):
    """The "KV" of a recurrent layer, in one head: its inputs in place of K, their gates in place of V."""

    heads = 1
    query_width = 0
    key_width: int
    value_width: int
    """0 if the layer has no gates."""
    output_width: int
    """Elements of a token's output of convolution and scan."""

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer

    @property
    def token_width(self) -> int:
        """Elements that are stored per token."""
        return self.key_width + self.value_width

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors that a chunk stores for each head."""
        gates = (Part(PartKind.GATE, self.value_width),) if self.value_width else ()
        return (Part(PartKind.INPUT, self.key_width), *gates)

    @property
    @abstractmethod
    def operation(self) -> str:
        """Name of the operation in `torch.ops.vllm`."""

    @abstractmethod
    def tell_apart(self, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return inputs and gates, `[tokens, width]`, from the operation's arguments. Gates may be `[tokens,
        0]`."""

    @abstractmethod
    def scan(
        self, operation: Callable[..., Any], name: object, inputs: Tensor, gates: Tensor, outputs: Tensor
    ) -> None:
        """Run the operation over tokens given by their inputs and gates; ``name`` is its last argument.
        ``outputs``: `[tokens, output_width]`, filled."""

    @abstractmethod
    def finish(self, arguments: tuple[Any, ...], outputs: Tensor) -> None:
        """Pass the outputs of the tokens in ``arguments``, `[tokens, output_width]`, on to the layer."""


class ShortConvolution(RecurrentKV):
    """vLLM's `ShortConv` (LFM2): an input B·x, convolved, then gated by C. Its operation contains the
    projections."""

    operation = "short_conv"
    value_width = 0

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self.key_width = self.output_width = int(mixer.conv.weight.shape[0])

    def tell_apart(self, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        hidden = arguments[0]
        b, self._gate, x = self._mixer.in_proj(hidden)[0].chunk(3, dim=-1)
        return b * x, hidden.new_empty(len(hidden), 0)

    def scan(
        self, operation: Callable[..., Any], name: object, inputs: Tensor, gates: Tensor, outputs: Tensor
    ) -> None:
        ones = torch.ones_like(inputs)
        with (
            replace_forward(self._mixer.in_proj, lambda _: (torch.cat((inputs, ones, ones), -1), None)),
            replace_forward(self._mixer.out_proj, lambda convolved: (convolved, None)),
        ):
            operation(inputs, outputs, name)

    def finish(self, arguments: tuple[Any, ...], outputs: Tensor) -> None:
        projected, _ = self._mixer.out_proj(self._gate * outputs)
        arguments[1][: len(projected)] = projected


class GatedDeltaNet(RecurrentKV):
    """vLLM's `QwenGatedDeltaNetAttention` (Qwen3-Next, Qwen3.5): q, k and v before their convolution, and the
    inputs b of write strengths and a of decays."""

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self._heads, self._width = int(mixer.num_v_heads), int(mixer.head_v_dim)
        self.key_width = 2 * int(mixer.key_dim) + int(mixer.value_dim)
        self.value_width = 2 * self._heads
        self.output_width = self._heads * self._width

    @property
    def operation(self) -> str:
        on_cpu = self._mixer.conv1d.weight.device.type == "cpu"
        return "cpu_gdn_attention_core" if on_cpu else "qwen_gdn_attention_core"

    def tell_apart(self, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        mixed, b, a, *_ = arguments
        return mixed, torch.cat((b, a), -1)

    def scan(
        self, operation: Callable[..., Any], name: object, inputs: Tensor, gates: Tensor, outputs: Tensor
    ) -> None:
        b, a = (part.contiguous() for part in gates.chunk(2, -1))
        operation(inputs, b, a, outputs.view(-1, self._heads, self._width), name)

    def finish(self, arguments: tuple[Any, ...], outputs: Tensor) -> None:
        arguments[3].copy_(outputs.view(arguments[3].shape))


class Mamba2(RecurrentKV):
    """vLLM's `MambaMixer2` (Granite 4): x, B and C before their convolution, and dt."""

    operation = "mamba_mixer2"

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self._gate_width = int(mixer.tped_intermediate_size)
        self.key_width, self.value_width = int(mixer.tped_conv_size), int(mixer.tped_dt_size)
        self.output_width = self.value_width * int(mixer.head_dim)

    def tell_apart(self, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        inputs, gates = arguments[0][:, self._gate_width :].split((self.key_width, self.value_width), -1)
        return inputs, gates

    def scan(
        self, operation: Callable[..., Any], name: object, inputs: Tensor, gates: Tensor, outputs: Tensor
    ) -> None:
        # The gate is a part of the argument that the operation does not read.
        gate = inputs.new_empty(1, self._gate_width).expand(len(inputs), -1)
        operation(torch.cat((gate, inputs, gates), -1), outputs, name)

    def finish(self, arguments: tuple[Any, ...], outputs: Tensor) -> None:
        arguments[1].copy_(outputs)


KINDS: dict[str, type[RecurrentKV]] = {
    "ShortConv": ShortConvolution,
    "QwenGatedDeltaNetAttention": GatedDeltaNet,
    "MambaMixer2": Mamba2,
}
"""By the class of vLLM's layer."""


def recurrent_kind(layer: Any) -> type[RecurrentKV] | None:
    """Return the kind of a recurrent layer that can be blended; None for every other layer."""
    return KINDS.get(type(layer).__name__)


@contextlib.contextmanager
def replace_operation(name: str, core: Callable[..., None]) -> Iterator[None]:
    """Replace an operation of `torch.ops.vllm` in the block. ``core`` gets the operation itself, then its
    arguments."""
    namespace: Any = torch.ops.vllm
    operation = getattr(namespace, name)

    def run(*arguments: Any, **named: Any) -> None:
        core(operation, (*arguments, *named.values()))

    # The namespace keeps its operations as attributes.
    setattr(namespace, name, run)
    try:
        yield
    finally:
        setattr(namespace, name, operation)
