"""Find which units a pass computes, in which order, and through which blocks gradients flow, by running the model's code around them.

The decoder's blocks are computed in every pass. Which towers are computed, and whether before or after the embedding, is decided by the
model's own code. It runs without weights: one zero is read everywhere, and blocks return zeros.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from horizon_lm.common.units import EMBED, Unit, block
from horizon_lm.errors import StreamingError
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.model.trial import TrialDoneError, answers_of, outer_weights, trial

Watch = Callable[[int, tuple[Any, ...], dict[str, Any]], None]
"""Function that is called with the index and the arguments of each block that is about to compute."""


@dataclass(frozen=True, slots=True)
class PassTrial:
    """A trial of the code around the blocks of a model.

    Attributes:
        parts: the model.
        call_model: the model's own forward method.
        dtype, device: dtype and device of hidden states.
        output_of: returns the output of a block, on any device, for its index and arguments.
        recording: a backward pass may follow.
        watch: is called before each block.
        grads: gradients of outer weights, if the graph of a trial is differentiated.
    """

    parts: ModelParts
    call_model: Callable[..., Any]
    dtype: torch.dtype
    device: torch.device
    output_of: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
    recording: bool = True
    watch: Watch = lambda index, args, kwargs: None
    grads: list[torch.Tensor] = field(default_factory=list)

    def run(self, call: Mapping[str, Any]) -> tuple[tuple[Unit, ...], frozenset[int]]:
        """Run the model's code on a batch. It ends at a block of the decoder from which on nothing is open.

        Args:
            call: the arguments of the model.

        Returns:
            The units in the order in which they are computed, and the blocks through which gradients flow.

        Raises:
            StreamingError: a block is called twice.
        """
        parts, units, differentiated = self.parts, list[Unit](), set[int]()

        def embed(ids: torch.Tensor) -> torch.Tensor:
            """Return zeros for the hidden states (B, T, H) of ids (B, T)."""
            if EMBED not in units and call.get("inputs_embeds") is None:
                units.append(EMBED)
            hidden = torch.zeros((*ids.shape, parts.hidden), dtype=self.dtype, device=self.device)
            return _computed(hidden, [], any(map(_is_trained, parts.units[EMBED])))

        def answer(index: int, *args: Any, **kwargs: Any) -> Any:
            """Record the call of a block, and return zeros in the shapes of its output."""
            if block(index) in units:
                raise StreamingError(
                    f"{parts.block_names[index]}: the model calls this block twice for one batch, as for images and videos; put them in "
                    "batches of their own"
                )
            self.watch(index, args, kwargs)
            units.append(block(index))
            inputs = [each for each in _tensors((args, kwargs)) if each.requires_grad]
            needs_grad = self.recording and (parts.trains(index) or bool(inputs))
            differentiated.update([index] if needs_grad else [])
            # All later blocks follow, with gradients if this one has any. Without a backward pass, blocks may write a cache.
            if index in parts.decoder_blocks and (needs_grad or not self.recording or index == parts.num_blocks - 1):
                later = range(index + 1, parts.num_blocks)
                units.extend(map(block, later))
                differentiated.update(later if needs_grad else [])
                raise TrialDoneError

            def zeros(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                return _computed(torch.zeros_like(leaf, device=self.device), inputs, needs_grad)

            return pytree.tree_map(zeros, self.output_of(index, args, kwargs))

        answers = answers_of(parts.blocks, answer) | dict.fromkeys(parts.tables, embed) | {parts.embed: embed}
        weights = outer_weights(parts, self._zero, left_out=parts.adapter_names)
        with torch.set_grad_enabled(self.recording), trial(answers, weights):
            self.call_model(**call)  # which ends by TrialDoneError
            raise AssertionError("the last block was not reached")
        return tuple(units), frozenset(differentiated)

    def _zero(self, ref: ParamRef) -> torch.Tensor:
        """Return one zero that is read everywhere in place of a weight."""
        value = torch.zeros((), dtype=self.parts.computed_dtype(ref.name, self.dtype), device=self.device)
        weight = value.expand(ref.param.shape)
        if not _is_trained(ref):
            return weight
        trained: torch.Tensor = _Trained.apply(weight, value.new_zeros((), requires_grad=True), self.grads)
        return trained


class _Trained(torch.autograd.Function):
    """A weight whose gradient is kept in a list."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, anchor: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
        ctx.grads = grads
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.grads.append(grad)
        return None, None, None


class _Computed(torch.autograd.Function):
    """A stand-in for a computation, with its result and a graph that leads to its inputs."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.inputs = [(each.shape, each.dtype, each.device) for each in inputs]
        return result.clone()  # it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.inputs)


def _computed(values: torch.Tensor, inputs: list[torch.Tensor], needs_grad: bool) -> torch.Tensor:
    """Return a tensor that needs a gradient, as the result of a computation of these inputs; or the tensor as it is."""
    if not needs_grad or not values.is_floating_point():
        return values
    computed: torch.Tensor = _Computed.apply(values, *(inputs or [values.new_zeros((), requires_grad=True)]))
    return computed


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _is_trained(ref: ParamRef) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return ref.param.requires_grad
