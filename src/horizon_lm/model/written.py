"""Weights that a block's own forward writes, found by running it on the meta device.

A streamed block computes with copies of its weights: what its forward wrote there would be lost.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from horizon_lm.model.block import structure_key
from horizon_lm.model.footprint import copy_on_meta
from horizon_lm.model.outer_trial import OuterTrial
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.recorder import recording

_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


def find_written(parts: ModelParts, trial: OuterTrial | None) -> Mapping[int, frozenset[str]]:
    """Return by block the names of the weights that its forward may write in training; blocks that write none are left out."""
    by_kind: dict[Any, frozenset[str]] = {}
    found = {}
    for index, module in enumerate(parts.blocks) if trial is not None else ():
        kind = structure_key(module)
        if kind not in by_kind:
            assert trial is not None
            by_kind[kind] = _written(module, *trial.calls[index])
        if by_kind[kind]:
            found[index] = by_kind[kind]
    return found


def _written(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    module, args, kwargs = copy_on_meta(block, args, kwargs, torch.float32)
    module.train()
    watch = _Watch(module)
    try:
        with recording(module, args, kwargs, accelerated=False), watch, torch.no_grad():
            module.forward(*args, **kwargs)
    except Exception:  # what cannot run on the meta device is not known to write
        pass
    return frozenset(watch.written)


class _Watch(TorchFunctionMode):
    """Notes functions that write to the storage of a parameter, also through its ``data``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.written: set[str] = set()
        self._names = {param.untyped_storage()._cdata: name for name, param in module.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if writes and args and isinstance(args[0], torch.Tensor):
            written = self._names.get(args[0].untyped_storage()._cdata)
            self.written |= {written} if written is not None else set()
        return func(*args, **(kwargs or {}))
