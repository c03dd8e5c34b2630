"""The autograd node of a block: recompute one micro-batch at a time, differentiate it, keep nothing in between."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from horizon_lm.engine.forward_state import ForwardState
from horizon_lm.engine.grad_sink import GradSink, set_traps, trapped_graph
from horizon_lm.engine.micro_batches import BlockCall, RowOutputs, slice_rows
from horizon_lm.engine.recompute import RecomputeContext, no_autocast_cache, replaying
from horizon_lm.engine.tree import Tree
from horizon_lm.errors import RecomputeMismatchError, StreamingError
from horizon_lm.model import capture
from horizon_lm.model.attention import attending
from horizon_lm.schedule.ops import Kind, block

if TYPE_CHECKING:
    from horizon_lm.engine.blocks import Blocks

Graph = tuple[list[torch.Tensor], list[torch.Tensor]]  # of one micro-batch: input leaves and outputs


class SavedForBackward:
    """What the computation of a block leaves for its backward: random states, and where there is room its graph.

    Attributes:
        states: from which each micro-batch started.
        sink: takes the gradients of a graph that the forward makes; None if it makes none.
        graphs: of the micro-batches, if they are kept.

    Some blocks run with a graph only to drop it. A compiled one would otherwise be compiled a second time, and its
    recomputation might differ from it in the last bits. In one with hooks inside, a hook may keep an activation: its graph
    is a trap, so that a loss that depends on it is an error instead of a gradient that is silently missing.
    """

    def __init__(
        self, blocks: "Blocks", index: int, forward_state: ForwardState, needs_grad: Sequence[bool], hooked: bool
    ) -> None:
        self.forward_state, self._needs_grad, self._hooked = forward_state, needs_grad, hooked
        self.states: list[Any] = []
        self._holds = index in forward_state.graphs and not hooked
        with_graph = self._holds or hooked or blocks.engine.options.compile
        self.sink = GradSink(blocks.engine, index) if with_graph else None
        self.graphs: list[Graph] = []

    def params(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return what the block computes with: leaves of a graph, if there is to be one."""
        if self.sink is None:
            return weights
        return self.sink.traps(weights) if self._hooked else self.sink.leaves(weights)

    def inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs of one micro-batch, likewise."""
        if self.sink is None:
            return tensors
        leaves = self.leaves(tensors)
        if self._hooked:
            set_traps(leaves)
        return leaves

    def leaves(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs of a graph of its own."""
        return [t.detach().requires_grad_(need) for t, need in zip(inputs, self._needs_grad, strict=True)]

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which the block's forward runs."""
        return trapped_graph() if self._hooked else nullcontext()

    def keep(self, state: Any, inputs: list[torch.Tensor], output: Any) -> Any:
        """A micro-batch has been computed. Returns its output, without the graph if that is kept."""
        self.states.append(state)
        if self.sink is None:
            return output
        tree = Tree(output)
        if self._holds:
            self.graphs.append((inputs, tree.tensors))
        return tree.rebuild([tensor.detach() for tensor in tree.tensors])


