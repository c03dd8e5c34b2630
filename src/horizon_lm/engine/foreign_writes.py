"""Noticing what other code does to the weights of a streamed model.

Writes through torch count a tensor's version up, but for those of fused optimizers, which torch announces with a hook.
Memory that is written behind torch's back (numpy, raw pointers) goes unnoticed, as it does in plain autograd.

"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from horizon_lm.engine.parameters import StreamedParameter
from horizon_lm.errors import StreamingError
from horizon_lm.model.units import ParamRef


class WeightWatch:
    """Finds parameters that were written since the last look."""

    def __init__(self, refs: Mapping[str, ParamRef]) -> None:
        self._names = list(refs)
        self._params = [ref.param for ref in refs.values()]
        self._addresses = self._read_addresses()
        self._versions = self._read_versions()

    def written(self) -> list[str]:
        """Names of parameters that were written. StreamingError for one that points to other memory."""
        addresses = self._read_addresses()
        if addresses != self._addresses:
            moved = next(n for n, a, b in zip(self._names, addresses, self._addresses, strict=True) if a != b)
            raise StreamingError(
                f"{moved} points to other memory than the model's store (set_, or an assignment to .data by other code), "
                "so its values would be ignored; copy values with param.data.copy_(values) instead"
            )
        versions = self._read_versions()
        if versions == self._versions:
            return []
        changed = [n for n, a, b in zip(self._names, versions, self._versions, strict=True) if a != b]
        self._versions = versions
        return changed

    def _read_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for param in self._params]

    def _read_addresses(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param.data_ptr() for param in self._params]


@cache
def watch_optimizers() -> None:
    """Have every optimizer's step announced to the engines whose parameters it updates. Done once a process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for engine in _engines(optimizer):
        engine.before_foreign_step(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for engine in _engines(optimizer):
        engine.weights_changed()


def _engines(optimizer: Any) -> Iterator[Any]:
    """Engines of the parameters of somebody else's optimizer."""
    if getattr(type(optimizer), "updates_slabs", False):
        return
    yield from _owners(param for group in optimizer.param_groups for param in group["params"])


def _owners(params: Iterable[Any]) -> set[Any]:
    found = (param.owner() for param in params if isinstance(param, StreamedParameter))
    return {owner for owner in found if owner is not None}
