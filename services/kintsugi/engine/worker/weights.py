"""Detects whether a loaded model's weights have changed since the start.

The fingerprint of stored chunks and the calibration report apply to the weights that were loaded at start.
vLLM changes weights in many ways (`reload_weights`, weight transfer, sleep level 2, worker extensions) and
notifies connectors of none: `reset_cache` is also called without a change, and not at every change. So the
weights are observed in three ways:

- Calls of the model's `load_weights`, through which vLLM reloads and receives weights in the checkpoint's
  format. They are the only sign if a backend repacks weights and drops the parameters, as on CPUs.
- The address of each parameter, and torch's count of writes to it. Writes through `.data`, as in vLLM's
loaders, are not counted, so the count alone would miss updates.
- A sample of the values of each parameter, bit for bit. It detects uncounted writes and discarded weights.

The first two are certain. A write that only the sample can detect, and that changes a share `s` of a
parameter's values, is missed with a probability of about `(1 - s) ** SAMPLES_MIN` per changed parameter.

A GPU takes a sample after the work queued before it, and the host does not wait: the sample is compared in a
later step, when the next one is taken. A pass's result is valid after the sample at its end is compared,
because changed weights stay changed.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.logger import init_logger

from kintsugi.fusor.staging import download

logger = init_logger(__name__)

SAMPLES_MIN = 256
"""Minimum number of compared values per parameter; all values of a smaller one."""
VALUES_PER_SAMPLE = 1 << 16
"""In larger parameters (stacked experts, embeddings), one of this many values is compared."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes per value. Compared as integers, a NaN equals itself."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ParameterLocation:
    """Address and shape of one parameter."""

    name: str
    address: int
    shape: tuple[int, ...]
    num_writes: int | None
    """Number of writes that torch has counted; None if it does not count them."""


@dataclass(frozen=True)
class Snapshot:
    """Addresses, write counts and sampled values of all parameters."""

    places: tuple[ParameterLocation, ...]
    samples: tuple[Tensor, ...]
    """Integer tensors `[samples]` on the host, one per size of value. From a GPU they may be read after the
    event `arrived`."""
    arrived: torch.cuda.Event | None = None

    @property
    def has_arrived(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]


def difference(before: Snapshot, now: Snapshot) -> str | None:
    """Describe the difference of two snapshots of the same model; None if they are equal."""
    for was, place in zip(before.places, now.places, strict=True):
        if was != place:
            return f"{was.name} was written or replaced"
    same = all(torch.equal(*pair) for pair in zip(before.samples, now.samples, strict=True))
    return None if same else "values of parameters differ"


class LoadedWeights:
    """Watches one model from construction until `close`.

    Each check costs the host about 10 µs per parameter. On a GPU only the first check waits for the device.
    """

    def __init__(self, model: nn.Module, device: torch.device = CPU) -> None:
        """``device``: the parameters' device."""
        self._model = model
        self._device = device
        # By module and name, so that a replaced parameter is not kept alive.
        self._holders = [
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._change: str | None = None
        self._observe_loading()
        self._looks: deque[Snapshot] = deque()
        """Snapshots that are not compared yet. On a CPU there are none."""
        self._before = self._look()
        if self._before.arrived is not None:
            self._before.arrived.synchronize()

    def check(self) -> str | None:
        """Return a description of the change since construction; None if no change is known. A change is
        permanent. On a CPU the present state is compared. On a GPU the snapshots that have arrived are
        compared, and another one is taken if none is left. Must not be called for a sleeping model, whose
        memory is unmapped.
        """
        if self.compare() is None and not self._looks:
            self.look()
        return self.compare()

    @property
    def is_late(self) -> bool:
        """Whether snapshots are compared later than they are taken."""
        return self._device.type == "cuda"

    def look(self) -> None:
        """Take a snapshot of the parameters: now, or on a GPU after all queued work."""
        self._note_errors(lambda: self._looks.append(self._look()))

    def compare(self) -> str | None:
        """Return the change as `check` does, without taking another snapshot."""
        self._note_errors(self._compare_arrived)
        return self._change

    def close(self) -> None:
        """Stop observing. Idempotent."""
        self._model.__dict__.pop("load_weights", None)
        self._holders.clear()
        self._looks.clear()

    def _note_errors(self, act: Callable[[], None]) -> None:
        if self._change is not None:
            return
        try:
            act()
        except Exception as error:
            logger.exception("Weights could not be compared and count as changed")
            self._change = f"parameters cannot be compared: {type(error).__name__}: {error}"

    def _compare_arrived(self) -> None:
        while self._change is None and self._looks and self._looks[0].has_arrived:
            self._change = difference(self._before, self._looks.popleft())

    def _observe_loading(self) -> None:
        load: Any = self._model.load_weights

        @functools.wraps(load)
        def load_and_note(*args: Any, **kwargs: Any) -> Any:
            self._change = self._change or "load_weights was called"
            return load(*args, **kwargs)

        # Set on the instance; the method of the class stays as it is.
        self._model.__dict__["load_weights"] = load_and_note

    def _look(self) -> Snapshot:
        places, samples = [], defaultdict(list)
        for full_name, module, name in self._holders:
            for tensor in _plain(module._parameters[name]):
                places.append(_place_of(full_name, tensor))
                if tensor.numel():
                    sampled = sample(tensor)
                    samples[sampled.element_size()].append(sampled)
        # On the host: device memory may be discarded while the model sleeps.
        grouped = tuple(download(torch.cat(group)) for _, group in sorted(samples.items()))
        arrived = torch.cuda.current_stream(self._device).record_event() if self.is_late else None
        return Snapshot(tuple(places), grouped, arrived)


def _plain(tensor: Any) -> list[Tensor]:
    """Return the tensors that hold a parameter's bytes: torchao's quantised tensors wrap several."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner, _ = tensor.__tensor_flatten__()
    return [plain for name in inner for plain in _plain(getattr(tensor, name))]


def _place_of(name: str, tensor: Tensor) -> ParameterLocation:
    num_writes = None if tensor.is_inference() else tensor._version
    return ParameterLocation(name, tensor.data_ptr(), tuple(tensor.shape), num_writes)


def sample(tensor: Tensor) -> Tensor:
    """Return values of a dense tensor at a fixed distance, as a view of integers `[samples]`."""
    count, step = _spacing(tuple(tensor.shape), tensor.stride())
    return tensor.detach().view(BITS[tensor.element_size()]).as_strided((count,), (step,))


def _spacing(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of compared values and their distance in memory.

    The distance and the length of a row are coprime; otherwise all samples would lie in a few columns.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    step = max(1, extent // max(SAMPLES_MIN, extent // VALUES_PER_SAMPLE))
    row = max(strides, default=1)
    while math.gcd(step, row) > 1:
        step -= 1
    return (extent - 1) // step + 1, step