class BlockAutograd:
    """One block of one forward, and what its backward needs besides its boundary."""

    def __init__(
        self, blocks: "Blocks", index: int, call: BlockCall, keys: tuple[str, ...], forward_state: ForwardState
    ) -> None:
        self.blocks, self.index, self.call, self.keys, self.forward_state = blocks, index, call, keys, forward_state
        self.module = blocks.blocks[index]
        self.context = RecomputeContext(blocks.engine.device.torch_device.type)
        self.mode = self.module.mode()
        self.hooked = self.module.is_hooked()
        self.segments, self.caching = blocks.segments, blocks.caching
        self.micro_batches = blocks.engine.running.micro_batches
        self.num_rows = blocks.engine.running.num_rows
        self.outputs: RowOutputs
        self.dims: list[int | None]
        self.kept: SavedForBackward
        self.attributes: list[dict[str, Any]]
        self.hidden_shape: torch.Size
        self.hidden_dtype: torch.dtype
        self.expected: list[torch.Tensor] | None = None  # outputs, with check_recompute
        self.true_inputs: list[torch.Tensor] | None = None  # kept apart, with check_gradients

    @property
    def offloaded(self) -> bool:
        return self.index in self.forward_state.boundaries

    @property
    def plainly(self) -> bool:
        """Uncompiled: what listens inside a block would not be called, and a cache knows each block by its number."""
        return bool(self.keys) or self.hooked or self.caching

    def forward(self, needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        blocks = self.blocks
        self.kept = SavedForBackward(blocks, self.index, self.forward_state, needs_grad, self.hooked)
        self.outputs = blocks.compute_forward(self.index, self.call, self.keys, self.plainly, self.kept)
        self.dims = blocks.dims(self.index, self.call)
        self.attributes = self.module.attributes()
        tensors = tuple(self.outputs.tensors)
        if blocks.gradient_check is not None and self.index in blocks.gradient_check.indices:
            self.true_inputs = [t.detach().clone() for t in self.call.tensors]
        if blocks.engine.options.check_recompute:
            self.expected = [t.clone() for t in tensors]
        return tensors

    def backward(
        self, inputs: list[torch.Tensor | None], grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs; those of the parameters go into the outgoing slot."""
        engine, unit = self.blocks.engine, block(self.index)
        accumulates = engine.memory.accumulates
        with engine.cursor.compute(Kind.BACKWARD, unit):
            if self.offloaded:
                inputs[self.call.hidden] = self._fetched()
            got = self._differentiate_all(inputs, grads)
            input_grads, names = got
            if not engine.memory.holds(self.index):
                engine.device.poison(engine.memory.weights_of(unit))
            if engine.trained(unit) and not accumulates:
                engine.landed(unit, names)
        if engine.trained(unit) and accumulates:
            with engine.cursor.compute(Kind.STAGE, unit):
                engine.memory.outgoing_grads(self.index).copy_(engine.memory.accumulator[0])
                engine.landed(unit, names)
        if self.true_inputs is not None and self.blocks.gradient_check is not None:
            self.blocks.gradient_check.compare_block(self, self.true_inputs, grads, input_grads)
        if not self.kept.graphs:
            engine.counts["block_forward_rows"] += self.num_rows
        return input_grads

    def _differentiate_all(
        self, inputs: list[torch.Tensor | None], grads: tuple[torch.Tensor | None, ...]
    ) -> tuple[list[torch.Tensor | None], list[str]]:
        """Gradients of the inputs of all micro-batches, and the names of the parameters that got one."""
        input_grads: list[torch.Tensor | None] = [None] * len(inputs)
        kept_graphs = self.kept.graphs
        sink = self.kept.sink if kept_graphs and self.kept.sink else GradSink(self.blocks.engine, self.index)
        params = sink.leaves(self.blocks.weights(self.index))
        if not kept_graphs:
            self._require_same_attributes()
        sink.open()
        with self.module.bound(params):
            for number, (start, stop) in enumerate(self.micro_batches):
                if kept_graphs:
                    leaves, tensors = kept_graphs[number]
                    kept_graphs[number] = ([], [])
                else:
                    leaves, tensors = self._recompute(number, inputs)
                self._differentiate(start, stop, leaves, tensors, inputs, grads, input_grads)
                del leaves, tensors
        return input_grads, sink.close()

    def _require_same_attributes(self) -> None:
        """StreamingError if the block would be computed again with other attributes than in the forward."""
        before, now = self.attributes, self.module.attributes()
        if before != now:
            changed = next(name for a, b in zip(before, now, strict=True) for name in a | b if _differ(a, b, name))
            raise StreamingError(
                f"{self.module.name}: {changed!r} of one of its modules changed between the forward and its backward, which "
                "computes the block again. Change dropout rates, adapters and the like before the forward, and leave "
                "context managers such as disable_adapter() after the backward."
            )

    def _fetched(self) -> torch.Tensor:
        ring = self.blocks.engine.memory.ring.get(self.forward_state.boundary_bytes, torch.uint8, self.index % 2)
        return ring.view(self.hidden_dtype).view(self.hidden_shape)

    def _recompute(self, number: int, inputs: Any) -> Graph:
        """The forward of one micro-batch again, with a graph."""
        start, stop = self.micro_batches[number]
        leaves = self.kept.leaves([slice_rows(t, d, start, stop) for t, d in zip(inputs, self.dims, strict=True)])
        with replaying(self.blocks.engine.device, self.kept.states[number]), attending(self.segments, start, stop):
            tensors = self.context.run(lambda: self._forward_with_graph(leaves))
        self._check(tensors, start, stop)
        return leaves, tensors

    def _differentiate(
        self, start: int, stop: int, leaves: Any, tensors: Any, inputs: Any, grads: Any, input_grads: Any
    ) -> None:
        """The backward of one micro-batch."""
        per_row = [t.shape[0] // (stop - start) if t.ndim else 0 for t in tensors]
        pairs = [
            (t, slice_rows(g, 0 if len(self.micro_batches) > 1 else None, start * n, stop * n))
            for t, g, n in zip(tensors, grads, per_row, strict=True)
            if g is not None and t.requires_grad
        ]
        with torch.enable_grad():
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

        for i, (leaf, dim) in enumerate(zip(leaves, self.dims, strict=True)):
            if leaf.grad is None:
                continue
            if len(self.micro_batches) == 1:
                input_grads[i] = leaf.grad
            else:
                if input_grads[i] is None:
                    input_grads[i] = torch.zeros_like(inputs[i])
                slice_rows(input_grads[i], dim, start, stop).add_(leaf.grad)

    def _forward_with_graph(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        with (
            torch.enable_grad(),
            no_autocast_cache(),
            capture.capture(self.keys) as captured,
            self.module.in_mode(self.mode),
        ):
            args, kwargs = self.call.rebuild(leaves)
            output = self.module.forward(*args, plainly=self.plainly, **kwargs)
        return Tree((output, captured)).tensors

    def _check(self, tensors: list[torch.Tensor], start: int, stop: int) -> None:
        if self.expected is None:
            return
        rows = self.num_rows
        for tensor, whole in zip(tensors, self.expected, strict=True):
            n = whole.shape[0] // rows if whole.ndim else 0
            before = whole[start * n : stop * n] if len(self.micro_batches) > 1 else whole
            if not torch.equal(tensor, before):
                difference = (tensor.float() - before.float()).abs().max().item()
                raise RecomputeMismatchError(
                    f"{self.module.name}, rows {start} to {stop - 1}: the recomputed output differs from the forward's by up "
                    f"to {difference:.3g}"
                )


def _differ(before: dict[str, Any], now: dict[str, Any], name: str) -> bool:
    return name not in before or name not in now or before[name] != now[name]


class BlockFunction(torch.autograd.Function):
    """One opaque node per block: the only autograd graph over the model."""

    @staticmethod
    def forward(
        ctx: Any, node: BlockAutograd, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.node = node
        ctx.set_materialize_grads(False)
        outputs = node.forward(ctx.needs_input_grad[2:])
        hidden = tensors[node.call.hidden]
        node.hidden_shape, node.hidden_dtype = hidden.shape, hidden.dtype
        node.call.drop_tensors()
        kept = [None if node.offloaded and i == node.call.hidden else t for i, t in enumerate(tensors)]
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        node.outputs.release()
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        node: BlockAutograd = ctx.node
        with node.blocks.engine.backward_of(node.forward_state):
            inputs = list(ctx.saved_tensors)
            input_grads = node.backward(inputs, grads)
        return None, None, *input_grads
