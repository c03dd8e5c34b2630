"""Find the lists of blocks in which a model encodes images, video or audio: its towers."""

from collections.abc import Mapping

from torch import nn


def find_towers(model: nn.Module, decoder_blocks: nn.ModuleList) -> Mapping[str, nn.ModuleList]:
    """Return the lists of blocks of a model's towers by full name, in the order of the model.

    A tower is a model of transformers inside the model, which does not contain the decoder's blocks. Its blocks are in a list of layers
    that transformers can recompute in the backward pass, so their outputs depend on their arguments alone.
    """
    from transformers import PreTrainedModel

    inside = {id(module) for module in decoder_blocks.modules()}  # of lists that were found
    found: dict[str, nn.ModuleList] = {}
    for path, tower in model.named_modules():
        if (
            not path
            or not isinstance(tower, PreTrainedModel)
            or any(part is decoder_blocks for part in tower.modules())
        ):
            continue
        for name, blocks in tower.named_modules(prefix=path):
            if isinstance(blocks, nn.ModuleList) and id(blocks) not in inside and _can_be_recomputed(blocks):
                found[name] = blocks
                inside |= {id(module) for module in blocks.modules()}
    return found


def _can_be_recomputed(blocks: nn.ModuleList) -> bool:
    """Return whether a list has entries, and each of them is a layer that transformers can recompute."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return len(blocks) > 0 and all(isinstance(each, GradientCheckpointingLayer) for each in blocks)
