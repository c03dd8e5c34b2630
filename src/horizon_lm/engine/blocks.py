"""Decoder blocks: weights streamed in, all micro-batches computed, boundaries kept for the backward."""

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
from horizon_lm.engine.micro_batches import BlockCall, Path, ProbeDoneError, RowOutputs, compare_rows, slice_rows
from horizon_lm.engine.recompute import no_autocast_cache
from horizon_lm.engine.residency_planner import Rehearsal
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import capture
from horizon_lm.model.attention import Segments, attending
from horizon_lm.model.block_template import DeviceBuffers, StreamedBlock
from horizon_lm.model.compiling import chunk_mlps
from horizon_lm.schedule.ops import Kind, block

RowProbe = Callable[[int], list[torch.Size]]  # block index -> shapes of its tensor inputs with one more row


class Blocks:
    """Streams the decoder blocks of a model. ``probe_rows`` is set by the model that owns them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        parts, options = engine.parts, engine.options
        buffers = DeviceBuffers(engine.device.torch_device)
        if options.mlp_chunk_tokens is not None:
            for module in parts.blocks:
                _chunk(module, options.mlp_chunk_tokens)
        self.blocks = [
            StreamedBlock(
                f"{parts.block_prefix}.{index}", module, buffers, options.compile, parts.written.get(index, frozenset())
            )
            for index, module in enumerate(parts.blocks)
        ]
        self._row_dims: dict[tuple[Any, Path], int | None] = {}
        self._output_of: dict[int, RowOutputs] = {}
        self.caching = False  # whether the running forward has a cache of keys and values
        self.signature: Any = None  # of the running forward's arguments, for which row dimensions are remembered
        self.segments: Segments | None = None  # of the running forward's rows, if its attention wants them
        self.probe_rows: RowProbe | None = None
        self.probing: tuple[int, list[torch.Size]] | None = None
        self.rehearsal: Rehearsal | None = None
        self.gradient_check: GradientCheck | None = None  # of the next training step

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a block, in the place of its module's forward."""
        self.engine.require_forward(self.blocks[index].name)
        call = BlockCall(args, kwargs)
        if self.probing is not None:
            return self._probe(index, call)
        if self.rehearsal is not None:
            return self.rehearsal.forward(index, call)
        keys = capture.requested_keys()
        forward_state = self.engine.recording
        if forward_state is not None and index in forward_state.keeps:
            node = BlockAutograd(self, index, call, keys, forward_state)
            tensors = BlockFunction.apply(node, self.engine.anchor, *call.tensors)
            output = node.outputs.rebuild(tensors)
        else:
            plainly = bool(keys) or self.caching or self.blocks[index].is_hooked()
            outputs = self.compute_forward(index, call, keys, plainly)
            output = outputs.rebuild(outputs.tensors)
            outputs.release()
        output, captured = output
        capture.publish(captured)
        return output

    def rehearse(self) -> Rehearsal:
        """Make the coming forward one that only shows what blocks take."""
        self.rehearsal = Rehearsal(self.engine, self.blocks, self.dims, self._output_of, self.segments)
        return self.rehearsal

    def compute_forward(
        self, index: int, call: BlockCall, keys: tuple[str, ...], plainly: bool, kept: SavedForBackward | None = None
    ) -> RowOutputs:
        """Run all micro-batches through a block.

        Args:
            index: of the block.
            call: its arguments, for the whole batch.
            keys: what transformers wants captured inside.
            plainly: uncompiled.
            kept: takes what the backward needs, if there is to be one.
        """
        engine, module = self.engine, self.blocks[index]
        dims = self.dims(index, call)
        outputs = RowOutputs(engine.running.num_rows)
        offload = kept is not None and engine.layout.is_offloaded(index)
        if kept is not None and offload:
            self._plan_offload(index, call, kept.forward_state)
        with (
            engine.cursor.compute(Kind.FORWARD, block(index)),
            torch.set_grad_enabled(kept is not None and kept.sink is not None),
            no_autocast_cache(),
        ):
            if offload:
                hidden = call.tensors[call.hidden]
                self._ring(index, hidden).copy_(hidden.contiguous().view(-1).view(torch.uint8))
            weights = self.weights(index)
            with module.bound(weights if kept is None else kept.params(weights)):
                for number, (start, stop) in enumerate(engine.running.micro_batches):
                    part = [slice_rows(t, d, start, stop) for t, d in zip(call.tensors, dims, strict=True)]
                    if kept is not None:
                        part = kept.inputs(part)
                    with (
                        engine.running.randomness.drawing(number) as state,
                        capture.capture(keys) as captured,
                        attending(self.segments, start, stop),
                        nullcontext() if kept is None else kept.computing(),
                    ):
                        args, kwargs = call.rebuild(part)
                        before = call.containers(args, kwargs) if kept is not None else []
                        output = (module.forward(*args, plainly=plainly, **kwargs), captured)
                    if kept is not None and call.containers(args, kwargs) != before:
                        raise ModelNotSupportedError(
                            f"{module.name} hands state to later blocks through a container among its arguments; streaming "
                            "blocks one by one would give wrong gradients"
                        )
                    if kept is not None:
                        output = kept.keep(state, part, output)
                    outputs.add(start, stop, output)
            if not engine.memory.holds(index):
                engine.device.poison(engine.memory.weights_of(block(index)))
        engine.counts["block_forward_rows"] += engine.running.num_rows
        self._output_of[index] = outputs
        return outputs

    def weights(self, index: int) -> dict[str, torch.Tensor]:
        """Return a block's weights on the device, by their names inside the block."""
        buffer = self.engine.memory.weights_of(block(index))
        layout = self.engine.store.units[block(index)].layout
        prefix = f"{self.blocks[index].name}."
        return {name.removeprefix(prefix): layout.view(buffer, name) for name in layout}

    def _plan_offload(self, index: int, call: BlockCall, forward_state: ForwardState) -> None:
        """Tell the device where this and all later boundaries go: they have one size."""
        engine, hidden = self.engine, call.tensors[call.hidden]
        num_bytes, largest = self._boundary_bytes(hidden)
        for later in sorted(forward_state.keeps):
            if later >= index and later not in forward_state.boundaries and engine.layout.is_offloaded(later):
                host = engine.boundaries.take(forward_state, later, num_bytes, largest)
                ring = engine.memory.ring.get(num_bytes, torch.uint8, later % 2, room=largest)
                forward_state.offloads[later] = engine.cursor.bind(
                    Kind.OFFLOAD, block(later), [Copy(host, ring, num_bytes)]
                )

    def _ring(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        num_bytes, largest = self._boundary_bytes(hidden)
        return self.engine.memory.ring.get(num_bytes, torch.uint8, index % 2, room=largest)

    def _boundary_bytes(self, hidden: torch.Tensor) -> tuple[int, int]:
        """Bytes of hidden states (B, T, H), and of those of the largest batch that is expected."""
        of_token = hidden.shape[-1] * hidden.element_size()
        return hidden.numel() * hidden.element_size(), self.engine.expected.tokens * of_token

    # Rows

    def dims(self, index: int, call: BlockCall) -> list[int | None]:
        """Return the row dimension of each tensor input; found by a probe when there are several micro-batches."""
        if len(self.engine.running.micro_batches) == 1:
            return [None] * len(call.tensors)
        keys = [(self.signature, path) for path in call.paths]
        if any(key not in self._row_dims for key in keys):
            assert self.probe_rows is not None
            shapes = [t.shape for t in call.tensors]
            dims = compare_rows(call.paths, shapes, self.probe_rows(index), self.engine.running.num_rows)
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
        return outputs.rebuild(outputs.imitate(self.engine.running.num_rows + 1))[0]


def _chunk(module: nn.Module, tokens: int) -> None:
    if not chunk_mlps(module, tokens):
        raise ModelNotSupportedError(
            f"{type(module).__name__} has no feed-forward layer that can be cut into chunks of tokens; leave "
            "mlp_chunk_tokens unset"
        )
