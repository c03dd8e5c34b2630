"""Putting tensors in the place of parameters while a module computes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Place = tuple[nn.Module, str, Any]  # module, name of its parameter, tensor


@contextmanager
def in_place(places: Iterable[Place]) -> Iterator[None]:
    """Inside, modules find these tensors as their parameters."""
    places = list(places)
    before = [(module, name, module._parameters[name]) for module, name, _ in places]
    for module, name, tensor in places:
        module._parameters[name] = tensor
    try:
        yield
    finally:
        for module, name, param in before:
            module._parameters[name] = param
