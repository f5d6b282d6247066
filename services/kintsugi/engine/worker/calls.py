"""Observes at start how a loaded model calls its decoder layers.

No code depends on an architecture. One forward pass over a few tokens shows the arguments of each layer,
which of them are the residual stream, and which outputs the next layer gets. From then on a layer is called
with the same arguments over other tokens. Other values that the model computes per token (cosines and sines,
embeddings per layer, positions in another shape) also come from the model: its forward pass is run up to the
last layer, with every layer replaced by a function that records its arguments.

A model that computes between its layers, or runs a layer twice, is declined: a blend runs layers alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kintsugi.core.errors import NotBlendable
from kintsugi.fusor.stack import Hidden
from kintsugi.models.declines import Decline, DeclineReason

Forward = Callable[[Tensor, Tensor], None]
"""Function that runs the model over token ids and positions, both int64 `[tokens]` on the host."""


@dataclass(frozen=True)
class PerToken:
    """A layer's argument with one entry per token."""

    dim: int
    """The dimension that counts tokens."""
    slot: int | None = None
    """Index in `Hidden.beside`; None for the states and the residual."""

    def to_rows(self, argument: Tensor) -> Tensor:
        return argument.movedim(self.dim, 0)

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows.movedim(0, self.dim)


@dataclass(frozen=True)
class LayerCall:
    """The model's call of one layer. Arguments and outputs have the indices that `torch.utils._pytree` gives
    them."""

    layout: Any
    """Nesting of the arguments: a tuple of positional ones, then a dict of named ones."""
    arguments: tuple[Any, ...]
    """A `PerToken` for each argument, or its constant value."""
    states: int
    """Index of the argument that is the residual stream."""
    residual: int | None
    """Index of the argument that is a separate residual; None if there is none."""
    output_layout: Any
    output_states: int
    output_residual: int | None

    def run(self, module: nn.Module, hidden: Hidden) -> None:
        """Call the layer, and set ``hidden`` to its output."""
        stream: PerToken = self.arguments[self.states]
        leaves = [self._fill(index, hidden) for index in range(len(self.arguments))]
        args, kwargs = pytree.tree_unflatten(leaves, self.layout)
        output = pytree.tree_leaves(module(*args, **kwargs))
        hidden.states = stream.to_rows(output[self.output_states])
        if self.output_residual is not None:
            hidden.residual = stream.to_rows(output[self.output_residual])

    def _fill(self, index: int, hidden: Hidden) -> Any:
        argument = self.arguments[index]
        if index == self.states:
            return argument.from_rows(hidden.states)
        if index == self.residual:
            return None if hidden.residual is None else argument.from_rows(hidden.residual)
        if not isinstance(argument, PerToken):
            return argument
        assert argument.slot is not None
        return argument.from_rows(hidden.beside[argument.slot])

    def pass_on(self, leaves: Sequence[Any]) -> Any:
        """Return the input in the form of the layer's output."""
        outputs: list[Any] = [None] * self.output_layout.num_leaves
        outputs[self.output_states] = leaves[self.states]
        if self.output_residual is not None:
            given = None if self.residual is None else leaves[self.residual]
            outputs[self.output_residual] = leaves[self.states] if given is None else given
        return pytree.tree_unflatten(outputs, self.output_layout)


@dataclass(frozen=True)
class LayerCalls:
    """The model's calls of all of its layers."""

    modules: tuple[nn.Module, ...]
    calls: tuple[LayerCall, ...]
    sources: tuple[tuple[int, int], ...]
    """Layer and argument of each tensor of `Hidden.beside`."""

    def embed(self, forward: Forward, token_ids: Tensor, positions: Tensor) -> Hidden:
        """Return the input of layer 0 and the model's other values per token."""
        noted = note_arguments(self.modules, self.calls, lambda: forward(token_ids, positions))
        first = self.calls[0]
        states = first.arguments[first.states].to_rows(noted[0][first.states])
        beside = tuple(
            self.calls[layer].arguments[index].to_rows(noted[layer][index]) for layer, index in self.sources
        )
        return Hidden(states, None, beside)


