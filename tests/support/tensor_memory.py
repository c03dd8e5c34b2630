"""The memory that tensors hold, measured without code shared with the device's counters or any plan."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class StorageMeter(TorchDispatchMode):
    """A meter of the storages allocated by torch operations. Host slabs are mappings that no operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(output):
            self._see(tensor, given)
        return output

    def _see(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in given or storage._cdata in self._known or tensor.device.type == "meta":
            return
        self._known.add(storage._cdata)
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.current -= num_bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
