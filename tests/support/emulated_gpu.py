"""An emulated GPU: tensors in host memory that report a CUDA device, and the part of ``torch.cuda`` that the engine
uses.

It finds mistakes that a CPU does not: an operation that mixes host and device raises, unless it is a copy, and an
    operation that would make the host wait is recorded. Everything runs immediately, so races are left to other tests.
    Inside a backward pass only numbers are checked, because tensors created by autograd report no device.
"""

import gc
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from horizon_lm.device.page_locks import PageLocks
from horizon_lm.model import segment_attention, sink_attention

GPU = torch.device("cuda", 0)
_FACTORIES = ["arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "tensor", "zeros", "zeros_like"]  # fmt: skip
_BY_VALUE = ["__bool__", "__float__", "__index__", "__int__", "cpu", "equal", "item", "masked_select", "nonzero", "numpy", "tolist", "unique", "unique_consecutive"]  # fmt: skip
_WITH_BOTH = ("copy_", "__get__", "__set__", "register_hook")


class OnGpu(torch.Tensor):
    """A tensor on the emulated GPU. Results computed from it are on the emulated GPU, too."""

    device = GPU  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class EmulatedGpu:
    """The state of the emulated GPU, and a record of its use.

    Page-locking a piece of memory that is empty or larger than ``lockable``, or whose number is in ``unlockable``, fails and leaves an
    error for the next operation, as CUDA does.

    Attributes:
        waits: operations for which the host would have waited, with their places in the code.
        lockable: the maximum number of bytes that can be page-locked in one call.
        unlockable: indices of the pieces that cannot be page-locked.
        asked: number of page-locking calls so far.
        index: the device in use. A call that CUDA makes on the current device fails on another one, where it would make a context.
        current: the current device of each thread.
        contexts: devices on which there is a context.
        settings: settings of the allocator.
        trims: number of times that the allocator gave memory back.
        fraction: the fraction of the device that the process may use.
        workspace: bytes that cuBLAS keeps for each thread that multiplies.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.waits: list[str] = []
        self.lockable = 2**62
        self.unlockable: set[int] = set()
        self.asked = 0
        self.failed: set[int] = (
            set()
        )  # the threads whose last call has failed: an error is that of a thread, and the next kernel raises it
        self.current = threading.local()
        self.contexts: set[int] = set()
        self.settings: list[str] = []
        self.trims = 0
        self.fraction = 1.0
        self.workspace = 0
        self.multiplying: set[int] = set()  # threads
        self.allocations: list[tuple[str, int]] = []  # device and page-locked memory: thread name, elements
        self._locked: list[tuple[int, int]] = []  # addresses of page-locked memory
        self._registered: dict[int, int] = {}  # bytes by address
        self._kept: list[torch.Tensor] = []  # kept so that no other memory gets these addresses

    def lock(self, start: int, num_bytes: int, flags: int = 0) -> int:
        self.use_current_device()
        self.asked += 1
        if not 0 < num_bytes <= self.lockable or self.asked - 1 in self.unlockable:
            self.failed.add(threading.get_ident())
            return 2
        self._locked.append((start, start + num_bytes))
        self._registered[start] = num_bytes
        return 0

    def unlock(self, start: int) -> int:
        self._locked = [range_ for range_ in self._locked if range_[0] != start]
        self._registered.pop(start)
        return 0

    def num_locked(self) -> int:
        return len(self._locked)

    def registered_bytes(self) -> int:
        """Return the bytes that are page-locked in place, without memory that torch page-locks for its own use."""
        return sum(self._registered.values())

    def current_device(self) -> int:
        return getattr(self.current, "index", 0)

    def use_current_device(self) -> None:
        """Note a call that makes a context on the current device, and reject it on a device that is not in use."""
        current = self.current_device()
        self.contexts.add(current)
        if current != self.index:
            raise RuntimeError(
                f"a call on cuda:{current}, in {threading.current_thread().name}; cuda:{self.index} is in use"
            )

    def set_device(self, device: Any) -> None:
        self.current.index = torch.device(device).index

    def set_fraction(self, fraction: float, device: Any = None) -> None:
        self.fraction = fraction

    @contextmanager
    def on(self, device: Any) -> Iterator[None]:
        """Context manager: make a device the current one of this thread."""
        before = self.current_device()
        self.current.index = before if device is None else device.index
        yield
        self.current.index = before

    def allocated_by_thread(self, tensor: torch.Tensor) -> None:
        self.allocations.append((threading.current_thread().name, tensor.numel()))

    def allocated(self) -> int:
        return self.workspace * len(self.multiplying)

    def is_locked(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        stop = start + tensor.numel() * tensor.element_size()
        return any(first <= start and stop <= last for first, last in self._locked)

    def is_half_locked(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        stop = start + tensor.numel() * tensor.element_size()
        return not self.is_locked(tensor) and any(first < stop and start < last for first, last in self._locked)

    def begins_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether the first byte is page-locked; CUDA checks nothing else."""
        return any(first <= tensor.data_ptr() < last for first, last in self._locked)

    def waited(self, name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # threads of copy streams may wait
        frames = [f for f in traceback.extract_stack() if "horizon_lm" in f.filename or "transformers" in f.filename]
        self.waits.append(f"{name} at {frames[-1].filename}:{frames[-1].lineno}" if frames else name)


_gpu: EmulatedGpu | None = None


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation in host memory, and label its result with a device."""
    assert _gpu is not None
    name = getattr(func, "__name__", str(func))
    plain = torch._C.DisableTorchFunctionSubclass
    with plain():
        sized = [t for t in _tensors((args, kwargs)) if t.ndim]
        uses_mask = name == "__getitem__" and any(t.dtype == torch.bool for t in _tensors(args[1:]))
    on_gpu = any(isinstance(t, OnGpu) for t in _tensors((args, kwargs)))
    if len({isinstance(t, OnGpu) for t in sized}) > 1 and name not in _WITH_BOTH:
        raise RuntimeError(f"{name}: tensors in host memory and on the GPU")
    by_value = name in _BY_VALUE or (name == "repeat_interleave" and len(_tensors((args, kwargs))) > 1)
    if on_gpu and (uses_mask or by_value):
        _gpu.waited(name)
    if name == "copy_":
        _check_copy(args[0], args[1], kwargs.get("non_blocking", False))
    to_gpu, args, kwargs = _place_result(name, args, kwargs, on_gpu)
    if on_gpu and name in ("mm", "matmul", "__matmul__", "linear"):
        _gpu.multiplying.add(threading.get_ident())
    if to_gpu and threading.get_ident() in _gpu.failed:
        _gpu.failed.discard(threading.get_ident())
        raise RuntimeError("CUDA error: out of memory")
    if name == "histc":  # supported on a CPU only for floating-point numbers
        args = (args[0].float(), *args[1:])
    with plain():
        result = func(*args, **kwargs)
        if name == "empty" and to_gpu:
            _gpu.allocated_by_thread(result)
    if name == "copy_":
        return args[0]
    if name == "__get__" and not isinstance(result, torch.Tensor):
        return result
    return tree_map(lambda leaf: _label(leaf, to_gpu), result)


def _check_copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Record a copy that makes the host wait, because it is synchronous or uses pageable memory."""
    assert _gpu is not None
    if isinstance(destination, OnGpu) == isinstance(source, OnGpu):
        return
    host = source if isinstance(destination, OnGpu) else destination
    if non_blocking and _gpu.is_half_locked(host):
        raise RuntimeError("CUDA error: invalid argument")
    if not (non_blocking and _gpu.is_locked(host)):
        _gpu.waited("copy_")


def _place_result(name: str, args: Any, kwargs: dict[str, Any], on_gpu: bool) -> tuple[bool, Any, dict[str, Any]]:
    """Return whether a result is on the GPU, and the arguments with GPU tensors replaced by host memory."""
    assert _gpu is not None
    host, asked = torch.device("cpu"), [kwargs["device"]] if kwargs.get("device") is not None else []
    if name == "to":
        asked += [a for a in args[1:] if isinstance(a, (torch.device, str))]
        asked += [a.device for a in args[1:] if isinstance(a, torch.Tensor)]
    if not asked:
        return on_gpu and name != "cpu", args, kwargs
    device = torch.device(asked[0])
    if device.type == "meta":
        return False, args, kwargs
    if name == "to":
        args = (args[0], *(host if isinstance(a, (torch.device, str)) else a for a in args[1:]))
    to_gpu = device.type == "cuda"
    if name == "to" and to_gpu != on_gpu:
        kwargs = kwargs | {"copy": True}
        if not (kwargs.get("non_blocking") and to_gpu):  # a few pageable bytes are copied immediately
            _gpu.waited("to")
    return to_gpu, args, kwargs | ({"device": host} if "device" in kwargs else {})


def _label(leaf: Any, on_gpu: bool) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, OnGpu) == on_gpu:
        return leaf
    return leaf.as_subclass(OnGpu if on_gpu else torch.Tensor)


class _Event:
    """An event that is complete once it is recorded."""

    def __init__(self, blocking: bool = False, enable_timing: bool = False) -> None:
        assert blocking  # a waiting thread must sleep

    def record(self, stream: Any = None) -> None:
        return

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        assert _gpu is not None
        _gpu.use_current_device()


class _Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        assert device == OnGpu.device
        self.device = device

    def wait_event(self, event: _Event) -> None:
        return


_HostGenerator = torch.Generator


class _Generator:
    """A generator in host memory, for any device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _HostGenerator()


@contextmanager
def emulated_gpu(free_bytes: int = 10**9, index: int = 0) -> Iterator[EmulatedGpu]:
    """Context manager: emulate a GPU, the last of ``index + 1`` GPUs. The first one is current in each thread."""
    global _gpu
    _gpu = gpu = EmulatedGpu(index)
    device = torch.device("cuda", index)

    def trim() -> None:
        gpu.trims += 1

    locks: weakref.WeakSet[PageLocks] = weakref.WeakSet()
    create = PageLocks.__init__

    def create_locks(self: PageLocks, device: torch.device) -> None:
        create(self, device)
        locks.add(self)

    random = [torch.zeros(16, dtype=torch.uint8)]
    cuda: dict[str, Any] = {
        "Event": _Event, "Stream": _Stream, "stream": lambda stream: gpu.on(getattr(stream, "device", None)), "current_stream": lambda *_: _Stream(device),
        "device": gpu.on, "set_device": gpu.set_device, "empty_cache": trim,
        "get_per_process_memory_fraction": lambda *_: gpu.fraction, "set_per_process_memory_fraction": gpu.set_fraction,
        "is_available": lambda: True, "device_count": lambda: index + 1, "current_device": gpu.current_device, "get_device_capability": lambda *_: (9, 0), "synchronize": lambda *_: None,
        "mem_get_info": lambda *_: (free_bytes, free_bytes), "memory_reserved": lambda *_: gpu.allocated(), "memory_allocated": lambda *_: gpu.allocated(),
        "max_memory_allocated": lambda *_: 0, "reset_peak_memory_stats": lambda *_: None,
        # Random numbers are drawn in host memory, whose random state is also saved; that of the device stays as it is set.
        "get_rng_state": lambda *_: random[0], "set_rng_state": lambda state, *_: random.__setitem__(0, state),
        "get_device_properties": lambda *_: SimpleNamespace(name="Emulated GPU", total_memory=free_bytes, major=9, minor=0, uuid="0", pci_domain_id=2**16, pci_bus_id=0, pci_device_id=0),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=gpu.lock, cudaHostUnregister=gpu.unlock, cudaGetErrorString=lambda code: "out of memory"),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(PageLocks, "__init__", create_locks)
        patch.setattr(OnGpu, "device", device)
        patch.setattr(torch._C, "_accelerator_setAllocatorSettings", gpu.settings.append)
        for name in _FACTORIES:
            patch.setattr(torch, name, _factory(getattr(torch, name)))
        to = torch.Tensor.to
        patch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: _call(to, (tensor, *args), kwargs))
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: gpu.begins_locked(tensor))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: _locked(tensor.clone()))
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(segment_attention, "has_kernel", lambda *_, **__: False)  # its kernel needs a real GPU
        patch.setattr(sink_attention, "_is_on_cpu", lambda _: True)  # so do its kernels
        try:
            yield gpu
        finally:
            gc.collect()  # threads of freed devices must end while the emulation is active
            for lock in list(locks):  # a device that outlives the emulation has no GPU to unlock its memory
                lock.unlock_all()


def _factory(make: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        result = _call(make, args, kwargs)
        return _locked(result) if pinned else result

    return wrapped


def _locked(tensor: torch.Tensor) -> torch.Tensor:
    assert _gpu is not None
    _gpu.use_current_device()
    _gpu.allocated_by_thread(tensor)
    _gpu._locked.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
    _gpu._kept.append(tensor)
    return tensor
