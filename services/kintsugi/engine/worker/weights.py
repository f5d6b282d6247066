"""Tells whether a loaded model's weights are still those that it started with.

The fingerprint under which chunks are stored, and the calibration report, speak about the weights that were
loaded at start. vLLM changes weights in many ways (`reload_weights`, weight transfer, sleep level 2, worker
extensions) and tells connectors of none: `reset_cache` also comes with calls that change nothing, and need
not come with those that do. So the weights themselves are looked at:

- `load_weights` of the model, through which vLLM reloads and receives weights in the checkpoint's format, is
  observed. It is the only sign where a backend repacks weights and drops the parameters, as on CPUs.
- Where each parameter lies, and torch's count of writes to it. A write through `.data` is not counted, and
  vLLM's loaders write that way; so the count alone would miss updates.
- A sample of the values of each parameter, bit for bit. It sees what is written behind torch's back, and
  weights that were discarded.

The first two are certain. A write that only the sample can see, and that changes a share `s` of a parameter's
values, is missed with a probability of about `(1 - s) ** SAMPLES_MIN` per parameter that it changes.

A GPU gets to a sample when it has done what was queued before, and the host does not wait for it: a sample is
compared in a later step, and the next one is taken then. What a pass computed is sound once the sample at its
end is compared, because weights that have changed stay so.
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
"""Values that are compared of each parameter, at least; all of a smaller one."""
VALUES_PER_SAMPLE = 1 << 16
"""Larger parameters (stacked experts, embeddings) are compared at one value in so many."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes per value: compared as such, a NaN equals itself."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ParameterLocation:
    """Where one parameter lies."""

    name: str
    address: int
    shape: tuple[int, ...]
    num_writes: int | None
    """As torch counts them; None where it does not."""


@dataclass(frozen=True)
class Snapshot:
    """What can be seen of all parameters without reading every value."""

    places: tuple[ParameterLocation, ...]
    samples: tuple[Tensor, ...]
    """Integer tensors `[samples]` on the host, one per size of value. From a GPU, they may be read once they
    have `arrived`."""
    arrived: torch.cuda.Event | None = None

    @property
    def has_arrived(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]


def difference(before: Snapshot, now: Snapshot) -> str | None:
    """What distinguishes two snapshots of the same model; None where nothing does."""
    for was, place in zip(before.places, now.places, strict=True):
        if was != place:
            return f"{was.name} was written or replaced"
    same = all(torch.equal(*pair) for pair in zip(before.samples, now.samples, strict=True))
    return None if same else "values of parameters differ"


class LoadedWeights:
    """Watches one model from construction until `close`.

    A look costs the host some 10 µs per parameter. On a GPU none but the first waits for the device.
    """

    def __init__(self, model: nn.Module, device: torch.device = CPU) -> None:
        """`device`: where the parameters lie."""
        self._model = model
        self._device = device
        # By their modules, not themselves: what an update replaces is not kept alive.
        self._holders = [
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._change: str | None = None
        self._observe_loading()
        self._looks: deque[Snapshot] = deque()
        """Not compared yet: on a GPU one of a check and one of each pass that ends, on a CPU none."""
        self._before = self._look()
        if self._before.arrived is not None:
            self._before.arrived.synchronize()

    def check(self) -> str | None:
        """What changed since construction, None where nothing is known to have. Once changed, changed for
        good.

        On a CPU as of now; on a GPU as of the looks that have arrived, and another is taken if none is left.
        Not for a model that sleeps: its memory is unmapped.
        """
        if self.compare() is None and not self._looks:
            self.look()
        return self.compare()

    @property
    def is_late(self) -> bool:
        """Whether a look is compared later than it is taken."""
        return self._device.type == "cuda"

    def look(self) -> None:
        """Look at the parameters as they are now, or on a GPU behind everything that is queued."""
        self._note_errors(lambda: self._looks.append(self._look()))

    def compare(self) -> str | None:
        """What the looks that have arrived show to have changed, as `check`, without another look."""
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
            logger.exception("Weights that cannot be compared count as changed")
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

        # The instance's own attribute; a method of the class is left alone.
        self._model.__dict__["load_weights"] = load_and_note

    def _look(self) -> Snapshot:
        places, samples = [], defaultdict(list)
        for full_name, module, name in self._holders:
            for tensor in _plain(module._parameters[name]):
                places.append(_place_of(full_name, tensor))
                if tensor.numel():
                    sampled = sample(tensor)
                    samples[sampled.element_size()].append(sampled)
        # On the host: what lies on the device may be discarded while the model sleeps.
        grouped = tuple(download(torch.cat(group)) for _, group in sorted(samples.items()))
        arrived = torch.cuda.current_stream(self._device).record_event() if self.is_late else None
        return Snapshot(tuple(places), grouped, arrived)


def _plain(tensor: Any) -> list[Tensor]:
    """The tensors that hold a parameter's bytes: torchao's quantised ones wrap several."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner, _ = tensor.__tensor_flatten__()
    return [plain for name in inner for plain in _plain(getattr(tensor, name))]


def _place_of(name: str, tensor: Tensor) -> ParameterLocation:
    num_writes = None if tensor.is_inference() else tensor._version
    return ParameterLocation(name, tensor.data_ptr(), tuple(tensor.shape), num_writes)


def sample(tensor: Tensor) -> Tensor:
    """Values of a dense tensor at a fixed distance, as integers `[samples]`; a view."""
    count, step = _spacing(tuple(tensor.shape), tensor.stride())
    return tensor.detach().view(BITS[tensor.element_size()]).as_strided((count,), (step,))


def _spacing(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """How many values are compared, and how far apart they lie in memory.

    The distance and the length of a row have no common divisor, or all samples would lie in a few columns.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    step = max(1, extent // max(SAMPLES_MIN, extent // VALUES_PER_SAMPLE))
    row = max(strides, default=1)
    while math.gcd(step, row) > 1:
        step -= 1
    return (extent - 1) // step + 1, step
