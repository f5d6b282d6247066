"""Measures on the loaded model how each layer's keys rotate with their position.

Class names are not sufficient: layers have rotations that they do not apply, models rotate in functions
instead of modules, or normalise after the rotation. So the same hidden states are projected at two sets of
positions. Keys that do not change have no rotation. Otherwise the table is measured from the rotation module
that the layer calls, or taken from the cosines and sines that the model passes to the layer. The table is
correct only if rotating the first keys back and then to the other positions yields the second keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kintsugi.engine.worker.calls import LayerCall, PerToken
from kintsugi.fusor.rope import POSITIONS_AT_A_TIME, Rotary, measure_rotary
from kintsugi.fusor.stack import Hidden
from kintsugi.models.declines import Decline, DeclineReason

TOKENS = 16
"""Tokens that are projected at each set of positions."""

SPREAD = 64
"""Number of positions at which a prompt's cosines and sines are compared with the table."""

TOLERANCE = {torch.bfloat16: 0.01, torch.float16: 2e-3, torch.float32: 1e-4}
"""Maximum relative L2 difference of keys due to rounding: measured 3.6e-3 in bfloat16 and 8e-8 in float32.
Keys at other positions differ by about 1; keys weighted by a norm after their rotation differ by the spread
of the weights."""


@dataclass(frozen=True)
class RotationCall:
    """A layer's call of a rotation module, with the indices of its arguments as `torch.utils._pytree`
    flattens them."""

    module: nn.Module
    key: int
    positions: int
    query: int
    layout: Any
    leaves: tuple[Any, ...]
    """The arguments of one call, copied before it."""
    returned: Tensor
    """The rotated key that the call returned."""

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``keys`` `[tokens, 1, head_dim]` to ``positions`` `[tokens]` by the module."""
        count, _, head_dim = keys.shape
        shape, query_shape = self.leaves[self.key].shape[1:], self.leaves[self.query].shape[1:]
        heads = shape.numel() // head_dim
        leaves = list(self.leaves)
        where = leaves[self.positions]
        leaves[self.positions] = positions.to(where).expand(*where.shape[:-1], count).contiguous()
        leaves[self.query] = keys.new_zeros(count, *query_shape)
        leaves[self.key] = keys.expand(count, heads, head_dim).reshape(count, *shape).contiguous()
        args, kwargs = pytree.tree_unflatten(leaves, self.layout)
        rotated: Tensor = pytree.tree_leaves(self.module(*args, **kwargs))[1]
        return rotated.view(count, heads, head_dim)[:, :1]

    def explains(self, key: Tensor, rotary: Rotary, positions: Tensor) -> bool:
        """Return whether attention's ``key`` is what the module returned, and the module only rotated it."""
        if not torch.equal(self.returned.reshape(key.shape), key):
            return False
        rotated = rotary.rotate(self.leaves[self.key].reshape(key.shape), positions)
        return _difference(rotated, key) <= TOLERANCE[key.dtype]


@dataclass
class Projected:
    """A layer's projected K and V, `[tokens, heads, width]`, and the rotation modules that it called."""

    key: Tensor
    value: Tensor
    sources: list[RotationCall] = field(default_factory=list)


@dataclass(frozen=True)
class KeyRotation:
    """The rotation of one layer's keys."""

    rotary: Rotary | None
    """The rotation; None: keys are not rotated."""
    source: RotationCall | None = None
    """The call whose argument is the key before its rotation; None: attention's key is unrotated instead."""

    @property
    def is_restored(self) -> bool:
        """Whether the stored key is captured before its rotation."""
        return self.rotary is None or self.source is not None


UNROTATED = KeyRotation(None)


