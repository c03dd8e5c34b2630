"""Let the module of a block's experts compute some of them.

Shapes: E experts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from horizon_lm.model.block_template import restore_parameters
from horizon_lm.model.expert_adapters import applied_to, wrappers_of
from horizon_lm.model.routed_experts import RoutedExperts


@contextmanager
def some_experts(experts: RoutedExperts, size: int, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context manager: let the module compute with the weights of some experts, which its calls number from 0.

    Args:
        experts: the experts of a block.
        size: number of those that are computed.
        weights: their weights (size, ...) and the parts of their adapters (`expert_adapters.of_experts`), by their names inside the block.
    """
    module, wrappers = experts.module, wrappers_of(experts.block, experts.path)
    adapted = {each.parameter_name for each in wrappers}
    places: dict[str, tuple[torch.nn.Module, str]] = {}  # module and attribute of each weight
    for name in weights:
        path, _, attribute = name.rpartition(".")
        places[name] = experts.block.get_submodule(path), attribute
    before = {name: owner._parameters[attribute] for name, (owner, attribute) in places.items()}
    count, order = module.num_experts, list(module._parameters)
    try:
        for name, (owner, attribute) in places.items():
            tensor = weights[name]
            if owner is module and attribute in adapted and not tensor.requires_grad:
                tensor = tensor.data  # torch's parametrize counts up the version, which all tensors in a slot share
            owner._parameters[attribute] = tensor  # type: ignore[assignment]
        module.num_experts = size  # type: ignore[assignment]
        with applied_to(wrappers, size):
            yield
    finally:
        for name, (owner, attribute) in places.items():
            owner._buffers.pop(attribute, None)  # see `restore_parameters`
            owner._parameters[attribute] = before[name]
        restore_parameters(module, order)
        module.num_experts = count