def watch_calls(
    modules: Sequence[nn.Module], run: Forward, forward: Forward, samples: Sequence[tuple[Tensor, Tensor]]
) -> LayerCalls:
    """Learn how a model calls its layers.

    ``run`` computes a whole forward pass; ``forward`` may be ended before any layer computes. ``samples`` are
    token ids and positions of two different lengths. Raises `NotBlendable`.
    """
    (token_ids, positions), (other_ids, other_positions) = samples
    seen = _watch(modules, lambda: run(token_ids, positions))
    drafts = _find_streams(seen, _token_dim_of(seen[0], len(token_ids)))
    noted = note_arguments(modules, drafts, lambda: forward(token_ids, positions))
    others = note_arguments(modules, drafts, lambda: forward(other_ids, other_positions))
    slots: dict[int, int] = {}
    sources: list[tuple[int, int]] = []
    calls = []
    for layer, draft in enumerate(drafts):
        arguments = list(draft.arguments)
        for index, value in enumerate(noted[layer]):
            if index in (draft.states, draft.residual):
                continue
            found = _role_of(layer, value, others[layer][index], seen[layer].arguments[index])
            if isinstance(found, PerToken):
                if id(value) not in slots:
                    slots[id(value)] = len(sources)
                    sources.append((layer, index))
                found = PerToken(found.dim, slots[id(value)])
            arguments[index] = found
        calls.append(replace(draft, arguments=tuple(arguments)))
    return LayerCalls(tuple(modules), tuple(calls), tuple(sources))


def note_arguments(
    modules: Sequence[nn.Module], calls: Sequence[LayerCall], forward: Callable[[], None]
) -> list[list[Any]]:
    """Run ``forward`` up to the last layer, with every layer replaced by one that returns its input. Returns
    the flattened arguments of each layer."""
    noted: list[list[Any]] = []

    def stand_in(call: LayerCall) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            noted.append(pytree.tree_leaves((args, kwargs)))
            if len(noted) == len(modules):
                raise _Noted
            return call.pass_on(noted[-1])

        return note

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(_Noted))
        for module, call in zip(modules, calls, strict=True):
            stack.enter_context(replace_forward(module, stand_in(call)))
        forward()
    if len(noted) != len(modules) or any(
        len(leaves) != len(call.arguments) for leaves, call in zip(noted, calls, strict=True)
    ):
        raise _decline(None, "layers that are called with other arguments each time")
    return noted


@contextlib.contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the module's forward method in the block."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


class _Noted(Exception):
    """Ends a forward pass as soon as the last layer's arguments are recorded."""


@dataclass(frozen=True)
class _Seen:
    """An observed call of one layer."""

    layout: Any
    arguments: list[Any]
    before: list[Any]
    """Copies of the arguments, made before the call."""
    output_layout: Any
    outputs: list[Any]
    after: list[Any]
    """Copies of the outputs, made after the call."""