class RotationFinder:
    """Finds the rotations of a model's layers, and measures each table once."""

    def __init__(
        self,
        embed: Callable[[Tensor], Hidden],
        project: Callable[[int, Hidden, Tensor], Projected],
        calls: Sequence[LayerCall],
        num_positions: int,
    ) -> None:
        """``embed`` embeds the same tokens at given positions, int64 `[tokens]`; ``project`` runs a layer up
        to its attention; ``num_positions`` is the maximum length of a prompt."""
        self._embed = embed
        self._project = project
        self._calls = calls
        self._num_positions = num_positions
        self._tables: dict[tuple[int, ...], list[Rotary]] = {}
        self._near = torch.arange(1, TOKENS + 1).clamp_(max=num_positions - 1)
        self._far = torch.linspace(0, num_positions - 1, TOKENS).long()
        self._hidden_near, self._hidden_far = embed(self._near), embed(self._far)

    def find(self, layer: int) -> KeyRotation:
        """Find the rotation of a layer's keys. Raises `NotBlendable` if no rotation explains them."""
        if _difference(self._hidden_near.states, self._hidden_far.states) > 0:
            feature = "learned embeddings of absolute positions"
            raise Decline(DeclineReason.LEARNED_POSITIONS, None, feature).error()
        near = self._project_at(layer, self._near, self._hidden_near)
        far = self._project_at(layer, self._far, self._hidden_far)
        bound = TOLERANCE[near.key.dtype]
        if _difference(near.value, far.value) > bound:
            raise Decline(
                DeclineReason.LEARNED_POSITIONS, layer, "values that depend on their position"
            ).error()
        if _difference(near.key, far.key) <= bound:
            return UNROTATED
        differences = []
        here, there = self._near.to(near.key.device), self._far.to(near.key.device)
        for rotary, source in self._candidates(layer, near):
            difference = _difference(rotary.rotate(rotary.unrotate(near.key, here), there), far.key)
            if difference <= bound:
                is_plain = source is not None and source.explains(near.key, rotary, here)
                return KeyRotation(rotary, source if is_plain else None)
            differences.append(f"{difference:.2g}")
        found = f"off by {', '.join(differences)}" if differences else "without a table"
        feature = (
            "keys that depend on more than their position, such as keys weighted by a norm after the rotation"
        )
        raise Decline(DeclineReason.ROPE, layer, f"{feature} (a rotation {found})").error()

    def _project_at(self, layer: int, positions: Tensor, hidden: Hidden) -> Projected:
        generator = torch.Generator().manual_seed(layer)
        noise = torch.randn(hidden.states.shape, generator=generator)
        states = noise.to(hidden.states)
        has_residual = layer > 0 and self._calls[layer].residual is not None
        residual = torch.zeros_like(states) if has_residual else None
        return self._project(layer, Hidden(states, residual, hidden.beside), positions)

    def _candidates(self, layer: int, projected: Projected) -> Iterator[tuple[Rotary, RotationCall | None]]:
        head_dim = projected.key.shape[-1]
        for source in projected.sources:
            if source.leaves[source.key].shape[1:].numel() % head_dim:
                continue  # the layer passes it only a part of each head
            name = (id(source.module), head_dim)
            if name not in self._tables:
                measured = measure_rotary(source.turn, head_dim, self._num_positions, projected.key)
                self._tables[name] = [] if measured is None else [measured]
            for rotary in self._tables[name]:
                yield rotary, source
        for cos, sin in self._pairs_beside(layer):
            if (cos, sin) not in self._tables:
                self._tables[cos, sin] = self._measure_beside(layer, cos, sin)
            for rotary in self._tables[cos, sin]:
                if rotary.rotary_dim <= head_dim:
                    yield rotary, None

    def _pairs_beside(self, layer: int) -> list[tuple[int, int]]:
        """Return the indices of those tensors in `Hidden.beside` that may be cosines and sines."""
        beside = self._hidden_far.beside
        arguments = [
            one.slot if isinstance(one, PerToken) and one.slot is not None else None
            for one in self._calls[layer].arguments
        ]
        pairs = []
        for cos, sin in pairwise(arguments):
            if cos is None or sin is None or not _are_cos_and_sin(beside[cos], beside[sin]):
                continue
            pairs.append((cos, sin))
        return pairs

    def _measure_beside(self, layer: int, cos_slot: int, sin_slot: int) -> list[Rotary]:
        """Return all interpretations of the model's cosines and sines, over all positions."""

        def at(positions: Tensor) -> Tensor:
            beside = self._embed(positions).beside
            return torch.stack([beside[slot].flatten(1).float() for slot in (cos_slot, sin_slot)])

        every = torch.arange(self._num_positions)
        table = torch.cat([at(part) for part in torch.split(every, POSITIONS_AT_A_TIME)], 1)
        for length in _doubled(TOKENS, self._num_positions):
            spread = torch.linspace(0, length - 1, SPREAD).long()
            if not torch.allclose(at(spread), table[:, spread.to(table.device)], atol=1e-3):
                feature = "a rotation that depends on the prompt's total length"
                raise Decline(DeclineReason.ROPE_LENGTH, layer, feature).error()
        cos, sin = table
        return list(_readings(cos, sin))


