"""Hold back the micro-batches of a step, and compute their losses in one pass.

A Trainer computes the loss of a micro-batch and differentiates it before the next one. A streamed model would load every
block twice for each. Held back, all losses of the step are computed in lock-step, and their sum is differentiated once.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import torch

from horizon_lm.engine.passes.lockstep import run_together
from horizon_lm.engine.streamed import engine_of, is_streamed
from horizon_lm.model.active_adapters import StatePerMember

_computing: ContextVar[bool] = ContextVar("a held loss is being computed", default=False)


def _held_back(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `compute_loss` that returns zero before the step's last micro-batch, and there the sum of the losses of all.

    Evaluation, and whoever asks for outputs, gets the loss at once.
    """

    @functools.wraps(compute_loss)
    def compute_or_hold(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Return a loss, or zero in its place, as `_held_back` says."""
        kwargs["num_items_in_batch"] = num_items_in_batch
        if _computing.get() or return_outputs or not self.model.training or not torch.is_grad_enabled():
            return compute_loss(self, model, inputs, return_outputs=return_outputs, **kwargs)
        state = self.accelerator.gradient_state
        is_last = state.sync_gradients  # of the step's micro-batches
        compute = partial(_compute_without_holding, compute_loss, self, model, inputs, **kwargs)
        # Computing a loss may read accelerate's flag, so the flag is first set to its value when the loss was held back.
        set_flag = partial(state._set_sync_gradients, is_last)
        held = self._held = [*(self._held or ()), (compute, set_flag)]
        engine_of(self.model).access.holds_losses = not is_last
        if not is_last:
            return torch.zeros((), device=self.args.device, requires_grad=True)
        self._held = None
        try:
            return sum(_run_held(self.model, held))
        finally:
            state._set_sync_gradients(True)

    return compute_or_hold


def _run_held(model: Any, held: list[tuple[Any, Any]]) -> list[Any]:
    """Compute losses in lock-step, and return them. Each loss may switch the model's adapters for itself, as for a reference.

    ``held``: pairs of functions. The first computes a loss, and the second sets accelerate's flag as it was when the loss was held back.
    """
    functions, set_flags = map(list, zip(*held, strict=True))
    horizon = getattr(model, "_horizon", None)
    if horizon is None or not horizon.adapter_params:
        return run_together(functions, set_flags)
    states = StatePerMember(model, len(held))

    def go_on(number: int) -> None:
        """Restore accelerate's flag and the switches of adapters before a loss is computed further."""
        set_flags[number]()
        states.go_on_with(number)

    horizon.joint.switches_per_call = True
    try:
        return run_together(functions, [partial(go_on, number) for number in range(len(held))])
    finally:
        horizon.joint.switches_per_call = False
        states.end()


def _compute_without_holding(compute_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a loss that was held back. A call of the base class's `compute_loss` inside it is not held back again."""
    token = _computing.set(True)
    try:
        return compute_loss(*args, **kwargs)
    finally:
        _computing.reset(token)


class HeldBatches:
    """A mixin for subclasses of ``transformers.Trainer``; it comes before them in the order of base classes.

    The trainer's own ``compute_loss`` is called once for each micro-batch, as it would be, with the same arguments, at the
    step's last micro-batch. What surrounds it (`training_step`, in which some trainers generate) is not moved.
    """

    _held: list[tuple[Any, Any]] | None = None  # the step's earlier losses, as `_run_held` takes them

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, without what an interrupted step before has held back."""
        self._held = None
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            model = cast(Any, self).model
            if is_streamed(model):
                engine_of(model).access.holds_losses = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hold back the losses of a subclass that computes its own, as a whole."""
        super().__init_subclass__(**kwargs)
        if "compute_loss" in vars(cls):
            cls.compute_loss = _held_back(vars(cls)["compute_loss"])  # type: ignore[method-assign]

    @_held_back
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)  # type: ignore[misc]
