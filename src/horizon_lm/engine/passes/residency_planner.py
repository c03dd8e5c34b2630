"""Plan what stays on the device, from the memory that blocks take for a batch and the memory that remains.

Shapes: B batch rows, T tokens of a row, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from horizon_lm.common.constants import DEVICE_MARGIN
from horizon_lm.common.ranges import length
from horizon_lm.common.units import tile
from horizon_lm.engine.passes.ambient import no_autocast_cache
from horizon_lm.engine.passes.device_buffers import buffer_options
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_state import PassOrder
from horizon_lm.engine.passes.micro_batches import BlockCall, BlockCalls, MicroBatch, RowOutputs
from horizon_lm.engine.passes.tree import Tree
from horizon_lm.memory.layout.buffers import BufferSettings, BufferTable, buffer_bytes
from horizon_lm.memory.layout.model import TiledLayout
from horizon_lm.memory.layout.parts import PartLayout
from horizon_lm.memory.layout.units import StorageLayout
from horizon_lm.model import capture
from horizon_lm.model.attention import attending
from horizon_lm.model.block_template import StreamedBlock, structure_key
from horizon_lm.model.laid_out import model_layout
from horizon_lm.model.trial import TrialDoneError
from horizon_lm.planning.arithmetic.device_memory import activation_memory
from horizon_lm.planning.arithmetic.outline import Footprint
from horizon_lm.planning.arithmetic.residency import (
    ActivationMemory,
    BatchSize,
    DevicePlan,
    Residency,
    choose_residency,
    lower_residency,
)
from horizon_lm.planning.measure.block_probe import measured_footprint, run_on_meta
from horizon_lm.planning.measure.core_probe import run_core_on_meta


def plan_device(
    engine: Engine,
    footprints: Sequence[Footprint],
    hidden: Sequence[int],
    order: PassOrder,
    tokens: int,
    num_micro_batches: int,
) -> DevicePlan:
    """Plan what stays on the device in steps like this one, and how much memory such steps take.

    Args:
        engine: the model's engine.
        footprints: the memory that each block takes for one micro-batch.
        hidden: bytes of each block's input for all batches of the step.
        order: the units that the step computes.
        tokens: tokens of all batches of the step.
        num_micro_batches: number of micro-batches of all batches.
    """
    options, layout = engine.options, _layout_of_step(engine)
    assert options.head_peak is not None
    num_blocks = engine.parts.num_blocks
    # With tiles, the output of the experts is kept, too.
    boundaries = [num_bytes * layout.kept_each for num_bytes in hidden]
    kept = [0 if index not in order.differentiated else num_bytes for index, num_bytes in enumerate(boundaries)]
    settings = buffer_settings(engine, tokens, kept)
    needed = activation_memory(
        [[each] * num_micro_batches for each in footprints],
        hidden=hidden,
        boundaries=boundaries,
        tokens=tokens,
        head_peak=options.head_peak,
        chunk_tokens=options.chunk_tokens,
        differentiated=order.differentiated,
    )

    table = BufferTable(layout, settings.options)
    # First for no resident block and all boundaries offloaded, to find the residency; then `final` has that residency.
    to_allocate = _bytes_to_allocate(engine, buffer_bytes(layout, table, settings))
    residency = _find_residency(engine, to_allocate, [slots.num_bytes for slots in table.block_weights], needed)
    offloaded = kept[: num_blocks - residency.boundaries]
    final = replace(buffer_settings(engine, tokens, offloaded), resident=residency.weights)
    buffers = sum(buffer_bytes(layout, table, final).values())
    step_peak = needed.step_peak(residency.boundaries, residency.graphs)
    return DevicePlan(residency, buffers + step_peak + engine.device.scratch_bytes)


def _layout_of_step(engine: Engine) -> TiledLayout[PartLayout[StorageLayout]]:
    """Return the layout of a step that trains all parameters that require a gradient now. Their gradients need not be allocated yet."""
    return model_layout(engine.parts).on(engine.store.shard).tiled(engine.options.expert_tile)


def _bytes_to_allocate(engine: Engine, buffers: Mapping[str, int]) -> int:
    """Return how many bytes are still to be allocated for these buffers, given by kind; the scratch memory of the links already is."""
    missing = max(0, sum(buffers.values()) - engine.device.counters.allocated_total)
    largest_grads = max((num for kind, num in buffers.items() if kind.endswith(("_grads", "grad_slots"))), default=0)
    return missing + engine.mesh.growth_bytes(largest_grads)


def _find_residency(engine: Engine, taken: int, weights: Sequence[int], needed: ActivationMemory) -> Residency:
    """Return the residency that the options choose, as far as it fits; without a choice, the residency that fits.

    Args:
        engine: the model's engine, on a device with limited memory.
        taken: bytes of buffers that are still to be allocated.
        weights: bytes of the weights of each block on the device.
        needed: the memory that a step needs besides weights and buffers.
    """
    spare, requested = engine.device.spare_bytes(), engine.options.residency
    assert spare is not None
    # The margin is for fragmentation of the allocator, of which the plan knows nothing.
    left = int(spare * (1 - DEVICE_MARGIN)) - taken
    if requested is None:
        return choose_residency(left, weights, needed)
    resident = sum(weights[len(weights) - requested.weights :])
    # The user's choice is kept if it fits exactly, without the margin.
    if needed.step_peak(requested.boundaries, requested.graphs) + resident <= spare - taken:
        return requested
    return lower_residency(requested, left, weights, needed)


def buffer_settings(engine: Engine, tokens: int, offloaded: Sequence[int]) -> BufferSettings:
    """Return the settings that decide the size of the engine's buffers for a step with these tokens. ``offloaded``: bytes of the boundaries
    that are offloaded.
    """
    most_tokens = max(tokens, engine.expected.tokens)  # buffers are allocated for the largest batch from the start
    return BufferSettings(
        options=buffer_options(engine.options, engine.store),
        tokens=most_tokens,
        offloaded=sum(num_bytes > 0 for num_bytes in offloaded),
        largest_boundary=max(offloaded, default=0),
        table_rows=engine.expected.table_rows(most_tokens * engine.mesh.size, engine.parts.vocabulary),
    )


def find_footprint(
    engine: Engine, index: int, block: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Footprint, Any]:
    """Return the memory that a block takes for these arguments, and an output with the block's structure.

    The block runs on the device if the device can measure memory; otherwise it runs on meta tensors, whose shapes
    suffice. So does a block with tiles, for all of which the device may have no room.
    """
    meter, dtype, device = engine.device.meter(), engine.options.compute_dtype, engine.device.torch_device
    in_float32 = engine.parts.in_float32_inside(block.name)
    if engine.tiles.is_cut(index):
        experts, largest = engine.tiles.experts[index], engine.tiles.experts_of(tile(index, 0))
        accelerated = device.type != "cpu"
        core = run_core_on_meta(block.module, experts, args, kwargs, dtype, accelerated, in_float32)
        footprint = core.footprint.with_tile(length(largest) * core.grad)
        return footprint, tree_map(lambda t: torch.zeros_like(t, device=device), core.output)
    if meter is None:
        run = run_on_meta(block.module, args, kwargs, dtype, in_float32=in_float32)
        return run.footprint, tree_map(lambda t: torch.zeros_like(t, device=device), run.output)
    # The trial must not draw the numbers of the step.
    with engine.device.rng_state_restored(), no_autocast_cache():
        return measured_footprint(block, args, kwargs, dtype, device, meter, in_float32)


class ResidencyPlanner:
    """The planner of device residency, which plans the first training step and each step larger than all before it.

    Attributes:
        plan: the plan for all batches so far; None before the first batch.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._planned = BatchSize()
        self.plan: DevicePlan | None = None

    def is_needed(self, size: BatchSize) -> bool:
        """Return whether such a batch needs planning: device memory is limited, and no plan covers the batch of a rank."""
        engine = self._engine
        # A forward pass that awaits its backward pass relies on the present plan.
        if engine.device.spare_bytes() is None or engine.between.awaits_backward():
            return False
        is_larger = not self._planned.covers(size)
        # Ranks agree on what stays on the device, so all of them plan if one has to.
        return any(engine.mesh.exchange("the size of a batch", is_larger))

    @contextmanager
    def without_residency(self) -> Iterator[None]:
        """Context manager: inside, keep only what the options choose resident; afterwards what `plan` keeps, if there is a plan."""
        engine = self._engine
        engine.resume_interrupted()
        engine.change_residency(engine.options.residency or Residency(0))
        try:
            yield
        finally:
            engine.device.trim()  # the allocator has cached memory in sizes that only the rehearsal needs
            if self.plan is not None:
                engine.change_residency(self.plan.residency)

    def adopt(self, plan: DevicePlan, size: BatchSize) -> None:
        """Extend `plan` by a plan of this rank for batches of this size."""
        plan = self._least_of_ranks(plan)
        self.plan = plan if self.plan is None else self.plan.merge(plan)
        self._planned = self._planned.merge(size)

    def _least_of_ranks(self, plan: DevicePlan) -> DevicePlan:
        """Return a plan that keeps as little resident as the rank with the least memory, since all ranks gather the same units."""
        everyone = self._engine.mesh.exchange("what stays on the device", astuple(plan.residency))
        return replace(plan, residency=Residency(*(min(column) for column in zip(*everyone, strict=True))))


