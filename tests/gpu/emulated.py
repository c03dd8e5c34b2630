"""Tensors in host memory that say they are on a GPU, so that transfers can be tried without one.

Only what transfers need: no streams, everything happens at once. As on a GPU, an operation that mixes host and device
raises, unless it copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """A tensor on the emulated GPU; what is computed from it is there as well."""

    device = GPU  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim]
        places = {isinstance(t, OnGpu) for t in tensors}
        if len(places) > 1 and func is not torch.Tensor.copy_:
            raise RuntimeError(f"{func} was given tensors in host memory and on the GPU")
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.copy_:
            return args[0]
        return result.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else result


class _Memory(TorchFunctionMode):
    """Makes tensors where they are asked for, and remembers what is page-locked."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.is_pinned:
            return args[0].untyped_storage().data_ptr() in self._pinned
        if func is torch.Tensor.pin_memory:
            return self._pin(args[0].clone())
        if func is torch.empty:
            pinned = kwargs.pop("pin_memory", False)
            if torch.device(kwargs.pop("device", None) or "cpu").type == "cuda":
                return func(*args, **kwargs).as_subclass(OnGpu)
            tensor = func(*args, **kwargs)
            return self._pin(tensor) if pinned else tensor
        return func(*args, **kwargs)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor


class _Event:
    """Everything has happened when it is recorded."""

    def __init__(self, blocking: bool = False) -> None:
        assert blocking  # a thread that waits for it sleeps

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """Inside, ``cuda:0`` is emulated, as far as a link needs it."""
    with pytest.MonkeyPatch.context() as patch, _Memory():
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        yield