def _watch(modules: Sequence[nn.Module], run: Callable[[], None]) -> list[_Seen]:
    """Observe the layer calls of a forward pass."""
    seen: list[_Seen] = []
    order: list[int] = []

    def watcher(layer: int, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(layer)
            arguments, layout = pytree.tree_flatten((args, kwargs))
            before = [_copy(one) for one in arguments]
            output = own(*args, **kwargs)
            outputs, output_layout = pytree.tree_flatten(output)
            after = [_copy(one) for one in outputs]
            seen.append(_Seen(layout, arguments, before, output_layout, outputs, after))
            return output

        return call

    with contextlib.ExitStack() as stack:
        for layer, module in enumerate(modules):
            stack.enter_context(replace_forward(module, watcher(layer, module.forward)))
        run()
    if order != list(range(len(modules))):
        raise _decline(None, f"layers that do not run once each, in order: {_shorten(order)}")
    return seen


def _find_streams(seen: Sequence[_Seen], dim: int) -> list[LayerCall]:
    """Return the calls with the indices of states and residual: outputs that the next layer gets as
    arguments."""
    found = [_stream_between(layer, before, after) for layer, (before, after) in enumerate(pairwise(seen))]
    if not found:
        found = [_Streams(_states_of(seen[0]), None, 0, None)]
    # The first layer's arguments have the second's indices, the last layer's outputs the previous one's.
    given = [found[0], *found]
    returned = [*found, found[-1]]
    calls = []
    for one, into, out in zip(seen, given, returned, strict=False):
        has_residual = into.residual is not None and into.residual < len(one.arguments)
        arguments: list[Any] = [None] * len(one.arguments)
        arguments[into.states] = PerToken(dim)
        if has_residual:
            assert into.residual is not None
            arguments[into.residual] = PerToken(dim)
        calls.append(
            LayerCall(
                one.layout,
                tuple(arguments),
                into.states,
                into.residual if has_residual else None,
                one.output_layout,
                out.output_states,
                out.output_residual,
            )
        )
    return calls


@dataclass(frozen=True)
class _Streams:
    """Indices of a layer's arguments that are outputs of the previous layer."""

    states: int
    residual: int | None
    output_states: int
    output_residual: int | None


def _stream_between(layer: int, before: _Seen, after: _Seen) -> _Streams:
    """Find the arguments of the layer ``after`` that are outputs of the layer ``before``."""
    pairs = [
        (argument, output)
        for argument, value in enumerate(after.arguments)
        for output, returned in enumerate(before.outputs)
        if isinstance(value, Tensor) and value is returned
    ]
    if not 1 <= len(pairs) <= 2:
        raise _decline(layer + 1, "an input that is not an output of the previous layer")
    for argument, output in pairs:
        if not torch.equal(after.before[argument], before.after[output]):
            raise _decline(layer + 1, "an input that the model changes between the layers")
    # If there are two, output 0 is the states; the first layer gets no residual.
    (states, output_states), *rest = sorted(pairs, key=lambda pair: pair[1])
    residual, output_residual = rest[0] if rest else (None, None)
    return _Streams(states, residual, output_states, output_residual)


def _states_of(only: _Seen) -> int:
    """Return the index of the argument that holds the states in a model of one layer: the one with the shape
    of the first output."""
    shape = only.outputs[0].shape
    for index, value in enumerate(only.arguments):
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape:
            return index
    raise _decline(0, "no argument with the shape of its output")


def _token_dim_of(first: _Seen, num_tokens: int) -> int:
    """Return the dimension of the first output that counts tokens."""
    shape = first.outputs[0].shape
    if num_tokens not in shape[:-1]:
        raise _decline(0, f"an output of the shape {tuple(shape)} for {num_tokens} tokens")
    return list(shape).index(num_tokens)


def _role_of(layer: int, value: Any, other: Any, seen: Any) -> Any:
    """Return an argument's role, derived from its values in three runs: two in which layers only return their
    input, and one real."""
    if not isinstance(value, Tensor):
        if value is other or (type(value) is type(other) and bool(value == other)):
            return value
        raise _decline(layer, f"an argument that depends on the batch: {type(value).__name__}")
    if not isinstance(seen, Tensor) or seen.shape != value.shape or not torch.equal(seen, value):
        raise _decline(layer, "an argument that depends on the outputs of earlier layers")
    if value.shape == other.shape and torch.equal(value, other):
        return value
    differing = [dim for dim in range(value.ndim) if value.shape[dim] != other.shape[dim]]
    if value.ndim != other.ndim or len(differing) != 1:
        raise _decline(
            layer, f"an argument of the shape {tuple(value.shape)} that is not one entry per token"
        )
    return PerToken(differing[0])


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _shorten(order: Sequence[int]) -> str:
    return ", ".join(map(str, order[:16])) + (", …" if len(order) > 16 else "")


def _decline(layer: int | None, feature: str) -> NotBlendable:
    return Decline(DeclineReason.LAYER_CALLS, layer, feature).error()
