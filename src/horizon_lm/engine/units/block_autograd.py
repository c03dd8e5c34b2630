"""The autograd node of a block, which saves little and recomputes and differentiates each micro-batch in the backward
pass.

Shapes: B batch rows, T tokens of a row, H hidden size. A micro-batch is the row range [start, stop) of a batch. Most passes have
one batch; the inputs and outputs of several follow each other in the node's.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any, Protocol

import torch

from horizon_lm.common.ranges import consecutive
from horizon_lm.common.units import block
from horizon_lm.engine.passes.ambient import RecomputeAmbient, no_autocast_cache
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.left_state import rejecting_state
from horizon_lm.engine.passes.micro_batches import (
    BlockCalls,
    MicroBatch,
    RowOutputs,
    rows_of_output,
    run_block,
    slice_rows,
)
from horizon_lm.engine.passes.tree import Tree
from horizon_lm.engine.units.block_computation import BlockComputation, in_memory_order
from horizon_lm.engine.units.grad_sink import GradSink
from horizon_lm.engine.units.node import UnitNode
from horizon_lm.engine.units.saved_for_backward import Graph, GraphUse, SavedForBackward
from horizon_lm.engine.units.tiled_backward import TiledBackward
from horizon_lm.errors import RecomputeMismatchError, StreamingError
from horizon_lm.schedule.ops import Kind


class BlockComparison(Protocol):
    """A comparison of the gradients of some blocks with the gradients of another computation.

    Attributes:
        indices: the blocks to compare.
    """

    indices: set[int]

    def compare_block(
        self, node: "BlockAutograd", inputs: list[torch.Tensor], grads: Sequence[torch.Tensor | None],
        input_grads: list[torch.Tensor | None],
    ) -> None:  # fmt: skip
        """Compare the gradients of a block after its backward pass.

        Args:
            node: the block's node.
            inputs: copies of the inputs of its forward pass.
            grads: the gradients of its outputs; None for an output that no loss depends on.
            input_grads: the gradients that the node computed for its inputs; None for an input without one.
        """


class BlockAutograd(UnitNode):
    """The autograd state of one block in one forward pass, except for the inputs, which autograd saves.

    Attributes:
        calls: the block's arguments for each batch; without tensors after the forward pass, since autograd saves those.
        keys: names of the outputs that transformers captures inside the block.
        hooked: other code has registered hooks inside the block.
        uncompiled: the block runs uncompiled, regardless of the model's setting.
        context: autocast, attention kernels and context variables of the forward pass.
        mode: train or eval mode of each module in the block, and their hooks.
        saved: random states and graphs saved by the forward pass.
        attributes: the modules' attributes during the forward pass.
        outputs: the outputs of all micro-batches, by batch.
        hidden: shape and dtype of the hidden states of each batch, with the dimensions in the order of their memory.
        orders: these orders of dimensions.
        expected: copies of the outputs, with `EngineOptions.check_recompute`.
        comparison: compares the gradients of this block; None otherwise.
        true_inputs: copies of the inputs, if the block is compared.
    """

    forward_state: ForwardState  # as there is always a backward pass
    saved: SavedForBackward
    outputs: list[RowOutputs]
    attributes: list[dict[str, Any]]
    hidden: list[tuple[torch.Size, torch.dtype]]
    orders: list[tuple[int, ...]]

    def __init__(
        self, blocks: BlockComputation, index: int, calls: BlockCalls, keys: tuple[str, ...], forward_state: ForwardState,
        hooked: bool, uncompiled: bool, comparison: BlockComparison | None,
    ) -> None:  # fmt: skip
        super().__init__(blocks.engine, forward_state)
        self.blocks, self.index, self.calls, self.keys = blocks, index, calls, keys
        self.hooked, self.uncompiled = hooked, uncompiled
        self.comparison = comparison if comparison is not None and index in comparison.indices else None
        self.module = blocks.blocks[index]
        self.context = RecomputeAmbient()
        self.mode = self.module.mode()
        self.segments, self.micro_batches, self.num_rows = calls.cut.segments, calls.cut.parts, calls.cut.rows
        self.expected: list[torch.Tensor] | None = None
        self.true_inputs: list[torch.Tensor] | None = None

    @property
    def offloaded(self) -> bool:
        """True if the block's boundary is offloaded to host memory until the backward pass."""
        return self.index in self.forward_state.boundaries

    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Compute the block and save what the backward pass needs. Return the tensors of its output."""
        blocks = self.blocks
        self.saved = SavedForBackward(blocks.engine, self.index, self.forward_state, needs_grad, self.hooked)
        self.outputs = blocks.compute_forward(self.index, self.calls, self.keys, self.uncompiled, self.saved)
        self.attributes = self.module.attributes()
        tensors = tuple(tensor for outputs in self.outputs for tensor in outputs.tensors)
        if self.comparison is not None:
            # Copies, because they are compared after the backward pass, when the ring has another boundary.
            self.true_inputs = [t.detach().clone() for t in self.calls.tensors]
        if blocks.engine.options.check_recompute:
            self.expected = [t.clone() for t in tensors]
        return tensors

    def kept(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Return the inputs, but None instead of offloaded hidden states, so that device memory does not depend on the number of blocks."""
        self.orders = [in_memory_order(inputs[i]) for i in self.calls.hidden]
        self.hidden = [
            (inputs[i].permute(order).shape, inputs[i].dtype)
            for i, order in zip(self.calls.hidden, self.orders, strict=True)
        ]
        # From here on autograd keeps the inputs, and frees them after the backward pass; it returns the outputs, which would
        # close a reference cycle here.
        self.calls.drop_tensors()
        for each in self.outputs:
            each.release()
        return [None if self.offloaded and i in self.calls.hidden else t for i, t in enumerate(inputs)]

    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Differentiate the block. Return the gradients of its inputs; the gradients of its parameters go to a slot."""
        engine, unit, inputs = self.engine, block(self.index), list(kept)
        experts = self._differentiate_experts(inputs, grads) if engine.tiles.is_cut(self.index) else None
        is_trained, accumulates = bool(engine.trained_names(unit)), engine.memory.accumulates
        with engine.cursor.compute(Kind.BACKWARD, unit):
            if experts is None:
                self._restore_from_ring(inputs)
            input_grads, names = self._differentiate_all(inputs, grads, experts)
            if not engine.layout.is_resident(self.index):
                engine.poison_weights(unit)
            # Within the computation: with update_in_backward this binds the unit's update, and the cursor goes on to
            # issue it as soon as the computation ends.
            if is_trained and not accumulates:
                engine.backward.note_written(unit, names)
        if is_trained and accumulates:
            self._round_sums(names)
        if self.comparison is not None:
            assert self.true_inputs is not None
            self.comparison.compare_block(self, self.true_inputs, grads, input_grads)
        # A kept graph was not computed again.
        if self.saved.graph_use is not GraphUse.KEPT:
            engine.counts["block_forward_rows"] += self.calls.cut.num_rows
        return input_grads

    def _round_sums(self, names: list[str]) -> None:
        """Round the gradients, which a float32 buffer has as sums over micro-batches, into the slot from which they land."""
        engine, unit = self.engine, block(self.index)
        # A computation of its own, so that only this rounding, and not the backward pass before it, waits until the
        # gradients of the block before have left the single slot.
        with engine.cursor.compute(Kind.STAGE, unit):
            for rounded, sums in zip(engine.memory.grads_of(unit), engine.memory.sums_of(unit), strict=True):
                rounded.copy_(sums)
            engine.backward.note_written(unit, names)

    def _differentiate_experts(
        self, inputs: list[torch.Tensor | None], grads: Sequence[torch.Tensor | None]
    ) -> TiledBackward:
        """Differentiate the experts of a block with tiles, before its core. Return what the core's backward pass needs of them.

        The core is computed again first, as far as the gradients of the experts' outputs, from which the tiles are differentiated.

        The arguments are those of `backward`; ``inputs`` gets its offloaded hidden states back.
        """
        engine = self.engine
        experts = TiledBackward(engine, self.index, self.saved.experts)
        self._require_same_attributes()
        with engine.cursor.compute(Kind.RECOMPUTE, block(self.index)):
            self._restore_from_ring(inputs)
            with self.module.bound(experts.sink.leaves(self.blocks.weights(self.index))):
                experts.find_output_grads(
                    recompute=lambda number: self._recompute(number, inputs),
                    pairs_of=lambda number, graph: self.outputs_and_grads(number, graph, grads),
                )
        experts.differentiate_tiles(self.context.run)
        return experts

    def _differentiate_all(
        self, inputs: list[torch.Tensor | None], grads: Sequence[torch.Tensor | None], experts: TiledBackward | None
    ) -> tuple[list[torch.Tensor | None], list[str]]:
        """Differentiate all micro-batches, except for experts that are cut into tiles. Return the gradients of the node's inputs,
        and the names of the parameters that received a gradient, those of the experts included.
        """
        saved = self.saved
        input_grads: list[torch.Tensor | None] = [None] * len(inputs)  # (B, T, H) for the hidden states
        if saved.graph_use is GraphUse.KEPT:
            assert saved.sink is not None
            sink = saved.sink  # the sink that receives the gradients of the graphs' leaves
        else:
            sink = GradSink(self.engine, self.index) if experts is None else experts.sink
            # A kept graph was made under the attributes of the forward pass, so only a recompute can differ.
            self._require_same_attributes()
        # Not before the computation has begun: until then the slot may still be landing another block's gradients.
        sink.open()
        # Weights were streamed in again, so the leaves of the forward pass, if it had any (`GraphUse`), are gone.
        with self.module.bound(sink.leaves(self.blocks.weights(self.index))):
            for number in range(len(self.micro_batches)):
                graph = saved.take_graph(number) if saved.graphs else self._graph_of(number, inputs, experts)
                self.differentiate_part(number, graph, inputs, grads, input_grads)
                del graph  # freed before the next micro-batch makes its graph
        names = sink.close()
        return input_grads, names if experts is None else self._in_slab_order({*names, *experts.written})

    def _graph_of(self, number: int, inputs: list[torch.Tensor | None], experts: TiledBackward | None) -> Graph:
        """Return the graph of a micro-batch. For a single micro-batch of a block with tiles it is the graph in which `TiledBackward` found
        the gradient of the experts' output; otherwise it is a new one.
        """
        if experts is None:
            return self._recompute(number, inputs)
        if (kept := experts.take_graph()) is not None:
            return kept
        with experts.with_known_grads(number):
            return self._recompute(number, inputs)

    def _in_slab_order(self, names: Set[str]) -> list[str]:
        """Return the names of parameters in the order in which they lie in the block's slabs."""
        return [name for name in self.engine.slabs(block(self.index)).layout if name in names]

    def _require_same_attributes(self) -> None:
        """Raise StreamingError if attributes of the block's modules differ from those in the forward pass."""
        before, now = self.attributes, self.module.attributes()
        if before != now:
            of_modules = zip(before, now, strict=True)  # the attributes of each module, by name
            changed = next(name for a, b in of_modules for name in a | b if _differ(a, b, name))
            raise StreamingError(
                f"{self.module.name}: {changed!r} of one of its modules changed between the forward pass and the backward "
                "pass, which recomputes the block. Change dropout rates, adapters and the like before the forward pass, and "
                "leave context managers such as disable_adapter() after the backward pass."
            )

    def _restore_from_ring(self, inputs: list[torch.Tensor | None]) -> None:
        """Put offloaded tensors, which were fetched into the ring, back in their places: hidden states (B, T, H) of each batch into
        ``inputs``, and the outputs of experts that are cut into tiles into their calls.
        """
        if not self.offloaded:
            return
        num_bytes = self.forward_state.boundary_bytes[self.index]
        ring = self.engine.memory.ring.get(num_bytes, torch.uint8, self.index % 2)
        for index, hidden, order in zip(self.calls.hidden, take_bytes(ring, self.hidden), self.orders, strict=True):
            inputs[index] = hidden.permute([order.index(dim) for dim in range(hidden.ndim)])
        experts = self.saved.experts
        if experts:
            # In the second half, where `BlockComputation._offload_experts` has put them: they are as large as the hidden states.
            outputs = take_bytes(ring[num_bytes // 2 :], [call.output_like for call in experts])
            for call, output in zip(experts, outputs, strict=True):
                call.output = output

    def _recompute(self, number: int, inputs: list[torch.Tensor | None]) -> Graph:
        """Compute one micro-batch again, with a graph, in the context and with the random numbers of the forward pass."""
        micro_batch = self.micro_batches[number]
        batch = micro_batch.batch
        call, span, segments = self.calls.calls[batch], self.calls.spans[batch], self.segments[batch]
        leaves = self.saved.input_leaves(self.calls.inputs(inputs, micro_batch), span)
        # Only the graph is needed, unless the outputs are compared, or hooks of other code look at what is computed.
        unread = self.expected is None and not self.hooked

        def forward() -> list[torch.Tensor]:
            with (
                torch.enable_grad(),
                no_autocast_cache(),
                self.module.in_mode(self.mode),  # the model may have been switched to evaluation in between
                self.saved.repeated_choices(number),
            ):
                args, kwargs = call.rebuild(leaves)
                with rejecting_state(self.module.name, args, kwargs):
                    output = run_block(
                        self.module, args, kwargs, self.keys, segments, micro_batch.rows, self.uncompiled, unread
                    )
            return Tree(output).tensors

        with self.engine.device.rng_state_restored(self.saved.rng_states[number]):
            # On a GPU, autograd calls this in a thread of its own, which has neither the context variables nor the
            # autocast settings of the forward pass.
            outputs = self.context.run(forward)
        if self.expected is not None:
            self._require_equal(outputs, self.expected, micro_batch)
        return Graph(leaves, outputs)

    def entries_of_batch(self, tensors: Sequence[Any], micro_batch: MicroBatch) -> Sequence[Any]:
        """Return the entries for the outputs of a micro-batch's batch, from a sequence of entries for the outputs of all batches."""
        return tensors[consecutive(each.num_tensors for each in self.outputs)[micro_batch.batch]]

    def outputs_and_grads(
        self, number: int, graph: Graph, grads: Sequence[torch.Tensor | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the outputs of a micro-batch that a loss depends on, with their gradients."""
        micro_batch = self.micro_batches[number]
        return [
            (output, rows_of_output(grad, output, micro_batch))
            for output, grad in zip(graph.outputs, self.entries_of_batch(grads, micro_batch), strict=True)
            if grad is not None and output.requires_grad
        ]

    def differentiate_part(
        self, number: int, graph: Graph, inputs: list[torch.Tensor | None], grads: Sequence[torch.Tensor | None],
        input_grads: list[torch.Tensor | None],
    ) -> None:  # fmt: skip
        """Differentiate one micro-batch. Add the gradients of its inputs to ``input_grads``, the gradients of the inputs of whole batches.
        Hooks of the leaves move the gradients of the block's parameters into the sink.
        """
        micro_batch, pairs = self.micro_batches[number], self.outputs_and_grads(number, graph, grads)
        if not pairs:  # a loss depends on none of its outputs
            return
        with torch.enable_grad():
            # All outputs in one call, so that each leaf gets a single gradient, summed as plain autograd sums it.
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])

        # The leaves of a graph are the inputs of its batch, in their order.
        first_input = self.calls.spans[micro_batch.batch].start  # of this batch among the inputs of all
        for i, leaf in enumerate(graph.leaves, first_input):
            if leaf.grad is None:
                continue
            if micro_batch.is_whole:  # the only one of its batch: there is nothing to add to
                input_grads[i] = leaf.grad
                continue
            total, whole = input_grads[i], inputs[i]
            if total is None:
                assert whole is not None  # offloaded hidden states are back in their place
                total = input_grads[i] = torch.zeros_like(whole)
            # An input without rows (dim None) is shared by all micro-batches: their gradients are summed.
            slice_rows(total, self.calls.dims[i], micro_batch.rows).add_(leaf.grad)

    def _require_equal(
        self, outputs: list[torch.Tensor], expected: list[torch.Tensor], micro_batch: MicroBatch
    ) -> None:
        """Raise RecomputeMismatchError if recomputed outputs differ in any bit from the outputs of the forward pass."""
        for output, whole in zip(outputs, self.entries_of_batch(expected, micro_batch), strict=True):
            before = rows_of_output(whole, output, micro_batch)
            if not torch.equal(output, before):
                difference = (output.float() - before.float()).abs().max().item()
                raise RecomputeMismatchError(
                    f"{self.module.name}, rows {micro_batch.start} to {micro_batch.stop - 1}: the recomputed output differs from that of the "
                    f"forward pass by up to {difference:.3g}"
                )


def take_bytes(buffer: torch.Tensor, like: Iterable[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    """Return views of these shapes and dtypes into a buffer of bytes, in which they lie one after the other."""
    like = list(like)
    spans = consecutive(shape.numel() * dtype.itemsize for shape, dtype in like)
    return [buffer[span].view(dtype).view(shape) for span, (shape, dtype) in zip(spans, like, strict=True)]


def _differ(before: dict[str, Any], now: dict[str, Any], name: str) -> bool:
    return name not in before or name not in now or before[name] != now[name]
