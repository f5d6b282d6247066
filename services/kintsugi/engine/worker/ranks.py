"""Keeps a tensor-parallel rank whose layer call fails in step with the others.

Every layer call contains collective operations, and ranks that take part wait for one that does not. So each
call's operations are recorded when the call first succeeds, in the self-test. If it fails later, for example
for lack of memory, the rank takes part in the remaining operations with zeros. The pass goes on, and the
ranks agree at its end that it is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from kintsugi.fusor.loader import describe_shortage

logger = init_logger(__name__)

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
"""Operations of vLLM's group of ranks that layers use."""


@dataclass(frozen=True)
class _Like:
    """What is needed to make zeros like a tensor for another number of tokens."""

    shape: torch.Size
    num_tokens: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor, num_tokens: int) -> _Like:
        return _Like(tensor.shape, num_tokens, tensor.dtype, tensor.device)

    def zeros(self, num_tokens: int) -> Tensor:
        rows = self.shape[0] * num_tokens // self.num_tokens
        return torch.zeros(rows, *self.shape[1:], dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Collective:
    name: str
    like: _Like
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class LockStep:
    """The collective operations and results of each layer call of a model, by the call's key."""

    _operations: dict[Hashable, list[_Collective]] = field(default_factory=dict)
    _results: dict[Hashable, tuple[_Like, ...]] = field(default_factory=dict)

    def run(self, key: Hashable, num_tokens: int, call: Callable[[], tuple[Tensor, ...]]) -> Any:
        """Run a layer call over ``num_tokens`` tokens. Returns its results and None; or zeros like them, and
        why it failed. Raises if no such call has succeeded before."""
        made: list[_Collective] = []
        try:
            with _watched(made, num_tokens):
                results = call()
        except Exception as defect:
            if key not in self._operations:
                raise
            reason = log_defect("run a layer on this rank, which goes on with zeros", defect)
        else:
            if key not in self._operations:
                self._operations[key] = made
                self._results[key] = tuple(_Like.of(result, num_tokens) for result in results)
            return results, None
        # The exception, and with it the memory that its frames hold, is gone.
        for operation in self._operations[key][len(made) :]:
            zeros = operation.like.zeros(num_tokens)
            getattr(get_tp_group(), operation.name)(zeros, *operation.arguments, **operation.options)
        return tuple(like.zeros(num_tokens) for like in self._results[key]), reason


def log_defect(task: str, defect: Exception) -> str:
    """Log an exception, which is being handled, and return its reason. If the device has no memory left, the
    log gets one line without a traceback."""
    if isinstance(defect, torch.OutOfMemoryError):
        reason = describe_shortage(defect)
        logger.warning("Failed to %s: %s", task, reason)
        return reason
    logger.exception("Failed to %s", task)
    return f"defect: {type(defect).__name__}: {defect}"


@contextlib.contextmanager
def _watched(made: list[_Collective], num_tokens: int) -> Iterator[None]:
    """Note each collective operation in ``made`` before it runs."""
    group = get_tp_group()

    def watch(name: str) -> Callable[..., Any]:
        run = getattr(group, name)

        def note(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            made.append(_Collective(name, _Like.of(tensor, num_tokens), arguments, options))
            return run(tensor, *arguments, **options)

        return note

    for name in COLLECTIVES:
        setattr(group, name, watch(name))
    try:
        yield
    finally:
        for name in COLLECTIVES:
            delattr(group, name)
