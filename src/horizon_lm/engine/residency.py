"""Planning what stays on the device, from the first batch's shape and the memory that is left."""

from torch import nn

from horizon_lm.engine.engine import Engine
from horizon_lm.engine.memory import Residency
from horizon_lm.engine.rows import BlockCall, slice_rows
from horizon_lm.model.footprint import block_footprint
from horizon_lm.plan.capacity import BufferSettings, device_buffers, slab_elements
from horizon_lm.plan.spare import LOGIT_BYTES, spend

_MARGIN = 0.05  # of what is spare, for what the allocator cannot use
_HIDDEN_COPIES = 4  # of the whole batch's hidden states, in flight between two units


def plan_residency(engine: Engine, block: nn.Module, call: BlockCall, dims: list[int | None]) -> Residency:
    """What of the last blocks may stay on the device in steps like this one.

    Args:
        block: a template of the first block.
        call: its arguments for the whole batch.
        dims: dimensions of their tensors along which micro-batches are cut.
    """
    spare = engine.device.spare_bytes()
    if spare is None:
        return Residency(engine.parts.num_blocks)
    micro_batches, options = engine.micro_batches(), engine.options
    part = [slice_rows(t, d, *micro_batches[0]) for t, d in zip(call.tensors, dims, strict=True)]
    footprint = block_footprint(block, *call.rebuild(part), options.compute_dtype)
    hidden = call.tensors[call.hidden]
    boundary = hidden.numel() * hidden.element_size()
    tokens = hidden.numel() // hidden.shape[-1]

    sizes = engine.parts.sizes()
    buffers = device_buffers(
        sizes,
        BufferSettings(
            tokens=tokens,
            compute_bytes=options.compute_dtype.itemsize,
            grad_bytes=engine.store.precision.grad_dtype.itemsize,
            micro_batches=options.device_micro_batch_size is not None,
            chunked_head=options.head == "chunked",
            offloaded=engine.parts.num_blocks,
        ),
    )
    to_come = sum(buffers.values()) - engine.device.counters.allocated_total
    at_once = min(tokens, options.head_chunk_tokens) if options.head == "chunked" else tokens
    transient = _HIDDEN_COPIES * boundary + max(footprint.peak, at_once * sizes.vocabulary * LOGIT_BYTES)
    left = int(spare * (1 - _MARGIN)) - max(0, to_come) - transient
    weights = [slab_elements(tensors) * options.compute_dtype.itemsize for tensors in sizes.blocks]
    return Residency(*spend(left, boundary, weights, footprint.graph * len(micro_batches)))
