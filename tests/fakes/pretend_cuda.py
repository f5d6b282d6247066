"""A CUDA device that is not there: tensors that say they are on it, compute on the CPU, and are watched.

Code that is written for a GPU runs here as it is, with real numbers, and every place is counted where a GPU
would make the host wait, or copy from memory that is not pinned. Tensors of both devices in one call are an
error, as they are on a GPU.

The device takes `OPERATION_S` for every operation of the engine's thread, by a clock of its own that timing
events read. While `is_behind`, it has reached no event, and threads beside the engine's that wait for
one go on once it has caught up.

`PretendCuda` replaces what it must of `torch.cuda`. It watches the thread that enters it and every thread
that enters one of its streams. Only Triton's kernels cannot run; `attend` stands in for them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kintsugi.fusor.attention import reference_attention
from kintsugi.fusor.staging import loading_stream

OPERATION_S = 1e-3
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
SERVICES = str(Path(__file__).parents[2] / "services")

aten = torch.ops.aten
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._local_scalar_dense.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
}
"""Operations whose result's shape, or whose result on the host, depends on values on the device."""


class OnDevice(Tensor):
    """A tensor whose values lie in `on_host`, and which belongs to the pretended device."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, on_host: Tensor) -> OnDevice:
        tensor: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, on_host.size(), strides=on_host.stride(), dtype=on_host.dtype, device=CUDA
        )
        tensor.on_host = on_host
        PretendCuda.current().note_stream()
        return tensor

    def record_stream(self, _stream: object) -> None:
        """Nothing is queued on it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendCuda.current().call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as an instance's method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} reached the pretended device; PretendCuda.call should have caught it")


FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
"""What makes a tensor of numbers that lie in pageable memory."""


def _is_on_device(value: object) -> bool:
    return isinstance(value, OnDevice)


def _is_number(value: object) -> bool:
    """Whether it is a number on the host."""
    return not isinstance(value, Tensor) or not (value.ndim or _is_on_device(value))


def _names_rows(index: object) -> bool:
    """Whether it is a tensor of indices, and no mask."""
    return isinstance(index, Tensor) and bool(index.ndim) and index.dtype not in (torch.bool, torch.uint8)


def _host_of(value: Any) -> Any:
    return value.on_host if isinstance(value, OnDevice) else value


