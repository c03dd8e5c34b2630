"""Outer parameters: the parameters outside of the embedding, blocks and head. They are small, and on the device during
a pass.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from horizon_lm.common.units import OUTER
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.units.grad_sink import GradSlot
from horizon_lm.engine.units.node import UnitNode
from horizon_lm.model.functional import in_place
from horizon_lm.schedule.ops import Kind


class OuterParameters:
    """The streamed outer parameters, which replace the model's while its forward method runs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        parts = engine.parts
        # Without adapters, which blocks bind.
        self._names = [name for name in engine.slabs(OUTER).layout if name not in parts.adapter_names]
        self._move_buffers()

    def _move_buffers(self) -> None:
        """Move buffers outside of blocks, mostly rope frequencies, to the device, where they stay."""
        parts, device = self.engine.parts, self.engine.device.torch_device
        # Buffers inside of blocks are not moved: a block gets device copies when it is bound (`BuffersOfModules`).
        in_blocks = {id(module) for block in parts.blocks for module in block.modules()}
        for module in parts.model.modules():
            if id(module) not in in_blocks:
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)

    def load(self) -> dict[str, torch.Tensor]:
        """Return the outer parameters on the device, by full name. If some are trained, these are differentiable, and the pass gets a new
        anchor, which depends on them.
        """
        engine = self.engine
        with engine.cursor.compute(Kind.FORWARD, OUTER):
            views = self._views()
        if engine.recording is None or not engine.trained_names(OUTER):
            return views
        # Without adapters: blocks bind them, and their sinks take the gradients.
        trained = [name for name in engine.trained_names(OUTER) if name in self._names]
        node = _OuterNode(engine, engine.recording, trained)
        # All other nodes depend on the first output, so that autograd runs this node last.
        engine.forward.anchor, *tensors = node.compute(*(views[name] for name in trained))
        # Frozen parameters are views of the buffer; trained ones are outputs of the node, so their gradients come to
        # it.
        return views | dict(zip(trained, tensors, strict=True))

    def in_place(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Context manager: use these tensors, by full name, as the parameters of the model's modules."""
        return in_place(
            (module, attribute, tensor)
            for name, tensor in tensors.items()
            for module, attribute in self.engine.refs[name].places
        )

    def _views(self) -> dict[str, torch.Tensor]:
        """Return the parameters as views of their buffers, by full name."""
        views = self.engine.weights_on_device(OUTER)
        return {name: views[name].detach() for name in self._names}


class _OuterNode(UnitNode):
    """The trained outer parameters in one pass.

    Args:
        engine: the engine of the model.
        forward_state: the state of the forward pass.
        names: their full names.
    """

    def __init__(self, engine: Engine, forward_state: ForwardState, names: Sequence[str]) -> None:
        super().__init__(engine, forward_state)
        self._names = names

    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Return a new anchor, and the parameters, given as views of their buffers."""
        # As the anchor of the pass it makes all later nodes depend on this one, so that it runs last: then the gradients
        # of all blocks' adapters are in its buffer, too.
        return self.engine.anchor.detach().clone(), *(each.detach() for each in inputs)

    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Write the gradients of the trained parameters, or zeros, to the buffer from which they are landed. The
        gradients of adapters are in it already.
        """
        engine, (_, *of_parameters) = self.engine, grads
        found = {name: grad for name, grad in zip(self._names, of_parameters, strict=True) if grad is not None}
        with engine.cursor.compute(Kind.BACKWARD, OUTER):
            slot = GradSlot(engine.part_of(OUTER).grad_layout, found.keys())
            slot.buffers = engine.memory.grads_of(OUTER)
            for name, grad in found.items():
                target, _ = slot.write(name)
                target.copy_(grad)
            slot.written |= engine.backward.adapters  # so that `zero_the_rest` leaves them as they are
            slot.zero_the_rest()
            engine.backward.note_written(OUTER, slot.names_written())
        return [None] * len(self._names)
