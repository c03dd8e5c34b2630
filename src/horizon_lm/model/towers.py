"""Find the towers of a model, which encode images, video or audio, and the lists of blocks in them."""

from collections.abc import Mapping

from torch import nn


def find_towers(model: nn.Module, decoder_blocks: nn.ModuleList) -> Mapping[str, nn.ModuleList]:
    """Return the lists of blocks of a model's towers by full name, in the order of the model.

    A tower is a model of transformers inside the model, which does not contain the decoder's blocks. Its blocks are in a list of layers
    that transformers can recompute in the backward pass, so their outputs depend on their arguments alone.
    """
    inside = {id(module) for module in decoder_blocks.modules()}  # of lists that were found
    found: dict[str, nn.ModuleList] = {}
    for path, tower in outermost_towers(model, decoder_blocks).items():
        for name, blocks in tower.named_modules(prefix=path):
            if isinstance(blocks, nn.ModuleList) and id(blocks) not in inside and _can_be_recomputed(blocks):
                found[name] = blocks
                inside |= {id(module) for module in blocks.modules()}
    return found


def outermost_towers(model: nn.Module, decoder_blocks: nn.ModuleList) -> Mapping[str, nn.Module]:
    """Return the towers of a model that are in no other tower, by full name, in the order of the model."""
    from transformers import PreTrainedModel

    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_tower = (
            path
            and isinstance(module, PreTrainedModel)
            and all(each is not decoder_blocks for each in module.modules())
        )
        if is_tower and not any(path.startswith(f"{tower}.") for tower in found):
            found[path] = module
    return found


def _can_be_recomputed(blocks: nn.ModuleList) -> bool:
    """Return whether a list has entries, and each of them is a layer that transformers can recompute."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return len(blocks) > 0 and all(isinstance(each, GradientCheckpointingLayer) for each in blocks)
