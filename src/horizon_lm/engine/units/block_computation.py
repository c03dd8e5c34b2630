"""The forward computation of blocks: all micro-batches through one block, whose weights are on the device.

Shapes: B batch rows, T tokens of a row, H hidden size. Hidden states of a batch are (B, T, H); a block computes one
micro-batch, rows [start, stop) of a batch, at a time. Most passes have one batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from horizon_lm.common.ranges import consecutive
from horizon_lm.common.units import OUTER, block
from horizon_lm.device.transfers import Copy
from horizon_lm.engine.passes.ambient import no_autocast_cache
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.left_state import rejecting_state
from horizon_lm.engine.passes.lockstep import run_together
from horizon_lm.engine.passes.micro_batches import BlockCall, BlockCalls, MicroBatch, RowOutputs, run_block
from horizon_lm.engine.passes.tree import Tree
from horizon_lm.engine.units.expert_call import ExpertCall
from horizon_lm.engine.units.row_dims import RowDims
from horizon_lm.engine.units.saved_for_backward import SavedForBackward
from horizon_lm.engine.units.tiled_computation import TiledExperts
from horizon_lm.engine.units.tower_cuts import TowerCuts
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.block_template import BuffersOfModules, StreamedBlock
from horizon_lm.model.compiling import chunk_mlps
from horizon_lm.model.experts import zero_idle_experts
from horizon_lm.model.float8.layers import use_float8
from horizon_lm.schedule.ops import Kind


class BlockComputation:
    """The streamed blocks of a model, and their computation in the running pass.

    Args:
        engine: the engine of the model.
        call_model: the model's own forward method.

    Attributes:
        blocks: the blocks, which compute with weights on the device.
        row_dims: the row dimensions of the inputs of the decoder's blocks.
        tower_cuts: the micro-batches of towers.
    """

    def __init__(self, engine: Engine, call_model: Callable[..., Any]) -> None:
        self.engine = engine
        parts, options = engine.parts, engine.options
        zero_idle_experts(engine.device.torch_device)  # a patch of transformers, for all models of the process
        buffers = BuffersOfModules(engine.device.torch_device)
        # Images differ in size more than rows of tokens, so blocks of towers are not compiled, for example.
        of_decoder = parts.decoder_blocks
        if options.mlp_chunk_tokens is not None:
            for index in of_decoder:
                _require_chunked_mlps(parts.blocks[index], options.mlp_chunk_tokens)
        if options.products == "float8":
            use_float8(parts, [(index, parts.blocks[index]) for index in of_decoder])
        self.blocks = [
            StreamedBlock(
                parts.block_names[index],
                module,
                buffers,
                options.compile and index in of_decoder,
                written=parts.written.get(index, frozenset()),  # weights that the block's forward pass may write
                float8=options.products == "float8" and index in of_decoder,
            )
            for index, module in enumerate(parts.blocks)
        ]
        self.row_dims, self.tower_cuts = RowDims(engine, call_model), TowerCuts(engine, call_model, self.blocks)
        self._scalars: dict[torch.dtype, torch.Tensor] = {}

    def cut(self, index: int, calls: Sequence[BlockCall], batches: Sequence[int], is_whole: bool = False) -> BlockCalls:
        """Return the calls of a block, with the micro-batches in which it computes them.

        Args:
            index: the block's index.
            calls: its arguments for some batches of the pass.
            batches: the numbers of these batches.
            is_whole: compute all images of a batch at once in a tower.
        """
        joined = BlockCalls(calls, self.engine.forward.cut(index, batches))
        if index in self.engine.parts.decoder_blocks:
            joined.dims = self.row_dims.of(index, joined)
        elif not is_whole:
            self.tower_cuts.cut(index, joined)
        return joined

    def compute_forward(
        self, index: int, calls: BlockCalls, keys: tuple[str, ...], uncompiled: bool,
        saved: SavedForBackward | None = None,
    ) -> list[RowOutputs]:  # fmt: skip
        """Run all micro-batches through a block. Return the outputs for each batch.

        Args:
            index: the block's index.
            calls: its arguments for each batch.
            keys: names of the outputs that transformers captures inside the block.
            uncompiled: run the block uncompiled, regardless of the model's setting.
            saved: saves what the backward pass needs; None if there is no backward pass.
        """
        engine, module = self.engine, self.blocks[index]
        outputs = [RowOutputs(count) for count in calls.cut.rows]
        offload = saved is not None and engine.layout.is_offloaded(index)
        # Before the computation: the offload is issued as soon as it ends, and its copy must be known by then.
        if offload:
            assert saved is not None
            self._bind_offload(index, calls, saved.forward_state)
            offload = bool(calls.calls)
        experts: list[ExpertCall] = [] if saved is None else saved.experts  # filled by `TiledExperts`
        run = _BlockRun(
            engine=engine, module=module, calls=calls, keys=keys, uncompiled=uncompiled, saved=saved, outputs=outputs
        )

        in_tiles = engine.tiles.is_cut(index) or index in engine.forward.routed
        with (
            TiledExperts(engine, index).forward(experts)
            if in_tiles
            else engine.cursor.compute(Kind.FORWARD, block(index)),
            # With a sink, the block makes a graph of its own (`GraphUse`). The caller's mode does not matter, because
            # autograd runs a Function's forward without gradients.
            torch.set_grad_enabled(saved is not None and saved.sink is not None),
            no_autocast_cache(),
        ):
            if offload:
                # Within the computation, which waits until the last boundary in this part of the ring is in host memory.
                self._fill_ring(index, calls)
            # Within the computation, because weights that are converted to float32 are read here.
            weights = self.weights(index)
            has_graph = saved is not None and saved.sink is not None
            with module.bound(weights if saved is None else saved.params(weights), differentiates=has_graph):
                run.compute_all(in_lockstep=in_tiles)  # a tile computes the rows of all micro-batches
            if offload:
                self._offload_experts(index, calls, experts)
            # Resident weights are read again, in the backward pass and by later passes until an update.
            if not engine.layout.is_resident(index):
                engine.poison_weights(block(index))
        engine.counts["block_forward_rows"] += calls.cut.num_rows
        engine.forward.outputs[index] = dict(zip(calls.cut.batches, outputs, strict=True))
        return outputs

    def without_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape and dtype of another, all of whose elements are one."""
        scalar = self._scalars.setdefault(like.dtype, like.new_zeros(()))
        return scalar.expand_as(like)

    def weights(self, index: int) -> dict[str, torch.Tensor]:
        """Return a block's weights and its adapters on the device, by their names inside the block."""
        engine, prefix = self.engine, f"{self.blocks[index].name}."
        layout, views = engine.store.units[OUTER].layout, engine.weights_on_device(block(index))
        for name in engine.parts.adapters.get(index, frozenset()):
            # Adapters lie with the outer parameters, which are on the device throughout a pass.
            views[name] = layout.view(engine.memory.weights_of(OUTER), name)
        return {name.removeprefix(prefix): view for name, view in views.items()}

    # Boundaries: the hidden states of all batches, one after the other

    def _bind_offload(self, index: int, calls: BlockCalls, state: ForwardState) -> None:
        """Bind the offload of a block's boundary to its host buffer."""
        engine = self.engine
        num_bytes, largest = self._boundary_bytes(index, calls)
        if not num_bytes:  # a block without inputs on this rank
            engine.cursor.bind(Kind.OFFLOAD, block(index), [])
            return
        host = engine.boundaries.take(state, index, num_bytes, largest)
        ring = engine.memory.ring.get(num_bytes, torch.uint8, index % 2, room=largest)
        state.offloads[index] = engine.cursor.bind(Kind.OFFLOAD, block(index), [Copy(host, ring, num_bytes)])

    def _fill_ring(self, index: int, calls: BlockCalls) -> None:
        """Copy the boundary into the ring buffer that it is offloaded from: blocks alternate between two.

        It is copied within the device first, so that the original is freed before the slower copy to the host is done.
        """
        num_bytes, largest = self._boundary_bytes(index, calls)
        ring = self.engine.memory.ring.get(num_bytes, torch.uint8, index % 2, room=largest)
        tensors = calls.tensors
        put_bytes(ring, [tensors[i].permute(in_memory_order(tensors[i])) for i in calls.hidden])

    def _offload_experts(self, index: int, calls: BlockCalls, experts: Sequence[ExpertCall]) -> None:
        """Move the experts' outputs into the second half of the ring buffer, behind the hidden states."""
        if experts:
            num_bytes, largest = self._boundary_bytes(index, calls)
            ring = self.engine.memory.ring.get(num_bytes, torch.uint8, index % 2, room=largest)
            put_bytes(ring[num_bytes // 2 :], [call.take_output() for call in experts])

    def _boundary_bytes(self, index: int, calls: BlockCalls) -> tuple[int, int]:
        """Return two sizes of a boundary in bytes: for these batches, and for the largest expected batch.

        A boundary has the hidden states (B, T, H); in a model with tiles, the output of the experts, of the same size, is in it, too.
        """
        tensors, count = calls.tensors, self.engine.tiles.kept_each
        hidden = [tensors[i] for i in calls.hidden]
        if index not in self.engine.parts.decoder_blocks:  # no tiles, and inputs of any shape
            num_bytes = sum(each.nbytes for each in hidden)
            return num_bytes, num_bytes
        token_bytes = hidden[0].shape[-1] * hidden[0].element_size()
        return count * sum(each.nbytes for each in hidden), count * self.engine.expected.tokens * token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockRun:
    """The forward computation of a block whose weights are bound, for one micro-batch at a time.

    Attributes:
        engine, module: the model's engine, and the block.
        calls, keys, uncompiled, saved: as in `BlockComputation.compute_forward`.
        outputs: receive the outputs of each batch.
    """

    engine: Engine
    module: StreamedBlock
    calls: BlockCalls
    keys: tuple[str, ...]
    uncompiled: bool
    saved: SavedForBackward | None
    outputs: Sequence[RowOutputs]

    def compute_all(self, in_lockstep: bool) -> None:
        """Compute all micro-batches, in lock-step or one after the other."""
        # All of them before the next block, so that its weights are streamed only once in a pass.
        cut = self.calls.cut
        micro_batches = zip(cut.streams, cut.parts, strict=True)
        if in_lockstep:
            run_together([partial(self._compute, *each) for each in micro_batches])
            return
        for stream, part in micro_batches:
            self._compute(stream, part)

    def _compute(self, stream: int, part: MicroBatch) -> None:
        """Compute a micro-batch, save what its backward pass needs, and add its outputs to those of its batch."""
        call, saved = self.calls.calls[part.batch], self.saved
        inputs = self.calls.inputs(self.calls.tensors, part)
        if saved is not None:
            inputs = saved.inputs(inputs, self.calls.spans[part.batch])
        args, kwargs = call.rebuild(inputs)
        with self.engine.forward.randomness.drawing(stream) as rng_state, self._repeatable(args, kwargs):
            segments = self.calls.cut.segments[part.batch]
            tree = Tree(run_block(self.module, args, kwargs, self.keys, segments, part.rows, self.uncompiled))
        if saved is not None:
            tree.tensors = saved.save(rng_state, inputs, tree.tensors)
        self.outputs[part.batch].add(part, tree)

    @contextmanager
    def _repeatable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Context manager: run the block with these arguments so that the backward pass, if there is one, can compute it again."""
        if self.saved is None:
            yield
            return
        with self.saved.computing(), self.saved.recorded_choices(), rejecting_state(self.module.name, args, kwargs):
            yield


def in_memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor in the order of its memory, from the one with the largest stride on."""
    # Some kernels compute other bits from other memory formats, so a boundary comes back in its own.
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))


def put_bytes(buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Copy tensors of any dtypes into a buffer of bytes, one after the other."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    for part, span in zip(parts, consecutive(map(len, parts)), strict=True):
        buffer[span].copy_(part)


def _require_chunked_mlps(module: nn.Module, tokens: int) -> None:
    """Let the feed-forward layers of a block compute this many tokens at a time; raise ModelNotSupportedError if it has none."""
    if not chunk_mlps(module, tokens):
        raise ModelNotSupportedError(
            f"{type(module).__name__} has no feed-forward layer that can be cut into chunks of tokens; leave "
            "mlp_chunk_tokens unset"
        )
