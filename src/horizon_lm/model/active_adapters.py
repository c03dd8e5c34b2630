"""The state of PEFT's switches: which adapters of a model are active, trained, or switched off.

PEFT keeps it in attributes of its layers and of the model around them, where all threads see it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from horizon_lm.model.adapter_kinds import adapter_params

_SWITCHES = ("active_adapter", "_active_adapter", "_disable_adapters", "_adapters_disabled")


class State(NamedTuple):
    """The positions of all switches, and which parameters of adapters are trained, in the order of the model's modules."""

    positions: tuple[Any, ...]
    trained: tuple[bool, ...]


class ActiveAdapters:
    """The switches of a model's adapters.

    Args:
        model: a PEFT model, or the model inside it, whose adapters stay the same while this object is used.
    """

    def __init__(self, model: Any) -> None:
        self._switches = [(module, name) for module in model.modules() for name in _SWITCHES if name in module.__dict__]
        adapted = adapter_params(model)
        self._params = [param for param in model.parameters() if id(param) in adapted]

    def read(self) -> State:
        """Return the present state, to compare and to restore it."""
        with torch._C.DisableTorchFunctionSubclass():
            trained = tuple(param.requires_grad for param in self._params)
        return State(tuple(_immutable(module.__dict__[name]) for module, name in self._switches), trained)

    def restore(self, state: State) -> None:
        """Set all switches as they were in a state that `read` has returned."""
        for (module, name), position in zip(self._switches, state.positions, strict=True):
            module.__dict__[name] = list(position) if isinstance(position, tuple) else position
        with torch._C.DisableTorchFunctionSubclass():
            for param, requires_grad in zip(self._params, state.trained, strict=True):
                param.requires_grad_(requires_grad)

    @contextmanager
    def set_to(self, state: State) -> Iterator[None]:
        """Context manager: set all switches to another state, and back at the end."""
        before = self.read()
        if before == state:
            yield
            return
        self.restore(state)
        try:
            yield
        finally:
            self.restore(before)


class StatePerMember:
    """The switches of a model's adapters for several functions in lock-step, each of which may switch for itself.

    Args:
        model: the model that all functions call, as they see it.
        count: the number of functions.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        self._adapters = ActiveAdapters(model)
        self._initial = self._adapters.read()
        self._states = [self._initial] * count  # of each function, when it was interrupted
        self._running: int | None = None

    def go_on_with(self, number: int) -> None:
        """Keep the switches of the function that ran until now, and set those that this one had when it was interrupted."""
        now = self._adapters.read()
        if self._running is not None:
            self._states[self._running] = now
        if self._states[number] != now:
            self._adapters.restore(self._states[number])
        self._running = number

    def end(self) -> None:
        """Set the switches as they were before all functions."""
        self._adapters.restore(self._initial)


def _immutable(value: Any) -> Any:
    """Return the position of a switch as a value that PEFT cannot change: it changes its lists in place."""
    return tuple(value) if isinstance(value, list) else value
