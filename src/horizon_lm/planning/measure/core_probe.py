"""Measure a block whose experts are computed tile by tile: the block without them, and the experts alone, on the meta device.

Shapes: N tokens, K experts of a token, S = N * K rows, H hidden size.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from horizon_lm.model.expert_adapters import of_experts
from horizon_lm.model.routed_experts import RoutedExperts, expert_arguments, weighted_rows
from horizon_lm.model.some_experts import some_experts
from horizon_lm.model.trial import answering
from horizon_lm.planning.arithmetic.outline import Footprint, Work
from horizon_lm.planning.measure.block_probe import BlockRun, copy_on_meta, measure
from horizon_lm.planning.measure.meta_recorder import Recorder, recording

_INDEX_BYTES = 64  # bytes of a row's indices: its expert, token and place, and copies of these while rows are sorted


@dataclass(frozen=True, slots=True)
class CoreRun:
    """The cost of a block without its experts, and of its experts.

    Attributes:
        footprint: bytes as in `Footprint`; ``experts`` without the gradients of their weights.
        grad: bytes of the largest gradient of a weight of one expert, 0 if none is trained; with adapters of these weights, the bytes
            that one more expert in a tile takes.
        before: work of the block's forward pass up to the experts.
        forward, recompute, backward: work of the block without its experts.
        output: output of the block, on the meta device.
    """

    footprint: Footprint
    grad: int
    before: Work
    forward: Work
    recompute: Work
    backward: Work
    output: Any


def run_core_on_meta(
    block: nn.Module, experts: RoutedExperts, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype,
    accelerated: bool = False, in_float32: Collection[str] = (),
) -> CoreRun:  # fmt: skip
    """Run a block without its experts on the meta device, and its experts alone.

    Args:
        block: decoder block, with weights on any device.
        experts: its experts.
        args, kwargs, dtype, accelerated, in_float32: as in `cost.block_probe.run_on_meta`.
    """
    module, args, kwargs = copy_on_meta(block, args, kwargs, dtype, in_float32)
    left_out, experts = _LeftOut(), replace(experts, block=module)
    with answering({experts.called: left_out.answer}):
        core = measure(module, args, kwargs, accelerated)
        # Without a graph, as in the forward pass, in which micro-batches wait for each other at the experts.
        with recording(module, args, kwargs, accelerated=accelerated) as recorder, torch.no_grad():
            left_out.recorder = recorder
            module.forward(*args, **kwargs)
    alone, grad = _run_experts(experts, left_out, accelerated)
    gathered, between_tiles = left_out.bytes_of_rows(alone.output.dtype)
    footprint = replace(core.footprint, experts=alone.footprint.peak + gathered, held=left_out.held + between_tiles)
    return CoreRun(footprint, grad, left_out.before, core.forward, core.recompute, core.backward, core.output)


class _LeftOut:
    """A replacement of the experts, which computes nothing and keeps the arguments of the last call.

    Attributes:
        recorder: records the block; None until it is set.
        held, before: the bytes and the work of the block when the experts were called.
        hidden, ids, weights: the arguments: hidden states (N, H), the experts of each token (N, K), and their weights.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.held, self.before = 0, Work()

    def answer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return an output of the experts (N, H)."""
        self.hidden, self.ids, self.weights = expert_arguments(args, kwargs)
        if self.recorder is not None:
            self.held, self.before = self.recorder.live, self.recorder.work
        output: torch.Tensor = _Nothing.apply(self.hidden, self.weights)
        return output

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return arguments in which each row is a token with a single expert: hidden states (S, H), experts (S, 1), weights (S,)."""
        count = self.ids.numel()
        hidden = self.hidden.new_empty((count, self.hidden.shape[-1])).requires_grad_()
        return hidden, self.ids.new_empty((count, 1)), self.weights.new_empty(count).requires_grad_()

    def bytes_of_rows(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return two numbers of bytes: for gathering all rows of the experts, and for what is held from tile to tile.

        Args:
            dtype: dtype of the rows' outputs.
        """
        elements, itemsize = self.ids.numel() * self.hidden.shape[-1], self.hidden.element_size()
        # Inputs of rows, and gradients of their outputs, which need memory of their own in another dtype.
        gathered = elements * itemsize * (1 if dtype == self.hidden.dtype else 2)
        of_tokens = self.hidden.numel() * itemsize
        in_forward = elements * dtype.itemsize + of_tokens  # outputs of rows
        in_backward = elements * itemsize + 3 * of_tokens  # gradients of rows, inputs and gradients of outputs
        return gathered, max(in_forward, in_backward) + self.ids.numel() * _INDEX_BYTES


class _Nothing(torch.autograd.Function):
    """An output of experts that are not computed, and gradients of their inputs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weights)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, weights = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weights)


class _Weighted(nn.Module):
    """The experts of a tile, as they are computed for rows."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weighted_rows(self.experts, hidden, ids, weights)


def _run_experts(experts: RoutedExperts, left_out: _LeftOut, accelerated: bool) -> tuple[BlockRun, int]:
    """Run all rows through a tile of one expert. Return the run, and the bytes that each further expert adds to a tile (`CoreRun.grad`)."""
    alone = _run_tile(experts, 1, left_out, accelerated)
    # With adapters, PEFT makes a second tensor of each weight, so a tile of two experts is measured, too.
    if experts.adapters:
        two = _run_tile(experts, 2, left_out, accelerated)
        return alone, two.footprint.peak - alone.footprint.peak
    weights = [experts.block.get_parameter(name)[:1] for name in experts.names]
    return alone, max(weight.nbytes if weight.requires_grad else 0 for weight in weights)


def _run_tile(experts: RoutedExperts, size: int, left_out: _LeftOut, accelerated: bool) -> BlockRun:
    """Run all rows through a tile of this many experts."""
    block = experts.block
    views = {name: block.get_parameter(name)[:size] for name in experts.names}
    for name in experts.adapters:
        views[name] = of_experts(name, block.get_parameter(name), experts.count, slice(0, size))
    weights = {name: nn.Parameter(view.detach(), view.requires_grad) for name, view in views.items()}
    with some_experts(experts, size, weights):
        return measure(_Weighted(experts.called), left_out.rows(), {}, accelerated)
