"""Applies rotary position embedding (RoPE) to loaded keys. Keys are stored unrotated and rotated once, to
their positions in the prompt.

Keys are rotated in fp32 from a cos/sin table, so a loaded key equals a freshly computed one up to the
rounding of its dtype. The table is measured from the model's own rotation (`measure_rotary`), so it contains
any scaling: YaRN's mscale, Llama-3's and linear frequency changes, LongRoPE's factors. A table that depends
on the prompt's length cannot be used, because stored keys are independent of prompts; the engine declines
such models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.fusor.kernels.native import RotationKernel

Turn = Callable[[Tensor, Tensor], Tensor]
"""A model's own rotation: keys `[tokens, 1, head_dim]` and int64 positions `[tokens]` to rotated keys."""

POSITIONS_AT_A_TIME = 8192
"""Rows of a table that are measured in one call."""


@dataclass(frozen=True)
class Rotary:
    """The rotation of one layer's keys."""

    cos: Tensor
    """fp32 `[positions, rotary_dim / 2]`."""
    sin: Tensor
    """fp32 `[positions, rotary_dim / 2]`."""
    is_neox: bool
    """Whether element i is paired with i + rotary_dim / 2 (GPT-NeoX, Llama), not with its neighbour (GPT-J,
    interleaved)."""
    kernel: RotationKernel | None = None
    """Rotates the keys that it supports in place of torch, with the same result."""

    @staticmethod
    def from_table(cos_sin: Tensor, is_neox: bool, kernel: RotationKernel | None = None) -> Rotary:
        """Split `[positions, rotary_dim]`, cosines followed by sines (vLLM's `cos_sin_cache`)."""
        cos, sin = cos_sin.float().chunk(2, dim=-1)
        return Rotary(cos.contiguous(), sin.contiguous(), is_neox, kernel)

    @property
    def rotary_dim(self) -> int:
        """Number of leading elements of each head that rotate. The rest do not change."""
        return 2 * self.cos.shape[-1]

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate `keys` `[tokens, heads, head_dim]` to `positions` `[tokens]`. Returns a new tensor of the
        same dtype.

        Cost: one fp32 pass over the keys at about 6 FLOP per element, which is memory-bound; without the
        kernel about ten passes.
        """
        if self.kernel is not None and self.kernel.serves(keys, positions):
            return self.kernel.rotate(keys, positions, self.cos, self.sin, self.is_neox)
        return self._turn(keys, self.cos[positions][:, None], self.sin[positions][:, None])

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotation of `keys` `[tokens, heads, head_dim]` at `positions`, up to the rounding of the
        dtype. Returns a new tensor."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        magnitude = cos.square() + sin.square()
        return self._turn(keys, cos / magnitude, -sin / magnitude)

    def _turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate by `[tokens, 1, rotary_dim / 2]` cosines and sines."""
        rotated = torch.empty_like(keys)
        first, second = self._halves(keys[..., : self.rotary_dim].float())
        out_first, out_second = self._halves(rotated[..., : self.rotary_dim])
        out_first.copy_(first * cos - second * sin)
        out_second.copy_(second * cos + first * sin)
        rotated[..., self.rotary_dim :] = keys[..., self.rotary_dim :]
        return rotated

    def _halves(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second element of every pair."""
        if self.is_neox:
            half = elements.shape[-1] // 2
            return elements[..., :half], elements[..., half:]
        return elements[..., 0::2], elements[..., 1::2]


def measure_rotary(turn: Turn, head_dim: int, num_positions: int, sample: Tensor) -> Rotary | None:
    """Measure the table of a model's rotation, for positions below `num_positions`, by rotating unit vectors.
    `sample` has the dtype and device of keys. None if the model does not rotate pairs.

    The caller must check the result on keys of the model, because this examines only pairs.
    """
    few = torch.arange(1, min(num_positions, 64), device=sample.device)
    reached = _turn_units(turn, [0], head_dim, few, sample).abs().amax(0)
    partners = [element for element in reached.nonzero()[:, 0].tolist() if element != 0]
    if len(partners) != 1:
        return None
    is_neox = partners[0] > 1
    pairs = partners[0] if is_neox else head_dim // 2
    step, distance = (1, pairs) if is_neox else (2, 1)
    firsts = [pair * step for pair in range(pairs)]
    seconds = [first + distance for first in firsts]
    if max(seconds) >= head_dim:
        return None
    tables = []
    for start in range(0, num_positions, POSITIONS_AT_A_TIME):
        end = min(start + POSITIONS_AT_A_TIME, num_positions)
        positions = torch.arange(start, end, device=sample.device)
        tables.append(_turn_units(turn, firsts, head_dim, positions, sample))
    table = torch.cat(tables)
    cos, sin = table[:, firsts], table[:, seconds]
    if not is_neox:
        rotating = int((sin != 0).any(0).sum())
        cos, sin = cos[:, :rotating], sin[:, :rotating]
    return Rotary(cos.contiguous(), sin.contiguous(), is_neox)


def _turn_units(turn: Turn, ones: list[int], head_dim: int, positions: Tensor, sample: Tensor) -> Tensor:
    """Rotate a vector with ones at indices `ones` and zeros elsewhere to all `positions`: fp32 `[positions,
    head_dim]`."""
    units = torch.zeros(len(positions), 1, head_dim, dtype=sample.dtype, device=sample.device)
    units[..., ones] = 1
    return turn(units, positions)[:, 0].float()
