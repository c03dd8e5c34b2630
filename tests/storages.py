"""Bytes that tensors hold, counted by the addresses of their memory: independent of what any plan says."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Follows memory that is allocated inside, from its first tensor to its last.

    Args:
        given: tensors that are not counted.
    """

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {t.untyped_storage().data_ptr() for t in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in {0, *self._known}:
                storage = tensor.untyped_storage()
                self._known.add(storage.data_ptr())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage.data_ptr(), storage.nbytes())
        return result

    def _freed(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.live -= num_bytes