class _Waits(TorchDispatchMode):
    """Counts, below torch's composite functions, what a GPU would make the host wait for."""

    def __init__(self, pretended: PretendCuda) -> None:
        super().__init__()
        self._pretended = pretended

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():
            # There, composite functions arrive whole.
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        if func in SIZED_BY_VALUES:
            self._pretended.count("sync", str(func))
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self._pretended.count("sync", f"{func} with a mask")
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Catches what makes tensors on the device out of nothing or out of tensors on the host."""

    def __init__(self, pretended: PretendCuda) -> None:
        super().__init__()
        self._pretended = pretended

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._pretended.call(func, args, kwargs or {})


class _Stream:
    """A stream of the pretended device: nothing is ever queued on it."""

    def __init__(self, pretended: PretendCuda) -> None:
        self._pretended = pretended

    def record_event(self) -> _Event:
        event = _Event(self._pretended)
        event.record(self)
        return event

    def wait_event(self, event: _Event) -> None:
        """The device waits, not the host."""

    def wait_stream(self, stream: _Stream) -> None:
        """The device waits, not the host."""

    def synchronize(self) -> None:
        self._pretended.count("sync", "Stream.synchronize")


class _Event:
    def __init__(self, pretended: PretendCuda, enable_timing: bool = False) -> None:
        self._pretended = pretended
        self._has_time = enable_timing
        self._recorded_s: float | None = None

    def record(self, stream: _Stream | None = None) -> None:
        self._recorded_s = self._pretended.device_s

    def query(self) -> bool:
        assert self._recorded_s is not None, "torch calls an event that was not recorded reached"
        return not self._pretended.is_behind

    def elapsed_time(self, later: _Event) -> float:
        """Milliseconds, as torch: both have to be recorded, timing events and reached."""
        assert self._has_time
        assert later._has_time
        assert self.query()
        assert later.query()
        assert self._recorded_s is not None
        assert later._recorded_s is not None
        return (later._recorded_s - self._recorded_s) * 1e3

    def synchronize(self) -> None:
        self._pretended.count("sync", "Event.synchronize")
        self._pretended.wait_until_caught_up()


class PretendCuda:
    """Enter it to have the device, and read `syncs` and `pageable` afterwards."""

    _current: PretendCuda | None = None

    def __init__(self) -> None:
        self.syncs: Counter[str] = Counter()
        """How often each place made the host wait: `file:line function operation`."""
        self.pageable: Counter[str] = Counter()
        """How often each place copied between the device and memory that is not pinned."""
        self.streams: dict[_Stream, None] = {}
        """On which tensors were made, in the order of their first; a GPU keeps freed memory for each."""
        self._default = _Stream(self)
        self._entered = threading.local()
        self._is_behind = False
        self._caught_up = threading.Condition()
        self.num_waiting = 0
        """Threads beside the engine's that wait for the device."""
        self.device_s = 0.0
        """What the operations of the engine's thread have taken."""
        self._pinned: dict[int, Tensor] = {}
        """Tensors in pinned memory by their address, kept so that no other gets the same one."""
        self._engine_thread = threading.get_ident()
        self._lock = threading.Lock()

    @classmethod
    def current(cls) -> PretendCuda:
        assert cls._current is not None, "a tensor on the device outlived it"
        return cls._current

    def clear(self) -> None:
        self.syncs.clear()
        self.pageable.clear()
        self.streams.clear()

    @property
    def is_behind(self) -> bool:
        """Whether the device has not got to any event yet."""
        return self._is_behind

    @is_behind.setter
    def is_behind(self, value: bool) -> None:
        with self._caught_up:
            self._is_behind = value
            self._caught_up.notify_all()

    def wait_until_caught_up(self) -> None:
        """In the engine's thread it returns at once: the wait was counted, and nobody else would end it."""
        if threading.get_ident() == self._engine_thread:
            return
        with self._caught_up:
            self.num_waiting += 1
            self._caught_up.wait_for(lambda: not self._is_behind)
            self.num_waiting -= 1

    @property
    def stream(self) -> _Stream:
        """The one on which this thread works."""
        entered: _Stream = getattr(self._entered, "stream", self._default)
        return entered

    def note_stream(self) -> None:
        """A tensor is made on this thread's stream."""
        with self._lock:
            self.streams.setdefault(self.stream)

    def __enter__(self) -> PretendCuda:
        assert PretendCuda._current is None
        PretendCuda._current = self
        self._patch = pytest.MonkeyPatch()
        loading_stream.cache_clear()
        patched: dict[str, Any] = {
            "is_available": lambda: True,
            "_lazy_init": lambda: None,
            "Stream": lambda *_arguments, **_options: _Stream(self),
            "Event": lambda enable_timing=False, blocking=False: _Event(self, enable_timing),
            "stream": self._in_thread,
            "current_stream": lambda *_arguments: self.stream,
            "get_device_capability": lambda *_arguments: (9, 0),
            "synchronize": lambda *_arguments: self.count("sync", "cuda.synchronize"),
        }
        for name, value in patched.items():
            self._patch.setattr(torch.cuda, name, value)
        self._patch.setattr("kintsugi.fusor.kernels.scattered.triton_attention", attend)
        # vLLM's worker for CPUs replaces it for the whole process, once an engine has run.
        self._patch.setattr(Tensor, "pin_memory", torch._C.TensorBase.pin_memory)
        self._modes = contextlib.ExitStack()
        self._modes.enter_context(_Functions(self))
        return self

    def __exit__(self, *_exception: object) -> None:
        self.is_behind = False
        self._modes.close()
        self._patch.undo()
        loading_stream.cache_clear()
        PretendCuda._current = None

    @contextlib.contextmanager
    def _in_thread(self, stream: _Stream) -> Iterator[None]:
        """`torch.cuda.stream`: watches a thread of its own, too."""
        before, self._entered.stream = self.stream, stream
        is_watched = threading.get_ident() == self._engine_thread
        try:
            with contextlib.nullcontext() if is_watched else _Functions(self):
                yield
        finally:
            self._entered.stream = before

    def count(self, what: str, operation: str) -> None:
        """Count it for the innermost line of ours that caused it; the engine's thread alone must not wait."""
        place = _place_of_ours()
        if place is None or (what == "sync" and threading.get_ident() != self._engine_thread):
            return
        with self._lock:
            (self.syncs if what == "sync" else self.pageable)[f"{place} {operation}"] += 1

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do on the host what `func` would do on the device. Results are on the device that torch would
        choose."""
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        leaves = tree_leaves((args, kwargs))
        on_device = any(map(_is_on_device, leaves))
        if name.endswith(".__get__"):
            return self._property(func, name, args[0])
        moved = self._move(func, args, kwargs)
        if moved is not None:
            return moved
        if not on_device:
            return self._make(func, args, kwargs)
        self._check_devices(func, name, leaves)
        self._check_indices(func, name, args)
        if func in FROM_VALUES:
            self.count("pageable", name)
        if threading.get_ident() == self._engine_thread:
            self.device_s += OPERATION_S
        if func in (Tensor.tolist, Tensor.numpy):
            self.count("sync", name)
            return func(args[0].on_host)
        with _Waits(self):
            result = func(*tree_map(_host_of, args), **tree_map(_host_of, kwargs))
        return self._on_device(result, leaves)

    def _property(self, func: Any, name: str, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            if not isinstance(tensor, OnDevice):
                return func(tensor)
            if ".device." in name:
                return CUDA
            if ".is_cuda." in name:
                return True
            value = func(tensor.on_host)
        return OnDevice(value) if isinstance(value, Tensor) else value

    def _on_device(self, result: Any, leaves: list[Any]) -> Any:
        """Results on the device; what was changed in place stays the very tensor that was given."""
        known = {id(leaf.on_host): leaf for leaf in leaves if isinstance(leaf, OnDevice)}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, OnDevice):
                return value
            return known[id(value)] if id(value) in known else OnDevice(value)

        return tree_map(wrap, result)

    def _check_devices(self, func: Any, name: str, leaves: list[Any]) -> None:
        """A tensor on the host is copied where it is an index or is assigned; else it is an error."""
        strangers = [
            leaf
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.ndim and not isinstance(leaf, OnDevice | CausalBias)
        ]
        if not strangers:
            return
        if func not in (Tensor.__getitem__, Tensor.__setitem__):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        self.count("pageable", name)

    def _check_indices(self, func: Any, name: str, args: Any) -> None:
        """A list as an index is copied to the device. So is a number that is written by an index, or a tensor
        of one number that lies on the host, and for that the host waits. A number goes into a slice, or
        where a mask says, as an argument of a kernel."""
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        elif func in (Tensor.index_put, Tensor.index_put_):
            indices = args[1]
        else:
            return
        lists = [index for index in indices if isinstance(index, list)]
        if lists:
            self.count("pageable", f"{name} by a list")
        if len(args) > 2 and _is_number(args[2]) and (lists or any(map(_names_rows, indices))):
            self.count("pageable", f"{name} of a number")
            self.count("sync", f"{name} of a number")

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copies between host and device, and to pinned memory; None for any other call."""
        if func is Tensor.copy_ and _is_on_device(args[0]) != _is_on_device(args[1]):
            return self._copy_into(args[0], args[1], any(args[2:]) or kwargs.get("non_blocking", False))
        if func is Tensor.pin_memory:
            with torch._C.DisableTorchFunction():
                return self._pin(args[0].clone())
        if func is Tensor.cpu:
            return self._convert(args[0], CPU, None, waits_not=False)
        if func is Tensor.cuda:
            return self._convert(args[0], CUDA, None, waits_not=False)
        if func is Tensor.to:
            return self._to(args[0], args[1:], kwargs)
        return None

    def _copy_into(self, target: Tensor, source: Tensor, waits_not: bool) -> Tensor:
        self._count_copy(source if _is_on_device(target) else target, waits_not, "copy_")
        if not _is_on_device(target) and not waits_not:
            self.count("sync", "copy_ to the host")
        with torch._C.DisableTorchFunction():
            _host_of(target).copy_(_host_of(source))
        return target

    def _to(self, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
        """`Tensor.to` with a device, a dtype, both or another tensor."""
        given = [*args, *kwargs.values()]
        like = next((value for value in given if isinstance(value, Tensor)), None)
        places = [value for value in given if isinstance(value, (torch.device, str))]
        dtypes = [value for value in given if isinstance(value, torch.dtype)]
        wanted = like.device if like is not None else torch.device(places[0]) if places else None
        dtype = like.dtype if like is not None else dtypes[0] if dtypes else None
        return self._convert(tensor, wanted, dtype, any(value is True for value in given))

    def _convert(
        self, tensor: Tensor, wanted: torch.device | None, dtype: torch.dtype | None, waits_not: bool
    ) -> Tensor:
        from_device = _is_on_device(tensor)
        to_device = from_device if wanted is None else wanted.type == "cuda"
        if from_device and not to_device:
            self.count("sync", "to the host")
        elif to_device and not from_device:
            self._count_copy(tensor, waits_not, "to the device")
        on_host = _host_of(tensor)
        with torch._C.DisableTorchFunction():
            result = on_host.to(dtype=dtype or on_host.dtype, copy=from_device != to_device)
        if result is on_host:
            return tensor
        return OnDevice(result) if to_device else result

    def _count_copy(self, on_host: Tensor, waits_not: bool, what: str) -> None:
        with torch._C.DisableTorchFunction():
            pinned = on_host.untyped_storage().data_ptr() in self._pinned
        if not pinned and on_host.numel():
            self.count("pageable", what)
        elif not waits_not:
            self.count("sync", f"{what} without non_blocking")

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call without tensors on the device, which may make some there."""
        kwargs = dict(kwargs)
        wanted = kwargs.pop("device", None)
        pin = kwargs.pop("pin_memory", False)
        on_device = wanted is not None and torch.device(wanted).type == "cuda"
        if wanted is not None and not on_device:
            kwargs["device"] = wanted
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        if on_device:
            if func in FROM_VALUES and result.numel():
                self.count("pageable", func.__name__)
            return OnDevice(result)
        return self._pin(result) if pin else result


def attend(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`reference_attention` in the place of a kernel of the device: it waits for nothing."""
    with torch._C.DisableTorchFunction():
        found = reference_attention(_host_of(query), *map(_host_of, arguments), **tree_map(_host_of, options))
    return OnDevice(found) if _is_on_device(query) else found


def _place_of_ours() -> str | None:
    """The innermost line of the product that is running; None outside of it."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SERVICES):
            return f"{file[len(SERVICES) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return None
