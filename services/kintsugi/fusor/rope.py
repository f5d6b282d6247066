"""Rotary position embedding of stored keys, which are stored before RoPE and rotated once, when loaded.

Keys are rotated in fp32 from the engine's own cos/sin table, so a loaded key equals a freshly computed one up
to the rounding of its dtype. The table already contains any scaling (YaRN's mscale, Llama-3's and linear
frequency changes). A table that depends on the prompt's length cannot be used, because a stored key belongs
to no prompt; the engine declines such models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The rotation of one layer's keys."""

    cos: Tensor
    """fp32 `[positions, rotary_dim / 2]`."""
    sin: Tensor
    """fp32 `[positions, rotary_dim / 2]`."""
    is_neox: bool
    """Whether halves are paired (GPT-NeoX, Llama) rather than neighbours (GPT-J, interleaved)."""

    @staticmethod
    def from_table(cos_sin: Tensor, is_neox: bool) -> Rotary:
        """Split `[positions, rotary_dim]`, cosines followed by sines (vLLM's `cos_sin_cache`)."""
        cos, sin = cos_sin.float().chunk(2, dim=-1)
        return Rotary(cos.contiguous(), sin.contiguous(), is_neox)

    @property
    def rotary_dim(self) -> int:
        """Number of leading elements of each head that rotate; the rest stay as they are."""
        return 2 * self.cos.shape[-1]

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate `keys` `[tokens, heads, head_dim]` to `positions` `[tokens]`: a new tensor of the same
        dtype.

        Cost: one fp32 pass over the keys at about 6 FLOP per element, which is memory-bound.
        """
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        rotated = torch.empty_like(keys)
        out, turning = rotated[..., : self.rotary_dim], keys[..., : self.rotary_dim].float()
        first, second = self._halves(turning)
        out_first, out_second = self._halves(out)
        out_first.copy_(first * cos - second * sin)
        out_second.copy_(second * cos + first * sin)
        rotated[..., self.rotary_dim :] = keys[..., self.rotary_dim :]
        return rotated

    def _halves(self, turning: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_neox:
            half = turning.shape[-1] // 2
            return turning[..., :half], turning[..., half:]
        return turning[..., 0::2], turning[..., 1::2]
