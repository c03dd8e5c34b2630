"""Decoder blocks: stream the weights in, compute all micro-batches, and keep the input for the backward pass.

Shapes: B batch rows, T tokens of a row, H hidden size. Hidden states of a batch are (B, T, H); a block computes one
micro-batch, rows [start, stop) of the batch, at a time.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from horizon_lm.device.transfers import Copy
from horizon_lm.engine.block_autograd import BlockAutograd, BlockFunction, SavedForBackward
from horizon_lm.engine.executor import Engine
from horizon_lm.engine.forward_state import ForwardState
from horizon_lm.engine.gradient_check import GradientCheck
from horizon_lm.engine.micro_batches import BlockCall, ProbeDoneError, RowOutputs, compare_rows, run_block, slice_all
from horizon_lm.engine.recompute import no_autocast_cache
from horizon_lm.engine.residency_planner import Rehearsal
from horizon_lm.engine.tree import Path, Tree
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import capture
from horizon_lm.model.attention import Segments
from horizon_lm.model.block_template import DeviceBuffers, StreamedBlock
from horizon_lm.model.compiling import chunk_mlps
from horizon_lm.schedule.ops import Kind, block

RowProbe = Callable[[int], list[torch.Size]]


class Blocks:
    """The streamed decoder blocks of a model.

    Attributes:
        caching: the running forward pass has a cache of keys and values.
        signature: names and ranks of the current forward arguments; row dimensions are cached by signature.
        segments: the documents in the current rows, if attention needs them.
        probe_rows: function that returns the shapes of a block's tensor inputs for a batch with one more row.
        probing: the block to probe for row dimensions, and the list that receives its shapes; None outside of a probe.
        rehearsal: replaces the blocks while device memory is planned; None otherwise.
        gradient_check: compares blocks in the next training step; None otherwise.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        parts, options = engine.parts, engine.options
        buffers = DeviceBuffers(engine.device.torch_device)
        if options.mlp_chunk_tokens is not None:
            for module in parts.blocks:
                _chunk_mlps(module, options.mlp_chunk_tokens)
        self.blocks = [
            StreamedBlock(
                f"{parts.block_prefix}.{index}", module, buffers, options.compile, parts.written.get(index, frozenset())
            )
            for index, module in enumerate(parts.blocks)
        ]
        self._row_dims: dict[tuple[Any, Path], int | None] = {}  # by signature and path of an input
        self._outputs: dict[int, RowOutputs] = {}  # by block: the structure of its last output
        self.caching = False
        self.signature: Any = None
        self.segments: Segments | None = None
        self.probe_rows: RowProbe | None = None
        self.probing: tuple[int, list[torch.Size]] | None = None
        self.rehearsal: Rehearsal | None = None
        self.gradient_check: GradientCheck | None = None

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a block for the whole batch. The model calls this instead of the forward method of the
        block module.
        """
        self.engine.require_forward(self.blocks[index].name)
        call = BlockCall(args, kwargs)
        if self.probing is not None:
            return self._probe(index, call)
        if self.rehearsal is not None:
            return self.rehearsal.forward(index, call)
        keys, hooked = capture.requested_keys(), self.blocks[index].is_hooked()
        # Compiled code would not call hooks inside a block. A cache identifies each block by its number, so compiled
        # code could not be shared between blocks.
        uncompiled = bool(keys) or hooked or self.caching
        state = self.engine.recording
        if state is not None and index in state.keeps:
            node = BlockAutograd(self, index, call, keys, state, hooked, uncompiled)
            tensors = BlockFunction.apply(node, self.engine.anchor, *call.tensors)
            output = node.outputs.rebuild(tensors)
        else:
            outputs = self.compute_forward(index, call, keys, uncompiled)
            output = outputs.rebuild(outputs.tensors)
            outputs.release()
        output, captured = output
        capture.publish(captured)
        return output

    def rehearse(self) -> Rehearsal:
        """Make the next forward pass a rehearsal, which only measures the memory that blocks take."""
        self.rehearsal = Rehearsal(self.engine, self.blocks, self.row_dims, self._outputs, self.segments)
        return self.rehearsal

    def compute_forward(
        self, index: int, call: BlockCall, keys: tuple[str, ...], uncompiled: bool,
        saved: SavedForBackward | None = None,
    ) -> RowOutputs:  # fmt: skip
        """Run all micro-batches through a block.

        Args:
            index: the block's index.
            call: its arguments for the whole batch.
            keys: names of the outputs that transformers captures inside the block.
            uncompiled: run the block uncompiled, regardless of the model's setting.
            saved: saves what the backward pass needs; None if there is no backward pass.
        """
        engine, module = self.engine, self.blocks[index]
        dims = self.row_dims(index, call)
        outputs = RowOutputs(engine.running.num_rows)
        offload = saved is not None and engine.layout.is_offloaded(index)
        if saved is not None and offload:
            self._plan_offloads(index, call, saved.forward_state)
        with (
            engine.cursor.compute(Kind.FORWARD, block(index)),
            torch.set_grad_enabled(saved is not None and saved.sink is not None),
            no_autocast_cache(),
        ):
            if offload:
                # Copied within the device first, so that the original is freed before the slower copy to the host is
                # done.
                hidden = call.tensors[call.hidden]  # (B, T, H)
                self._ring(index, hidden).copy_(hidden.contiguous().view(-1).view(torch.uint8))
            weights = self.weights(index)
            with module.bound(weights if saved is None else saved.params(weights)):
                # All micro-batches run through a block before the next block, so its weights are streamed only once per
                # pass.
                for number, rows in enumerate(engine.running.micro_batches):
                    inputs = slice_all(call.tensors, dims, rows)
                    if saved is not None:
                        inputs = saved.inputs(inputs)
                    args, kwargs = call.rebuild(inputs)
                    before = None if saved is None else call.containers(args, kwargs)
                    with (
                        engine.running.randomness.drawing(number) as rng_state,
                        nullcontext() if saved is None else saved.computing(),
                    ):
                        tree = Tree(run_block(module, args, kwargs, keys, self.segments, rows, uncompiled))
                    if saved is not None:
                        if call.containers(args, kwargs) != before:  # autograd would miss gradients through it
                            raise ModelNotSupportedError(
                                f"{module.name} passes state to later blocks through a container among its arguments; "
                                "streaming blocks one by one would give wrong gradients"
                            )
                        tree.tensors = saved.save(rng_state, inputs, tree.tensors)
                    outputs.add(rows, tree)
            if not engine.memory.is_resident(index):
                engine.device.poison(engine.memory.weights_of(block(index)))
        engine.counts["block_forward_rows"] += engine.running.num_rows
        self._outputs[index] = outputs
        return outputs

    def weights(self, index: int) -> dict[str, torch.Tensor]:
        """Return a block's weights on the device, by their names inside the block."""
        buffer = self.engine.memory.weights_of(block(index))
        layout = self.engine.store.units[block(index)].layout
        prefix = f"{self.blocks[index].name}."
        return {name.removeprefix(prefix): layout.view(buffer, name) for name in layout}

    # Boundaries

    def _plan_offloads(self, index: int, call: BlockCall, state: ForwardState) -> None:
        """Bind the offloads of this boundary and all later ones, which have the same size, to their host buffers.

        The first block reached binds all of them, so that the cursor can issue copies without waiting for later blocks.
        """
        engine, hidden = self.engine, call.tensors[call.hidden]
        num_bytes, largest = self._boundary_bytes(hidden)
        for later in sorted(state.keeps):
            if later >= index and later not in state.boundaries and engine.layout.is_offloaded(later):
                host = engine.boundaries.take(state, later, num_bytes, largest)
                ring = engine.memory.ring.get(num_bytes, torch.uint8, later % 2, room=largest)
                state.offloads[later] = engine.cursor.bind(Kind.OFFLOAD, block(later), [Copy(host, ring, num_bytes)])

    def _ring(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the ring buffer that a boundary is offloaded from: blocks alternate between two."""
        num_bytes, largest = self._boundary_bytes(hidden)
        return self.engine.memory.ring.get(num_bytes, torch.uint8, index % 2, room=largest)

    def _boundary_bytes(self, hidden: torch.Tensor) -> tuple[int, int]:
        """Return the size in bytes of the hidden states (B, T, H), for this batch and for the largest
        expected batch.
        """
        token_bytes = hidden.shape[-1] * hidden.element_size()
        return hidden.numel() * hidden.element_size(), self.engine.expected.tokens * token_bytes

    # Rows

    def row_dims(self, index: int, call: BlockCall) -> list[int | None]:
        """Return the row dimension of each tensor input, found by a probe if there are several micro-batches."""
        if len(self.engine.running.micro_batches) == 1:
            return [None] * len(call.tensors)  # nothing is sliced
        keys = [(self.signature, path) for path in call.paths]
        if any(key not in self._row_dims for key in keys):
            assert self.probe_rows is not None
            shapes = [t.shape for t in call.tensors]
            dims = compare_rows(call.paths, shapes, self.probe_rows(index), self.engine.running.num_rows)
            self._row_dims.update({(self.signature, path): dim for path, dim in dims.items()})
        return [self._row_dims[key] for key in keys]

    def _probe(self, index: int, call: BlockCall) -> Any:
        """Answer a row probe: return zeros for blocks before the requested one, and record the shapes of its inputs."""
        assert self.probing is not None
        wanted, shapes = self.probing
        if index == wanted:
            shapes.extend(t.shape for t in call.tensors)
            raise ProbeDoneError
        # Earlier blocks have already been computed in this forward pass, so the structure of their outputs is known.
        outputs = self._outputs[index]
        return outputs.rebuild(outputs.imitate(self.engine.running.num_rows + 1))[0]


def _chunk_mlps(module: nn.Module, tokens: int) -> None:
    if not chunk_mlps(module, tokens):
        raise ModelNotSupportedError(
            f"{type(module).__name__} has no feed-forward layer that can be cut into chunks of tokens; leave "
            "mlp_chunk_tokens unset"
        )
