"""This process as one that has a GPU: vLLM's own GPU worker runs in it, with tensors in the host's memory.

`pose()` comes before vLLM is imported, and nothing undoes it: a posed process is one of its own. vLLM then
chooses what it chooses on an H100: Model Runner V2, async scheduling, TRITON_ATTN where the test asks for it.
Triton's kernels, vLLM's and ours, are interpreted.

Memory of the device is the host's, with a mark on its storage: a tensor says that it is on the device if its
storage is marked, and what is computed from such tensors is marked, too. So code takes the branches that it
takes on a GPU: pinned memory, streams, events, the Triton kernel. Streams and events are those of
`pretend_cuda`. Tensors of both devices in one call are an error.

What stays out: vLLM's compiled extensions for GPUs, whose operations are those of its build for CPUs; vLLM's
two Triton kernels of every layer, which torch computes; CUDA graphs; torch.compile.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"

import numpy
import torch
import torch.distributed
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from tests.fakes.pretend_cuda import CPU, CUDA, FROM_VALUES, PretendCuda, _Event, _Stream

GIB = 1 << 30
FREE_BYTES, TOTAL_BYTES = 79 * GIB, 80 * GIB

EXTENSIONS = ("_C_stable_libtorch", "_moe_C", "vllm_flash_attn._vllm_fa2_C")
"""Compiled extensions that vLLM's Python imports on a GPU for the operations that they register."""


DATA: Any = Tensor.data
MAY_MIX = (Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__, DATA.__set__)
"""Calls in which tensors of both devices may meet."""


def is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and _has_mark(value, "is_on_device")


def _has_mark(tensor: Tensor, name: str) -> bool:
    # torch keeps a storage's Python object, and with it the mark, as long as its memory.
    return tensor.layout is torch.strided and getattr(tensor.untyped_storage(), name, False)


def _mark(tensor: Tensor, name: str = "is_on_device") -> Tensor:
    if tensor.layout is torch.strided:
        setattr(tensor.untyped_storage(), name, True)
    return tensor


def _is_cuda(device: object) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"  # type: ignore[call-overload]


