"""Keeps a tensor-parallel rank that fails inside a pass in step with the others.

Every layer call contains collective operations, and ranks that take part wait for one that does not. So each
call's operations are recorded when the call first succeeds, in the self-test. A rank that has failed, for
example for lack of memory, computes nothing more of the pass and takes part in the remaining operations with
zeros. The ranks agree at the pass's end that it is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
)
from vllm.logger import init_logger

from kintsugi.fusor.loader import describe_shortage

logger = init_logger(__name__)

T = TypeVar("T")
Call = Callable[[], tuple[Tensor, ...]]
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
class RankPart:
    """This rank's part of a pass."""

    failure: str | None = None
    """Why it failed, and all that follows is zeros."""

    def contain(self, act: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """As `DecoderStack.contain`."""
        if rank_and_size()[1] == 1:
            return act()
        if self.failure is None:
            try:
                return act()
            except Exception as defect:  # noqa: BLE001 - it is logged, and the ranks agree on it
                task = "compute a pass on this rank, which goes on with zeros"
                self.failure = log_defect(task, defect)
        # The exception, and with it the memory that its frames hold, is gone.
        return otherwise()


@dataclass
class LockStep:
    """The collective operations and results of each layer call of a model, by the call's key."""

    _operations: dict[Hashable, list[_Collective]] = field(default_factory=dict)
    _results: dict[Hashable, tuple[_Like, ...]] = field(default_factory=dict)

    def run(self, key: Hashable, num_tokens: int, call: Call, part: RankPart) -> tuple[Tensor, ...]:
        """Run a call over ``num_tokens`` tokens, for ``part`` of a pass. Returns its results or, if the rank
        fails, zeros like them. Raises if no such call has succeeded before."""
        made: list[_Collective] = []

        def watch() -> tuple[Tensor, ...]:
            with _watched(made, num_tokens):
                return call()

        if key in self._operations:
            return part.contain(watch, partial(self._go_on, key, num_tokens, made))
        results = watch()
        self._operations[key] = made
        self._results[key] = tuple(_Like.of(result, num_tokens) for result in results)
        return results

    def _go_on(self, key: Hashable, num_tokens: int, made: list[_Collective]) -> tuple[Tensor, ...]:
        """Take part in the operations after ``made`` with zeros."""
        for operation in self._operations[key][len(made) :]:
            zeros = operation.like.zeros(num_tokens)
            getattr(get_tp_group(), operation.name)(zeros, *operation.arguments, **operation.options)
        return tuple(like.zeros(num_tokens) for like in self._results[key])


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
    """Note each collective operation in ``made`` after it has run: one that runs out of memory allocates its
    result before it communicates, so the other ranks still wait for it."""
    group = get_tp_group()

    def watch(name: str) -> Callable[..., Any]:
        run = getattr(group, name)

        def note(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            operation = _Collective(name, _Like.of(tensor, num_tokens), arguments, options)
            result = run(tensor, *arguments, **options)
            made.append(operation)
            return result

        return note

    for name in COLLECTIVES:
        setattr(group, name, watch(name))
    try:
        yield
    finally:
        for name in COLLECTIVES:
            delattr(group, name)


def rank_and_size() -> tuple[int, int]:
    """Return this worker's tensor-parallel rank and the number of ranks."""
    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def is_first_rank() -> bool:
    """Return whether this worker is the one that stores and reports."""
    return rank_and_size()[0] == 0


def is_so_on_any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is set on some tensor-parallel rank. All ranks must call it together."""
    return min_over_ranks(int(not flag)) == 0


def min_over_ranks(number: int) -> int:
    """Return the smallest ``number`` of all tensor-parallel ranks, which must call it together. Uses the
    host, so that no device has to finish its work first."""
    if rank_and_size()[1] == 1:
        return number
    numbers = torch.tensor([number])
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return int(numbers.item())