def sources_of(module: nn.Module, positions: Tensor, sources: list[RotationCall]) -> list[Any]:
    """Hook all modules below a layer, so that those that rotate a query and a key to ``positions`` are added
    to ``sources``. Returns the hooks' handles."""

    before: dict[nn.Module, tuple[Any, ...]] = {}

    def keep(called: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        if sum(_has_positions(leaf, positions) for leaf in leaves) == 1:
            # Keys are often rotated in place.
            before[called] = tuple(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)

    def note(called: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves, outputs = before.pop(called, ()), pytree.tree_leaves(output)
        wide = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if len(wide) < 2 or len(outputs) < 2 or not isinstance(outputs[1], Tensor):
            return
        query, key = wide[:2]
        at = next(i for i, leaf in enumerate(leaves) if _has_positions(leaf, positions))
        if outputs[1].shape == leaves[key].shape:
            layout = pytree.tree_structure((args, kwargs))
            sources.append(RotationCall(called, key, at, query, layout, leaves, outputs[1].clone()))

    hooks: list[Any] = []
    for child in module.modules():
        hooks.append(child.register_forward_pre_hook(keep, with_kwargs=True))
        hooks.append(child.register_forward_hook(note, with_kwargs=True))
    return hooks


def _doubled(first: int, last: int) -> Iterator[int]:
    """Yield ``first`` and its doublings below ``last``, then ``last``."""
    while first < last:
        yield first
        first *= 2
    yield last


def _has_positions(leaf: Any, positions: Tensor) -> bool:
    """Return whether an argument contains the positions, on any number of axes."""
    if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.shape[-1:] != positions.shape:
        return False
    return bool((leaf == positions.to(leaf)).all())


def _are_cos_and_sin(cos: Tensor, sin: Tensor) -> bool:
    """Return whether two tensors `[tokens, ...]` may be cosines and sines; the first token has position 0."""
    if cos.shape != sin.shape or not (cos.is_floating_point() and sin.is_floating_point()) or cos.ndim < 2:
        return False
    cos, sin = cos.flatten(1).float(), sin.flatten(1).float()
    magnitude = cos.square() + sin.square()
    return bool(
        (magnitude - magnitude[0]).abs().max() < 0.05 and sin[0].abs().max() < 1e-6 and cos[0].min() > 0
    )


def _readings(cos: Tensor, sin: Tensor) -> Iterator[Rotary]:
    """Yield the rotations that a table `[positions, width]` may describe: its columns may be repeated side by
    side or in pairs, and pairs may be halves or neighbours."""
    width = cos.shape[1]
    columns = [slice(0, width)]
    if width % 2 == 0 and torch.equal(cos[:, ::2], cos[:, 1::2]):
        columns.insert(0, slice(0, width, 2))
    if width % 2 == 0 and torch.equal(cos[:, : width // 2], cos[:, width // 2 :]):
        columns.insert(0, slice(0, width // 2))
    for chosen in columns:
        for is_neox in (True, False):
            yield Rotary(cos[:, chosen].contiguous(), sin[:, chosen].contiguous(), is_neox)


def _difference(got: Tensor, expected: Tensor) -> float:
    """Return the relative L2 difference."""
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-9))
