"""Decoder blocks: forward without a graph, and a backward that recomputes one micro-batch at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from horizon_lm.device.moves import Copy
from horizon_lm.engine.engine import Engine
from horizon_lm.engine.grad_sink import GradSink
from horizon_lm.engine.handle import ForwardHandle
from horizon_lm.engine.rehearsal import Rehearsal
from horizon_lm.engine.replay import Surroundings, no_autocast_cache, replaying
from horizon_lm.engine.rows import BlockCall, Path, ProbeDoneError, RowOutputs, compare_rows, flatten, slice_rows
from horizon_lm.errors import RecomputeMismatchError
from horizon_lm.model import capture
from horizon_lm.model.attention import Segments, attending
from horizon_lm.model.template import BoundBlock, SharedBuffers, Template, structure_key
from horizon_lm.schedule.ops import Kind, block

RowProbe = Callable[[int], list[torch.Size]]  # block index -> shapes of its tensor inputs with one more row


class Blocks:
    """Streams the decoder blocks of a model. ``probe_rows`` is set by the model that owns them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        templates: dict[Any, Template] = {}
        buffers = SharedBuffers(engine.device.torch_device)
        self._bound: list[BoundBlock] = []
        prefix = engine.parts.block_prefix
        for index, module in enumerate(engine.parts.blocks):
            key = structure_key(module)
            if key not in templates:
                templates[key] = Template(module, engine.options.compile, engine.options.mlp_chunk_tokens)
            self._bound.append(BoundBlock(f"{prefix}.{index}", module, templates[key], buffers))
        self._row_dims: dict[tuple[Any, Path], int | None] = {}
        self._output_of: dict[int, RowOutputs] = {}
        self.signature: Any = None  # of the running forward's arguments, for which row dimensions are remembered
        self.segments: Segments | None = None  # of the running forward's rows, if its attention wants them
        self.probe_rows: RowProbe | None = None
        self.probing: tuple[int, list[torch.Size]] | None = None
        self.rehearsal: Rehearsal | None = None

    def forward(self, index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stands in for ``module.forward``."""
        self.engine.require_forward(block(index))
        call = BlockCall(args, kwargs)
        if self.probing is not None:
            return self._probe(index, call)
        if self.rehearsal is not None:
            return self.rehearsal.forward(index, call)
        keys = capture.requested_keys()
        handle = self.engine.handle
        if handle is not None and index in handle.keeps:
            node = _Node(self, index, call, keys, handle)
            tensors = _BlockFunction.apply(node, self.engine.anchor, *call.tensors)
            output = node.outputs.rebuild(tensors)
        else:
            outputs = self.compute_forward(index, call, keys)
            output = outputs.rebuild(outputs.tensors)
            outputs.release()
        output, captured = output
        capture.publish(captured)
        return output

    def rehearse(self) -> Rehearsal:
        """The coming forward only shows what blocks take."""
        self.rehearsal = Rehearsal(self.engine, self._bound, self._dims, self._output_of, self.segments)
        return self.rehearsal

    def compute_forward(
        self, index: int, call: BlockCall, keys: tuple[str, ...], kept: "_Kept | None" = None
    ) -> RowOutputs:
        """Run all micro-batches through a block. ``kept``: takes what the backward needs, if there is to be one."""
        engine, bound = self.engine, self._bound[index]
        dims = self._dims(index, call)
        outputs = RowOutputs(engine.num_rows)
        sink = kept.sink if kept is not None else None
        offload = kept is not None and engine.layout.is_offloaded(index)
        if kept is not None and offload:
            self._plan_offload(index, call, kept.handle)
        with (
            engine.cursor.compute(Kind.FORWARD, block(index)),
            torch.set_grad_enabled(sink is not None),
            no_autocast_cache(),
        ):
            if offload:
                hidden = call.tensors[call.hidden]
                self._ring(index, hidden).copy_(hidden.contiguous().view(-1).view(torch.uint8))
            bound.template.set_training(bound.training_flags())
            weights = engine.memory.weights_of(block(index))
            params = self._params(index, weights) if sink is None else sink.params(self._params)
            bound.template.bind(bound, params)
            assert engine.randomness is not None
            for number, (start, stop) in enumerate(engine.micro_batches()):
                part = [slice_rows(t, d, start, stop) for t, d in zip(call.tensors, dims, strict=True)]
                if kept is not None and kept.sink is not None:
                    part = kept.leaves(part)
                with (
                    engine.randomness.drawing(number) as state,
                    capture.capture(keys) as captured,
                    attending(self.segments, start, stop),
                ):
                    args, kwargs = call.rebuild(part)
                    output = (bound.template.forward(*args, hooked=bool(keys), **kwargs), captured)
                if kept is not None:
                    output = kept.keep(state, part, output)
                outputs.add(start, stop, output)
            bound.template.refuse_written_buffers(bound)
            if not engine.memory.holds(index):
                engine.device.poison(weights)
        engine.counts["block_forward_rows"] += engine.num_rows
        self._output_of[index] = outputs
        return outputs

    def _plan_offload(self, index: int, call: BlockCall, handle: ForwardHandle) -> None:
        """Tell the device where this and all later boundaries go: they have one size."""
        engine, hidden = self.engine, call.tensors[call.hidden]
        num_bytes = hidden.numel() * hidden.element_size()
        for later in sorted(handle.keeps):
            if later >= index and later not in handle.boundaries and engine.layout.is_offloaded(later):
                host = engine.boundaries.take(handle, later, num_bytes)
                ring = engine.memory.ring.get(num_bytes, torch.uint8, later % 2)
                handle.offloads[later] = engine.cursor.bind(Kind.OFFLOAD, block(later), [Copy(host, ring, num_bytes)])

    def _ring(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.engine.memory.ring.get(hidden.numel() * hidden.element_size(), torch.uint8, index % 2)

    def _params(self, index: int, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """A block's parameters in a device buffer, by their names inside the block."""
        layout = self.engine.store.units[block(index)].layout
        prefix = f"{self._bound[index].name}."
        return {name.removeprefix(prefix): layout.view(buffer, name) for name in layout}

    # Rows

    def _dims(self, index: int, call: BlockCall) -> list[int | None]:
        """The row dimension of each tensor input; found by a probe when there are several micro-batches."""
        if len(self.engine.micro_batches()) == 1:
            return [None] * len(call.tensors)
        keys = [(self.signature, path) for path in call.paths]
        if any(key not in self._row_dims for key in keys):
            assert self.probe_rows is not None
            shapes = [t.shape for t in call.tensors]
            dims = compare_rows(call.paths, shapes, self.probe_rows(index), self.engine.num_rows)
            self._row_dims.update({(self.signature, path): dim for path, dim in dims.items()})
        return [self._row_dims[key] for key in keys]

    def _probe(self, index: int, call: BlockCall) -> Any:
        assert self.probing is not None
        wanted, shapes = self.probing
        if index == wanted:
            shapes.extend(t.shape for t in call.tensors)
            raise ProbeDoneError
        # The block's real output of this forward, with one more row of anything.
        outputs = self._output_of[index]
        return outputs.rebuild(outputs.imitate(self.engine.num_rows + 1))[0]


Graph = tuple[list[torch.Tensor], list[torch.Tensor]]  # of one micro-batch: input leaves and outputs


class _Kept:
    """What the computation of a block leaves for its backward: random states, and where there is room its graph.

    Attributes:
        states: from which each micro-batch started.
        sink: takes the gradients of a kept graph; None if there is none.
        graphs: of the micro-batches, if they are kept.

    A compiled block runs with a graph in any case, and drops it: without one it would be compiled a second time, and
    its recomputation might differ from it in the last bits.
    """

    def __init__(self, blocks: Blocks, index: int, handle: ForwardHandle, needs_grad: Sequence[bool]) -> None:
        self.handle, self._needs_grad = handle, needs_grad
        self.states: list[Any] = []
        self._holds = index in handle.graphs
        with_graph = self._holds or blocks.engine.options.compile
        self.sink = GradSink(blocks.engine, index) if with_graph else None
        self.graphs: list[Graph] = []

    def leaves(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs of a graph of its own."""
        return [t.detach().requires_grad_(need) for t, need in zip(inputs, self._needs_grad, strict=True)]

    def keep(self, state: Any, inputs: list[torch.Tensor], output: Any) -> Any:
        """A micro-batch has been computed. Returns its output, without the graph if that is kept."""
        self.states.append(state)
        if self.sink is None:
            return output
        leaves, spec = flatten(output)
        if self._holds:
            self.graphs.append((inputs, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
        return tree_unflatten([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


class _Node:
    """One block of one forward, and what its backward needs besides its boundary."""

    def __init__(
        self, blocks: Blocks, index: int, call: BlockCall, keys: tuple[str, ...], handle: ForwardHandle
    ) -> None:
        self.blocks, self.index, self.call, self.keys, self.handle = blocks, index, call, keys, handle
        self.surroundings = Surroundings(blocks.engine.device.torch_device.type)
        self.flags = blocks._bound[index].training_flags()
        self.segments = blocks.segments
        self.micro_batches = blocks.engine.micro_batches()
        self.num_rows = blocks.engine.num_rows
        self.outputs: RowOutputs
        self.dims: list[int | None]
        self.kept: _Kept
        self.hidden_shape: torch.Size
        self.hidden_dtype: torch.dtype
        self.expected: list[torch.Tensor] | None = None  # outputs, with check_recompute

    @property
    def offloaded(self) -> bool:
        return self.index in self.handle.boundaries

    def forward(self, needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        blocks = self.blocks
        self.kept = _Kept(blocks, self.index, self.handle, needs_grad)
        self.outputs = blocks.compute_forward(self.index, self.call, self.keys, self.kept)
        self.dims = blocks._dims(self.index, self.call)
        tensors = tuple(self.outputs.tensors)
        if blocks.engine.options.check_recompute:
            self.expected = [t.clone() for t in tensors]
        return tensors

    def backward(
        self, inputs: list[torch.Tensor | None], grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs; those of the parameters go into the outgoing slot."""
        engine, unit = self.blocks.engine, block(self.index)
        with engine.cursor.compute(Kind.BACKWARD, unit):
            if self.offloaded:
                inputs[self.call.hidden] = self._fetched()
            input_grads: list[torch.Tensor | None] = [None] * len(inputs)
            sink = self.kept.sink or GradSink(engine, self.index)
            sink.open()
            for number, (start, stop) in enumerate(self.micro_batches):
                if self.kept.graphs:
                    leaves, tensors = self.kept.graphs[number]
                    self.kept.graphs[number] = ([], [])
                else:
                    leaves, tensors = self._recompute(number, inputs, sink)
                self._differentiate(start, stop, leaves, tensors, inputs, grads, input_grads)
                del leaves, tensors
            sink.close()
            if not engine.memory.holds(self.index):
                engine.device.poison(engine.memory.weights_of(unit))
        if engine.trainable(unit):
            if engine.memory.accumulates:
                with engine.cursor.compute(Kind.STAGE, unit):
                    engine.memory.outgoing_grads(self.index).copy_(engine.memory.accumulator[0])
            engine.landed(unit)
        if not self.kept.graphs:
            engine.counts["block_forward_rows"] += self.num_rows
        return input_grads

    def _fetched(self) -> torch.Tensor:
        host = self.handle.boundaries[self.index]
        ring = self.blocks.engine.memory.ring.get(host.numel(), torch.uint8, self.index % 2)
        return ring.view(self.hidden_dtype).view(self.hidden_shape)

    def _recompute(self, number: int, inputs: Any, sink: GradSink) -> Graph:
        """The forward of one micro-batch again, with a graph."""
        start, stop = self.micro_batches[number]
        leaves = self.kept.leaves([slice_rows(t, d, start, stop) for t, d in zip(inputs, self.dims, strict=True)])
        with replaying(self.blocks.engine.device, self.kept.states[number]), attending(self.segments, start, stop):
            tensors = self.surroundings.run(lambda: self._forward_with_graph(leaves, sink))
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

    def _forward_with_graph(self, leaves: list[torch.Tensor], sink: GradSink) -> list[torch.Tensor]:
        bound = self.blocks._bound[self.index]
        with torch.enable_grad(), no_autocast_cache(), capture.capture(self.keys) as captured:
            bound.template.set_training(self.flags)
            bound.template.bind(bound, sink.params(self.blocks._params))
            args, kwargs = self.call.rebuild(leaves)
            output = bound.template.forward(*args, hooked=bool(self.keys), **kwargs)
        return [leaf for leaf in flatten((output, captured))[0] if isinstance(leaf, torch.Tensor)]

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
                    f"{self.blocks._bound[self.index].name}, rows {start} to {stop - 1}: the recomputed output differs "
                    f"from the forward's by up to {difference:.3g}"
                )


class _BlockFunction(torch.autograd.Function):
    """One opaque node per block: the only autograd graph over the model."""

    @staticmethod
    def forward(ctx: Any, node: _Node, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
        node: _Node = ctx.node
        with node.blocks.engine.backward_of(node.handle):
            inputs = list(ctx.saved_tensors)
            input_grads = node.backward(inputs, grads)
        return None, None, *input_grads
