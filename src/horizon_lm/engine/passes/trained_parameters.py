"""The parameters that are trained, and the memory of their gradients."""

import torch

from horizon_lm.common.units import EMBED, IDLE, OUTER
from horizon_lm.engine.host.host_grads import LandingSlots
from horizon_lm.engine.host.updates import UnitOptimizer
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.errors import ConfigError, StreamingError


def allocate_grads(engine: EngineState) -> None:
    """Allocate host gradients for the parameters that are currently trainable, unless already done.

    Raises:
        StreamingError: a parameter was frozen when they were allocated.
    """
    store = engine.store
    trainable = [name for names in engine.trainable().values() for name in names]
    if not store.has_grads:
        # With update_in_backward, gradients land in `LandingSlots`; a tied table sums those of the head and of rows.
        kept = () if engine.updates.optimizer_in_backward is not None else store.units
        engine.grads.allocate(trainable, [*kept, *([EMBED] if engine.parts.tied else [])])
    # Slots, slabs and moments share one layout of gradients, which cannot grow between two steps.
    late = [name for name in trainable if name not in store.slab_of(name).grad_layout]
    if late:
        raise StreamingError(
            f"{late[0]} was frozen when training began, so no memory was allocated for its gradient; set requires_grad "
            "before the first training step"
        )


def trains_other_adapters(engine: EngineState) -> bool:
    """Return whether a parameter requires a gradient for which there is no memory: an adapter that was frozen when training began, or a
    table of the embedding that was idle (`IDLE`).
    """
    with torch._C.DisableTorchFunctionSubclass():
        if any(ref.param.requires_grad for ref in engine.parts.units.get(IDLE, ())):
            return True
    if not engine.store.has_grads or not engine.parts.adapters:
        return False
    layout = engine.store.units[OUTER].grad_layout
    with torch._C.DisableTorchFunctionSubclass():
        return any(name not in layout and engine.refs[name].param.requires_grad for name in engine.parts.adapter_names)


def apply_in_backward(engine: EngineState, optimizer: UnitOptimizer) -> None:
    """Update each unit as soon as its gradient has landed, from now on.

    Raises:
        ConfigError: gradients are allocated already.
    """
    if engine.store.has_grads:
        raise ConfigError(
            "update_in_backward keeps no gradients, but this model has been trained with gradients in host memory; create "
            "the optimizer before the first training step"
        )
    # In this order: with an optimizer in the backward pass, only a tied table gets a gradient slab, and the slots
    # have the lengths of the layouts that this allocation makes.
    engine.updates.optimizer_in_backward = optimizer
    allocate_grads(engine)
    engine.grads.slots = LandingSlots(engine.store, engine.device, engine.parts)
