"""Find the linear layers of blocks whose products can be computed in FP8, and cast their weights while a block computes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from horizon_lm.errors import ModelNotSupportedError, warn
from horizon_lm.model.float8.casting import CAST, CastWeight
from horizon_lm.model.float8.linear import compute
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.routed_experts import num_experts

MULTIPLE = 16
"""The widths of a layer must be multiples of this: of the bytes that an FP8 product on a GPU reads at once."""


class _Layers(NamedTuple):
    """The linear layers of a block, by their names inside it.

    Attributes:
        suitable: those whose products can be computed in FP8.
        uneven: those whose widths are not multiples of `MULTIPLE`.
    """

    suitable: Mapping[str, nn.Linear]
    uneven: Mapping[str, nn.Linear]


def use_float8(parts: ModelParts, blocks: Iterable[tuple[int, nn.Module]]) -> None:
    """Compute the products of blocks' linear layers in FP8 whenever their weights are cast, and warn of those that stay as they are.

    Routers and adapters stay as they are, and so do layers that are no `torch.nn.Linear`, such as stacked experts.

    Args:
        parts: the parts of the model.
        blocks: blocks, or copies of them, with their indices.

    Raises:
        ModelNotSupportedError: no layer is suitable.
    """
    found = {index: _find_layers(parts, index, each) for index, each in blocks}
    for layers in found.values():
        for layer in layers.suitable.values():
            # A bound method, so that a copy of the block has its own.
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    if not any(layers.suitable for layers in found.values()):
        raise ModelNotSupportedError(
            f"products: float8: the blocks of {type(parts.model).__name__} have no torch.nn.Linear whose widths are multiples of "
            f"{MULTIPLE}; leave products: plain"
        )
    uneven = {name: each for layers in found.values() for name, each in layers.uneven.items()}
    if uneven:
        names = ", ".join(
            f"{name} ({each.in_features} to {each.out_features})" for name, each in sorted(uneven.items())
        )
        warn(
            f"products: float8: these layers are computed as without it, because their widths are not multiples of {MULTIPLE}: {names}"
        )


def _find_layers(parts: ModelParts, index: int, block: nn.Module) -> _Layers:
    """Return the linear layers of a block that are neither routers nor adapters, those with widths for kernels of FP8 apart from the others."""
    experts = num_experts(parts.model.config.get_text_config())
    adapters = parts.adapters.get(index, frozenset())
    prefix = f"{parts.block_names[index]}."
    layers = {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and is_plain(module)
        and module.out_features != experts  # a router has an output for each expert
        and f"{prefix}{name}.weight" not in adapters
    }
    suitable = {name: each for name, each in layers.items() if _has_suitable_widths(each)}
    uneven = {name: each for name, each in layers.items() if name not in suitable}
    return _Layers(suitable=suitable, uneven=uneven)


def is_plain(layer: nn.Linear) -> bool:
    """Return whether a layer computes as `torch.nn.Linear` does, or in FP8."""
    instance_forward = layer.__dict__.get("forward")
    return type(layer).forward is nn.Linear.forward and (instance_forward is None or is_float8(layer))


def _has_suitable_widths(layer: nn.Linear) -> bool:
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def is_float8(module: nn.Module) -> bool:
    """Return whether `use_float8` has changed a module."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is _forward


def float8_layers(block: nn.Module) -> list[nn.Linear]:
    """Return the layers of a block that `use_float8` has changed."""
    return [module for module in block.modules() if isinstance(module, nn.Linear) and is_float8(module)]


@contextmanager
def casting(layers: Sequence[nn.Linear], differentiates: bool) -> Iterator[None]:
    """Context manager: compute the products of these layers in FP8, with their present weights, which are cast once.

    Args:
        layers: layers from `float8_layers`.
        differentiates: cast them for a backward pass, too.
    """
    try:
        for layer in layers:
            with torch.no_grad():
                setattr(layer, CAST, CastWeight.of(layer.weight, differentiates))
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop(CAST, None)


def _forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Run a linear layer, with its products in FP8 if its weight is cast. ``inputs``: (..., I)."""
    cast = getattr(self, CAST, None)
    if cast is None or inputs.numel() == 0:
        return nn.Linear.forward(self, inputs)
    return compute(self, cast, inputs)