class Posed(TorchFunctionMode):
    """Does on the host what is asked of the device, and says of the results that they are there."""

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        if name.endswith(".__get__"):
            return self._property(func, name, args[0])
        answer = getattr(self, "_" + name.rpartition(".")[2], None) if "Tensor" in name else None
        if answer is not None:
            return answer(*args, **kwargs)
        return self._call(func, args, kwargs)

    def _property(self, func: Any, name: str, tensor: Tensor) -> Any:
        if is_on_device(tensor):
            for ending, value in ((".device.", CUDA), (".is_cuda.", True), (".is_cpu.", False)):
                if ending in name:
                    return value
        return func(tensor)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = CPU if _is_cuda(wanted) else wanted
        pins = kwargs.pop("pin_memory", False)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(map(is_on_device, leaves))
        if on_device and func not in MAY_MIX and any(leaf.ndim and not is_on_device(leaf) for leaf in leaves):
            name = resolve_name(func) or str(func)
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        to_device = on_device if wanted is None else _is_cuda(wanted)
        result = func(*args, **kwargs)
        if to_device and func in FROM_VALUES:
            result = result.clone()
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not any(value is leaf for leaf in leaves):
                if to_device:
                    _mark(value)
                if pins:
                    _mark(value, "is_pinned")
        return result

    # What the device's tensors answer

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args, *kwargs.values()]
        like = next((value for value in given if isinstance(value, Tensor)), None)
        places = [value for value in given if isinstance(value, torch.device | str)]
        dtypes = [value for value in given if isinstance(value, torch.dtype)]
        if like is not None:
            to_device, dtype = is_on_device(like), like.dtype
        else:
            to_device = _is_cuda(places[0]) if places else is_on_device(tensor)
            dtype = dtypes[0] if dtypes else tensor.dtype
        moves = to_device != is_on_device(tensor)
        result = tensor.to(dtype=dtype, copy=moves or bool(kwargs.get("copy")))
        return _mark(result) if to_device else result

    def _cuda(self, tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return self._to(tensor, CUDA)

    def _cpu(self, tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return self._to(tensor, CPU)

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_on_device(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return tensor.numpy(*args, **kwargs)

    def _pin_memory(self, tensor: Tensor, *_args: Any) -> Tensor:
        return _mark(tensor.clone(), "is_pinned")

    def _is_pinned(self, tensor: Tensor, *_args: Any) -> bool:
        return _has_mark(tensor, "is_pinned")

    def _get_device(self, tensor: Tensor) -> int:
        return 0 if is_on_device(tensor) else -1


class Device:
    """What `torch.cuda` and `torch.accelerator` say of the device."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    total_memory = TOTAL_BYTES
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    uuid = "posed"
    L2_cache_size = 50 << 20
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    regs_per_multiprocessor = 65536
    gcnArchName = ""  # noqa: N815  (torch's name)
    is_integrated = False


class _Place(contextlib.nullcontext[None]):
    """`torch.cuda.device`."""

    def __init__(self, *_arguments: object) -> None:
        super().__init__()


def pose() -> None:
    """Make this process one that has a GPU, for good."""
    device = PretendCuda()
    _pose_torch(device)
    _pose_triton()
    _watch_all_threads()
    for name in EXTENSIONS:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    import vllm.platforms

    vllm.platforms.vllm_version_matches_substr = lambda _substring: False  # not the build for CPUs
    _load_operations()
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    vllm.platforms._current_platform = NonNvmlCudaPlatform()
    _pose_vllm()


MEMORY: dict[str, Any] = {
    "empty_cache": lambda: None,
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    **dict.fromkeys(("max_memory_allocated", "memory_allocated"), lambda *_: 0),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda *_: 0),
}
ACCELERATOR: dict[str, Any] = {
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "empty_host_cache": lambda: None,
    "current_device_index": lambda: 0,
    "set_device_index": lambda *_: None,
    "get_memory_info": lambda *_: (FREE_BYTES, TOTAL_BYTES),
}
PLACES: dict[str, Any] = {
    "current_device": lambda: 0,
    "set_device": lambda *_: None,
    "mem_get_info": lambda *_: (FREE_BYTES, TOTAL_BYTES),
    "host_memory_stats": lambda *_: {},
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "is_bf16_supported": lambda *_, **__: True,
    "manual_seed": lambda *_: None,
    "manual_seed_all": lambda *_: None,
}
"""What torch's modules say of the posed device."""


def _pose_torch(device: PretendCuda) -> None:
    @contextlib.contextmanager
    def in_stream(stream: _Stream | None) -> Iterator[None]:
        before = device.stream
        device._entered.stream = stream or before
        try:
            yield
        finally:
            device._entered.stream = before

    streams = {
        "current_stream": lambda *_: device.stream,
        "default_stream": lambda *_: device.stream,
        "set_stream": lambda *_: None,
        "synchronize": lambda *_: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
    }
    cuda = PLACES | {
        "stream": in_stream,
        "device": _Place,
        "get_device_properties": lambda *_: Device,
        "get_device_name": lambda *_: Device.name,
        "get_device_capability": lambda *_: (Device.major, Device.minor),
    }

    class Stream(_Stream):
        def __init__(self, *_arguments: object, **_options: object) -> None:
            super().__init__(device)
            self.device, self.cuda_stream, self.stream_id, self.device_index = CUDA, 0, 0, 0

        def query(self) -> bool:
            return not device.is_behind

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_exception: object) -> None:
            pass

    class Event(_Event):
        def __init__(self, *_arguments: object, enable_timing: bool = False, **_options: object) -> None:
            super().__init__(device, enable_timing)

        def wait(self, _stream: object = None) -> None:
            """The device waits, not the host."""

    cuda |= {"Stream": Stream, "Event": Event, "ExternalStream": Stream}
    device._default = Stream()
    for name, value in (MEMORY | streams | cuda).items():
        setattr(torch.cuda, name, value)
    for name, value in (MEMORY | streams | ACCELERATOR).items():
        setattr(torch.accelerator, name, value)
    torch.cuda.memory.get_allocator_backend = lambda: "none"  # nothing of it is configured
    Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]  # it takes no other stream than torch's
    torch.Event = Event  # type: ignore[misc,assignment]
    torch.Stream = Stream  # type: ignore[misc,assignment]
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, _over_gloo(getattr(torch.distributed, name)))


