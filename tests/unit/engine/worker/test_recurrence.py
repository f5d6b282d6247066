"""What recurrent layers store, and how their operations are called over tokens of whom it is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kintsugi.engine.worker.recurrence import (
    GatedDeltaNet,
    Mamba2,
    RecurrentKV,
    ShortConvolution,
    recurrent_kind,
    replace_operation,
)

TOKENS = 5


class Projection(nn.Module):
    """As vLLM's, which return a bias beside their output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs), requires_grad=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden @ self.weight.T, None


class Convolving(nn.Module):
    """As vLLM's `ShortConv`, with a running sum in the place of the convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = Projection(width, 3 * width), Projection(width, width)
        self.conv = SimpleNamespace(weight=torch.zeros(width, 1, 3))

    def operation(self, hidden: Tensor, output: Tensor, _name: object) -> None:
        b, c, x = self.in_proj(hidden)[0].chunk(3, -1)
        output[:], _ = self.out_proj(c * (b * x).cumsum(0))


def test_a_short_convolution_is_run_over_stored_inputs() -> None:
    torch.manual_seed(1)
    mixer, hidden = Convolving(8), torch.randn(TOKENS, 8)
    kv = ShortConvolution(mixer)
    expected, got, outputs = (torch.zeros(TOKENS, 8) for _ in range(3))
    mixer.operation(hidden, expected, "layer")
    inputs, gates = kv.tell_apart((hidden, got, "layer"))
    assert inputs.shape == (TOKENS, kv.key_width)
    assert gates.shape == (TOKENS, 0)
    kv.scan(mixer.operation, "layer", inputs, gates, outputs)
    kv.finish((hidden, got, "layer"), outputs)
    torch.testing.assert_close(got, expected)


def delta_net() -> tuple[RecurrentKV, tuple[Any, ...]]:
    weight = SimpleNamespace(weight=torch.zeros(1))
    mixer = SimpleNamespace(num_v_heads=4, head_v_dim=6, key_dim=10, value_dim=24, conv1d=weight)
    mixed, b, a = torch.randn(TOKENS, 44), torch.randn(TOKENS, 4), torch.randn(TOKENS, 4)
    return GatedDeltaNet(mixer), (mixed, b, a, torch.zeros(TOKENS, 4, 6), "layer")


def mamba2() -> tuple[RecurrentKV, tuple[Any, ...]]:
    mixer = SimpleNamespace(tped_intermediate_size=24, tped_conv_size=30, tped_dt_size=4, head_dim=6)
    return Mamba2(mixer), (torch.randn(TOKENS, 58), torch.zeros(TOKENS, 24), "layer")


@pytest.mark.parametrize("make", [delta_net, mamba2])
def test_an_operation_gets_what_was_stored_of_its_arguments(make: Any) -> None:
    kv, arguments = make()
    *given, output, name = arguments
    inputs, gates = kv.tell_apart(arguments)
    assert (inputs.shape[1], gates.shape[1]) == (kv.key_width, kv.value_width)
    outputs = torch.zeros(TOKENS, kv.output_width)

    def operation(*called: Any) -> None:
        *again, out, its_name = called
        assert its_name == name
        for mine, its in zip(given, again, strict=True):
            assert mine.shape == its.shape
            stored = slice(None) if isinstance(kv, GatedDeltaNet) else slice(24, None)  # behind the gate
            assert torch.equal(mine[:, stored], its[:, stored])
        assert out.shape == output.shape
        out.copy_(torch.arange(out.numel()).view(out.shape))

    kv.scan(operation, name, inputs, gates, outputs)
    kv.finish(arguments, outputs)
    assert torch.equal(output.flatten(), torch.arange(output.numel()).float())


def test_an_operation_is_replaced_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.ops.vllm, "short_conv", seen.append, raising=False)
    own = torch.ops.vllm.short_conv
    arguments: list[Any] = []

    def core(operation: Any, given: tuple[Any, ...]) -> None:
        assert operation is own
        arguments.extend(given)
        raise RuntimeError("within")

    with replace_operation("short_conv", core), pytest.raises(RuntimeError, match="within"):
        torch.ops.vllm.short_conv(1)
    assert (seen, arguments) == ([], [1])
    assert torch.ops.vllm.short_conv is own


def test_a_subclass_of_a_known_layer_is_another_kind() -> None:
    """It may read other arguments."""
    known: Any = type("ShortConv", (), {})
    assert recurrent_kind(known()) is ShortConvolution
    assert recurrent_kind(type("DilatedShortConv", (known,), {})()) is None
    assert recurrent_kind(None) is None