class Rehearsal:
    """A rehearsal of a pass with a single batch: it answers the calls of blocks, and measures the memory that they take.

    One block of each kind is run; the others are answered with zeros of the same shapes. A kind is a structure and, in a tower, a size of
    the largest micro-batch: windows can be cut where attention to a whole image cannot.

    Args:
        engine: the model's engine.
        blocks: the model's blocks.
        cut: function that returns the calls of a block, with their micro-batches (`BlockComputation.cut`).
    """

    def __init__(
        self,
        engine: Engine,
        blocks: Sequence[StreamedBlock],
        cut: Callable[[int, Sequence[BlockCall], Sequence[int]], BlockCalls],
    ) -> None:
        self._engine, self._blocks, self._cut = engine, blocks, cut
        self._structures = [structure_key(each.module) for each in blocks]
        self._kinds: dict[int, Any] = {}  # of the blocks
        self._measured: dict[Any, RowOutputs] = {}  # structures of outputs, by kind of the block
        self._footprints: dict[Any, Footprint] = {}  # by kind of the block
        self._hidden: dict[int, int] = {}  # bytes of the input of each block for the whole batch

    def answer(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Measure the first block of each kind. Return zeros in the shapes of a block's output; raise TrialDoneError at the last."""
        call = BlockCall(args, kwargs)
        self._hidden[index] = call.tensors[call.hidden].nbytes
        kind: Any = self._structures[index]
        if index not in self._engine.parts.decoder_blocks:
            part = self._largest_part(index, call)[1]
            kind = kind, part.stop - part.start
        self._kinds[index] = kind
        if kind not in self._measured:
            self._measured[kind], self._footprints[kind] = self._measure(index, call)
        if index == len(self._blocks) - 1:
            raise TrialDoneError
        forward, like = self._engine.forward, self._measured[kind]
        forward.outputs[index] = {0: like}
        return like.zeros(like.num_rows)

    def _largest_part(self, index: int, call: BlockCall) -> tuple[BlockCalls, MicroBatch]:
        """Return the call of a block with its micro-batches, and the largest one of these."""
        calls = self._cut(index, [call], [0])
        return calls, max(calls.cut.parts, key=lambda each: each.stop - each.start)

    def _measure(self, index: int, call: BlockCall) -> tuple[RowOutputs, Footprint]:
        """Measure a block on the largest micro-batch. Return the structure of its output for the whole batch, and the memory it takes."""
        calls, part = self._largest_part(index, call)
        (count,), (segments,) = calls.cut.rows, calls.cut.segments
        inputs = calls.inputs(call.tensors, part)
        with attending(segments, *part.rows), capture.capture(()):
            footprint, output = find_footprint(self._engine, index, self._blocks[index], *call.rebuild(inputs))
        outputs = RowOutputs(count)
        outputs.add(part, Tree((output, {})))  # one part is enough for the shapes of all rows; nothing is captured
        outputs.release()  # `zeros` needs its shapes and dtypes alone
        return outputs, footprint

    def plan(self, order: PassOrder, size: BatchSize, largest: BatchSize, num_micro_batches: int) -> DevicePlan:
        """Return the plan for a step.

        Args:
            order: the units that it computes.
            size: the size of all its batches.
            largest: the size of the largest of them, which was rehearsed.
            num_micro_batches: number of its micro-batches.
        """
        nothing = Footprint(0, 0)  # of a block that the batch does not pass through
        footprints = [
            self._footprints[self._kinds[index]] if index in self._kinds else nothing
            for index in range(self._engine.parts.num_blocks)
        ]
        hidden = [
            self._hidden.get(index, 0) * size.tokens // largest.tokens
            if index in self._engine.parts.decoder_blocks
            else -(-self._hidden.get(index, 0) * size.modal // max(1, largest.modal))
            for index in range(self._engine.parts.num_blocks)
        ]
        return plan_device(self._engine, footprints, hidden, order, size.tokens, num_micro_batches)
