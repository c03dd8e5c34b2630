"""Detect writes by other code to the weights of a streamed model.

Writes through torch increase a tensor's version counter, except those of fused optimizers, which torch announces with a
hook. Writes that bypass torch (numpy, raw pointers) are not detected, as in plain autograd.
"""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from horizon_lm.engine.host.parameters import ParameterOwner, StreamedParameter
from horizon_lm.errors import ForeignWriteWarning, StreamingError, warn
from horizon_lm.memory.store import Store
from horizon_lm.model.parts import ParamRef


class ForeignWrites:
    """A detector of writes by other code to the parameters of a model, which takes over the written values."""

    def __init__(self, refs: Mapping[str, ParamRef], store: Store) -> None:
        self._store = store
        self._names = list(refs)
        self._params = [ref.param for ref in refs.values()]
        self._addresses = self._read_addresses()
        self._versions = self._read_versions()
        self._warned = False  # of lost low halves
        watch_optimizers()

    def follow(self, with_low_halves: bool = False) -> None:
        """Take over the weights that other code has written since the last call.

        Args:
            with_low_halves: the low halves of fp32 masters, if the precision has them, were written, too.
        """
        written = self._find_written()
        if not written:
            return
        # Outer parameters and resident blocks are streamed in again, and graphs of the old values are rejected.
        self._store.weights_changed()
        with_lost_bits = [name for name in written if self._store.slab_of(name).low is not None]
        if with_lost_bits and not with_low_halves:
            for name in with_lost_bits:
                self._store.reset_low(name)
            self._warn(with_lost_bits)

    def _warn(self, written: list[str]) -> None:
        """Warn once of lost low halves."""
        if self._warned:
            return
        self._warned = True
        warn(
            f"{written[0]}{f' and {len(written) - 1} others' if written[1:] else ''} of a streamed model in precision "
            "'fp32_master' were written by other code. They are exactly the bfloat16 values that were written: the 16 low "
            "bits of their fp32 master are zero now. A loaded optimizer state of horizon_lm.AdamW restores them.",
            ForeignWriteWarning,
        )

    def _find_written(self) -> list[str]:
        """Return the parameters written since the last call, and remember their versions. Reject one that points to other memory."""
        # Addresses first: a parameter that points elsewhere counts the writes to that memory, not to the store.
        addresses = self._read_addresses()
        if addresses != self._addresses:
            moved = next(name for name, a, b in zip(self._names, addresses, self._addresses, strict=True) if a != b)
            raise StreamingError(
                f"{moved} points to other memory than the model's store (set_, or an assignment to .data by other code), "
                "so its values would be ignored; copy values with param.data.copy_(values) instead"
            )
        versions = self._read_versions()
        if versions == self._versions:
            return []
        changed = [name for name, now, old in zip(self._names, versions, self._versions, strict=True) if now != old]
        self._versions = versions
        return changed

    def _read_versions(self) -> list[int]:
        """Return the version counter of each parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for param in self._params]

    def _read_addresses(self) -> list[int]:
        """Return the address of each parameter's memory."""
        # Through the parameters' class, data_ptr() would wait for all updates: whoever asks for it may read the values.
        with torch._C.DisableTorchFunctionSubclass():
            return [param.data_ptr() for param in self._params]


@cache
def watch_optimizers() -> None:
    """Register hooks, once per process, that announce every optimizer's step to the engines of its parameters."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Announce a step before its first write, so that a step that is rejected has updated no parameter."""
    for owner in _owners_of(optimizer):
        owner.before_foreign_step(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Announce that a step has written weights: `follow` does not notice fused optimizers, which raise no version counter."""
    for owner in _owners_of(optimizer):
        owner.after_foreign_step()


def _owners_of(optimizer: Any) -> Collection[ParameterOwner]:
    """Return the owners (`ParameterOwner`) of the streamed parameters that an optimizer updates; none for our own optimizer, which
    updates slabs directly.
    """
    if getattr(type(optimizer), "updates_slabs", False):
        return set()
    params = (param for group in optimizer.param_groups for param in group["params"])
    owners = (param.owner() for param in params if isinstance(param, StreamedParameter))
    return {owner for owner in owners if owner is not None}  # None: the engine is gone
