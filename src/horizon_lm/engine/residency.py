"""Planning what stays on the device, from what blocks take for a batch and the memory that is left."""

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from horizon_lm.engine.engine import Engine
from horizon_lm.engine.replay import no_autocast_cache
from horizon_lm.model.block import StreamedBlock
from horizon_lm.model.footprint import measured_footprint, run_on_meta
from horizon_lm.plan.capacity import BufferSettings, device_buffers, slab_elements
from horizon_lm.plan.device import working
from horizon_lm.plan.residency import DevicePlan, Residency
from horizon_lm.plan.spare import spend
from horizon_lm.plan.work import Footprint

_MARGIN = 0.05  # of what is spare, for what the allocator cannot use


def plan_device(engine: Engine, footprints: Sequence[Footprint], hidden: torch.Tensor) -> DevicePlan:
    """What of the last blocks may stay on the device in steps like this one, and how much memory these will take.

    Args:
        footprints: of one micro-batch in each block.
        hidden: input of the first block, for the whole batch.
    """
    options, sizes = engine.options, engine.parts.sizes()
    trained = engine.parts.sizes(trained_only=True)
    assert options.head_peak is not None
    boundary, tokens = hidden.numel() * hidden.element_size(), hidden.numel() // hidden.shape[-1]
    num_blocks, first = engine.parts.num_blocks, engine.parts.first_differentiated()
    most_tokens = max(tokens, engine.expected.tokens)  # for which buffers are made
    settings = BufferSettings(
        tokens=most_tokens,
        compute_bytes=options.compute_dtype.itemsize,
        grad_bytes=engine.store.precision.grad_dtype.itemsize,
        micro_batches=options.device_micro_batch_size is not None,
        chunked_head=options.head == "chunked",
        offloaded=num_blocks - first,
        table_rows=engine.expected.table_rows(most_tokens, sizes.vocabulary),
    )
    needed = working(
        [footprints] * len(engine.micro_batches()),
        boundary=boundary,
        tokens=tokens,
        head_peak=options.head_peak,
        head_chunk_tokens=options.head_chunk_tokens if options.head == "chunked" else None,
        first=first,
    )

    spare = engine.device.spare_bytes()
    assert spare is not None
    # Scratch memory of the links is there already.
    taken = max(0, sum(device_buffers(sizes, settings, trained).values()) - engine.device.counters.allocated_total)
    left = int(spare * (1 - _MARGIN)) - taken
    weights = [slab_elements(tensors) * options.compute_dtype.itemsize for tensors in sizes.blocks]
    residency = options.residency
    if residency is not None:
        held = sum(weights[num_blocks - residency.weights :])
        if (
            needed.most(residency.boundaries, residency.graphs) + held > spare - taken
        ):  # what was asked for cannot be had
            residency = Residency(*map(min, astuple(residency), astuple(spend(left, weights, needed))))
    else:
        residency = spend(left, weights, needed)
    kept = replace(settings, offloaded=max(0, num_blocks - residency.boundaries - first), held=residency.weights)
    peak = sum(device_buffers(sizes, kept, trained).values()) + needed.most(residency.boundaries, residency.graphs)
    return DevicePlan(residency, peak + engine.device.scratch_bytes)


def find_footprint(
    engine: Engine, block: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Footprint, Any]:
    """What a block takes when it is called so: tried on the device where that can tell, else found by its shapes.

    Returns:
        That, and an output of the block's structure.
    """
    meter, dtype, device = engine.device.meter(), engine.options.compute_dtype, engine.device.torch_device
    if meter is None:
        run = run_on_meta(block.module, args, kwargs, dtype)
        return run.footprint, tree_map(lambda t: torch.zeros_like(t, device=device), run.output)
    state = engine.device.rng_state()
    try:
        with no_autocast_cache():
            return measured_footprint(block, args, kwargs, dtype, device, meter)
    finally:
        engine.device.set_rng_state(state)
