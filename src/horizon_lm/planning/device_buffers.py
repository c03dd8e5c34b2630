"""Bytes of the engine's buffers on the device: the slots of its table, and buffers that grow with the batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horizon_lm.layout.buffers import ITEMSIZE, BufferOptions, BufferTable
from horizon_lm.layout.model import TiledLayout
from horizon_lm.units import EMBED


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """The settings that determine the sizes of the engine's device buffers.

    Attributes:
        options: those that determine the sizes of slots.
        tokens: sequences of a step times the longest length.
        offloaded: number of blocks whose boundaries pass through a ring on the device.
        resident: number of last blocks with resident weights.
        table_rows, forward_table_rows: maximum number of distinct table rows read by a step, and by a batch without
            gradients, on all ranks; None for one per token.
    """

    options: BufferOptions
    tokens: int
    offloaded: int = 0
    resident: int = 0
    table_rows: int | None = None
    forward_table_rows: int = 0


def device_buffers(layout: TiledLayout[Any], table: BufferTable, settings: BufferSettings) -> Mapping[str, int]:
    """Return the bytes of each kind of buffer in a training step, for the worst case of the tokens in a batch.

    Args:
        layout: the parts of the model that have slots.
        table: their slots.
        settings: settings of the step.
    """
    resident = range(layout.model.num_blocks - settings.resident, layout.model.num_blocks)
    buffers = {
        "weight_slots": table.streamed_weights(resident).num_bytes,
        "resident_weights": sum(table.block_weights[index].num_bytes for index in resident),
    }
    buffers |= {kind: slots.num_bytes for kind, slots in table.slots.items() if kind not in buffers}
    buffers |= _activation_buffers(layout, settings)
    return {kind: num_bytes for kind, num_bytes in buffers.items() if num_bytes}


def _activation_buffers(layout: TiledLayout[Any], settings: BufferSettings) -> dict[str, int]:
    """Return the bytes of the rows of the embedding, and of the ring of offloaded boundaries."""
    model, compute_bytes = layout.model, ITEMSIZE[settings.options.compute_dtype]
    num_rows = min(settings.tokens, model.vocabulary) if settings.table_rows is None else settings.table_rows
    boundary = layout.kept_each * settings.tokens * model.hidden * compute_bytes
    grad_bytes = ITEMSIZE[settings.options.grad_dtype] if model.trained_numel(EMBED) else 0
    return {
        "table_rows": max(num_rows, settings.forward_table_rows) * model.hidden * compute_bytes,
        "table_row_grads": num_rows * model.hidden * grad_bytes,
        "boundary_ring": 2 * boundary if settings.offloaded else 0,
    }
