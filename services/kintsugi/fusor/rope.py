"""Applies rotary position embedding (RoPE) to loaded keys: they are stored unrotated, and rotated once, to
their positions in the prompt.

Keys are rotated in fp32 from the engine's own cos/sin table, so a loaded key equals a freshly computed one up
to the rounding of its dtype. The table already contains any scaling (YaRN's mscale, Llama-3's and linear
frequency changes). A table that depends on the prompt's length cannot be used, because a stored key belongs
to no prompt; the engine declines such models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.fusor.kernels.rotation import RotationKernel


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
    """Rotates in the place of torch, with the same result, where it can."""

    @staticmethod
    def from_table(cos_sin: Tensor, is_neox: bool, kernel: RotationKernel | None = None) -> Rotary:
        """Split `[positions, rotary_dim]`, cosines followed by sines (vLLM's `cos_sin_cache`)."""
        cos, sin = cos_sin.float().chunk(2, dim=-1)
        return Rotary(cos.contiguous(), sin.contiguous(), is_neox, kernel)

    @property
    def rotary_dim(self) -> int:
        """Number of leading elements of each head that rotate; the rest stay as they are."""
        return 2 * self.cos.shape[-1]

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate `keys` `[tokens, heads, head_dim]` to `positions` `[tokens]`. Returns a new tensor of the
        same dtype.

        Cost: one fp32 pass over the keys at about 6 FLOP per element, which is memory-bound; without the
        kernel about ten passes.
        """
        if self.kernel is not None and self.kernel.serves(keys, positions):
            return self.kernel.rotate(keys, positions, self.cos, self.sin, self.is_neox)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
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
