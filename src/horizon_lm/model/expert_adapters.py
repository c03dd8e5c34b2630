"""PEFT's adapters of the tensors of stacked experts (`target_parameters`), of which some experts are computed alone.

PEFT puts a layer around the module of the experts for each tensor that has adapters. In a call it replaces the tensor W by
W + s * B A for all experts at once. If some experts are computed alone, it does the same with their parts of A and B: these are views,
so each expert's product has the operands, strides included, that it has among all experts, and therefore the same bits.

Shapes: E experts, R rank, I and O the features of an expert's input and output. A is stored as (E * R, I), B as (O, R * E), in which
the experts of a rank follow each other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


def wrappers_of(block: nn.Module, path: str) -> list[Any]:
    """Return PEFT's layers around a module of a block, given by its name inside the block, from the innermost to the outermost."""
    return [block.get_submodule(each) for each in _paths_of_wrappers(block, path)]


def outermost(block: nn.Module, path: str) -> str:
    """Return the name inside a block of the outermost of PEFT's layers around a module; that of the module if there is none."""
    return [path, *_paths_of_wrappers(block, path)][-1]


def adapters_of(block: nn.Module, path: str) -> tuple[str, ...]:
    """Return the weights of the adapters in PEFT's layers around a module, by their names inside the block."""
    return tuple(
        f"{wrapper}.{factor}.{name}"
        for wrapper in _paths_of_wrappers(block, path)
        for factor in _FACTORS
        for name, _ in block.get_submodule(f"{wrapper}.{factor}").named_parameters()
    )


_FACTORS = ("lora_A", "lora_B")


def _paths_of_wrappers(block: nn.Module, path: str) -> Iterator[str]:
    """Yield the names of PEFT's layers around a module, from the innermost to the outermost; each is the ``base_layer`` of the next."""
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
        if not hasattr(block.get_submodule(path), "parameter_name"):  # a layer that adapts no tensor of the module
            return
        yield path


def of_experts(name: str, values: torch.Tensor, count: int, experts: slice) -> torch.Tensor:
    """Return the part of an adapter's values that belongs to some experts: a view (experts, R, I) of A, or (O, R, experts) of B.

    Args:
        name: the name of the adapter's weight.
        values: the values of all experts, contiguous, or their gradients.
        count: number of all experts (E).
        experts: the experts.
    """
    if ".lora_A." in name:
        return values.view(count, -1, values.shape[-1])[experts]
    return values.view(values.shape[0], -1, count)[..., experts]


@contextmanager
def applied_to(wrappers: Sequence[Any], size: int) -> Iterator[None]:
    """Context manager: let PEFT's layers apply adapters of which the parts of some experts are bound (`of_experts`).

    Args:
        wrappers: PEFT's layers.
        size: the number of these experts.
    """
    # A layer calls `get_delta_factors` if one adapter is active, and `get_delta_weight` for each of several. Only the factors depend on
    # `num_experts`, so it is changed in that call alone: with one expert, PEFT would take the tensor for a matrix elsewhere.
    for each in wrappers:
        each.get_delta_factors = partial(_factors, each, each.get_delta_factors, size)
        each.get_delta_weight = partial(_product, each.get_delta_factors)
    try:
        yield
    finally:
        for each in wrappers:
            del each.get_delta_factors, each.get_delta_weight


Factors = tuple[torch.Tensor, torch.Tensor, float]


def _factors(wrapper: Any, get_factors: Callable[[str], Factors], size: int, adapter: str) -> Factors:
    """Return PEFT's factors of an adapter's change of the weights of some experts, and its scale.

    Args:
        wrapper: PEFT's layer.
        get_factors: PEFT's own function, which reads the number of experts from the layer.
        size: the number of experts whose parts of the adapter are bound.
        adapter: name of the adapter.
    """
    count = wrapper.num_experts
    wrapper.num_experts = size
    try:
        return get_factors(adapter)
    finally:
        wrapper.num_experts = count


def _product(factors: Callable[[str], Factors], adapter: str) -> torch.Tensor:
    """Return an adapter's change of the weights of some experts: the scaled product of its factors."""
    left, right, scale = factors(adapter)
    return left @ right * scale