def _over_gloo(make: Any) -> Any:
    """The function, with gloo in NCCL's place."""

    def make_over_gloo(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        return make(*("gloo" if "nccl" in str(arg) else arg for arg in args), **kwargs)

    return make_over_gloo


def _pose_triton() -> None:
    import triton
    import triton.backends
    import triton.runtime.interpreter as interpreter

    class Utils:
        @staticmethod
        def get_device_properties(*_arguments: object) -> dict[str, int]:
            return {
                "multiprocessor_count": 132,
                "max_shared_mem": 232448,
                "max_num_regs": 65536,
                "warpSize": 32,
            }

    driver = types.SimpleNamespace(
        utils=Utils(),
        get_current_target=lambda: types.SimpleNamespace(backend="cuda", arch=90, warp_size=32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: CPU,
        get_device_interface=lambda: torch.cuda,
        set_current_device=lambda *_: None,
        get_benchmarker=lambda: None,
        get_current_stream=lambda *_: 0,
    )
    triton.backends.backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    triton.runtime.driver.set_active(driver)
    # While a kernel runs, the interpreter replaces functions of Triton's language for the whole process.
    run, turn = interpreter.GridExecutor.__call__, threading.Lock()

    def run_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        with turn, numpy.errstate(all="ignore"):  # of masked elements
            run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = run_alone
    store = interpreter.InterpreterBuilder.create_masked_store

    def store_where(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)  # vLLM's grammar kernel masks by integers
        return store(self, pointers, value, mask, *others)

    interpreter.InterpreterBuilder.create_masked_store = store_where
    # The interpreter takes a number out of an array of one element, which numpy no longer does.
    source = inspect.getsource(interpreter._patch_lang_tensor)
    for kind in ("int", "bool"):
        source = source.replace(f"{kind}(self.handle.data)", f"{kind}(self.handle.data.reshape(-1)[0])")
    exec(compile(source, interpreter.__file__, "exec"), interpreter.__dict__)


def _watch_all_threads() -> None:
    run = threading.Thread.run

    def run_posed(self: threading.Thread) -> None:
        with Posed():
            run(self)

    threading.Thread.run = run_posed  # type: ignore[method-assign]
    Posed().__enter__()


def _pose_vllm() -> None:
    import vllm.model_executor.layers.attention.attention as attention
    import vllm.v1.attention.backends.triton_attn as triton_attn
    import vllm.v1.sample.ops.topk_topp_sampler as sampler
    import vllm.v1.worker.gpu_worker as gpu_worker

    library = torch.library.Library("vllm", "IMPL")
    _KEPT.append(library)
    for name in ("unified_kv_cache_update", "unified_attention_with_output", "unified_attention"):
        if hasattr(attention, name):
            library.impl(name, _posed(getattr(attention, name)), "CPU")
    gpu_worker.kernel_warmup = lambda *_: (
        None
    )  # of compiled kernels, and it imports models that need torchvision
    # Interpreted, vLLM's own two take seconds per step; ours stays what it is.
    triton_attn.unified_attention = attend
    triton_attn.triton_reshape_and_cache_flash = write
    sampler.apply_top_k_top_p_triton = sampler.apply_top_k_top_p_pytorch


def attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    softmax_scale: float,
    window_size: tuple[int, int],
    block_table: Tensor,
    **_others: Any,
) -> None:
    """vLLM's `unified_attention` in torch, for causal attention without biases: `q` and `out` are
    `[tokens, heads, width]`, `k` and `v` `[blocks, block_size, kv_heads, width]`."""
    starts = cu_seqlens_q.tolist()
    group = q.shape[1] // k.shape[2]
    for row, (length, start, end) in enumerate(zip(seqused_k.tolist(), starts, starts[1:], strict=False)):
        if end <= start:
            continue
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).transpose(0, 1).to(q.dtype)
            for cache in (k, v)
        )
        places = torch.arange(length, device=q.device)
        queries = places[length - (end - start) :, None]
        mask = places <= queries
        if window_size[0] >= 0:
            mask &= places >= queries - window_size[0]
        found = torch.nn.functional.scaled_dot_product_attention(
            q[start:end].transpose(0, 1), keys, values, attn_mask=mask, scale=softmax_scale
        )
        out[start:end] = found.transpose(0, 1)


def write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *_others: Any
) -> None:
    """vLLM's `triton_reshape_and_cache_flash` in torch: `[tokens, heads, width]` into
    `[blocks, block_size, heads, width]`."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, rows = slots // key_cache.shape[1], slots % key_cache.shape[1]
    count = len(slot_mapping)
    key_cache[blocks, rows] = key[:count][kept].to(key_cache.dtype)
    value_cache[blocks, rows] = value[:count][kept].to(value_cache.dtype)


def copy_memory(sources: Tensor, targets: Tensor, sizes: Tensor, _any_order: bool) -> None:
    """vLLM's `swap_blocks_batch`: copy so many bytes from each address to the other."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


_KEPT: list[Any] = []


def _load_operations() -> None:
    """Load the operations of the build for CPUs: those that both builds have work on the device's memory,
    too. Operations by which vLLM asks the extension what it supports are added."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()
    library = torch.library.Library("_C", "FRAGMENT")
    _KEPT.append(library)
    for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda _capability: False, "CompositeExplicitAutograd")
    caches = torch.library.Library("_C_cache_ops", "FRAGMENT")
    _KEPT.append(caches)
    caches.define("swap_blocks_batch(Tensor sources, Tensor targets, Tensor sizes, bool any_order) -> ()")
    caches.impl("swap_blocks_batch", copy_memory, "CPU")
    library.define("get_cuda_view_from_cpu_tensor(Tensor tensor) -> Tensor")
    # Another storage over the same memory: the one is the host's, the other the device's.
    library.impl(
        "get_cuda_view_from_cpu_tensor", lambda tensor: _mark(torch.from_numpy(tensor.numpy())), "CPU"
    )


def _posed(operation: Any) -> Any:
    """The operation, which torch calls with the mode set aside."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with Posed():
            return operation(*args, **kwargs)

    return call
