"""The layout of a model, from its parts."""

from collections.abc import Mapping

from horizon_lm.common.units import EMBED, Unit
from horizon_lm.memory.layout.model import ModelLayout
from horizon_lm.memory.layout.ranks import WHOLE
from horizon_lm.memory.layout.units import StorageLayout, StorageT, UnitLayout
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.routed_experts import expert_tensors


def laid_out(parts: ModelParts, units: Mapping[Unit, UnitLayout[StorageT]]) -> ModelLayout[StorageT]:
    """Return the layout of a model whose units are laid out."""
    return ModelLayout(
        units, parts.num_blocks, parts.vocabulary, parts.hidden, parts.tied, parts.hidden_matrices(), expert_tensors(parts),
        num_tower_blocks=parts.decoder_blocks.start,
    )  # fmt: skip


def model_layout(parts: ModelParts) -> ModelLayout[StorageLayout]:
    """Return the layout of a model without memory, with gradients of its trainable parameters."""
    trained = [ref.name for ref in parts.refs() if ref.param.requires_grad]
    units = {
        unit: UnitLayout(StorageLayout, unit, shapes, parts.codecs, parts.in_float32, WHOLE, is_table=unit == EMBED)
        for unit, shapes in parts.shapes().items()
    }
    for slabs in units.values():
        slabs.lay_out_grads(trained)
    return laid_out(parts, units)
