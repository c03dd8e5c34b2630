"""Access by other code to weights and gradients in host memory, which waits for copies and updates."""

import weakref

import torch
from torch import nn

from horizon_lm.engine.host.parameters import HeadParameter, StreamedParameter, adopt, landing_grad
from horizon_lm.engine.passes.backward_pass import Running
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.errors import IgnoredCastWarning, StreamingError, warn
from horizon_lm.schedule.ops import Kind


class HostAccess:
    """The owner of the streamed parameters, which they ask before other code reads or writes them.

    Attributes:
        holds_losses: losses of the step are held back, to be computed later, so its gradients are not known yet.
    """

    holds_losses = False

    def __init__(self, engine: EngineState, running: Running) -> None:
        self._engine = weakref.ref(engine)  # weak, because the engine owns this object
        self._running = running

    @property
    def engine(self) -> EngineState:
        """The engine."""
        engine = self._engine()
        assert engine is not None
        return engine

    def adopt_parameters(self) -> None:
        """Turn the model's parameters into streamed parameters, which ask this object."""
        engine = self.engine
        for name, ref in engine.refs.items():
            if name in engine.store.codecs:  # a placeholder, which is never written and has no gradient
                continue
            is_head = any(module is engine.parts.head for module, _ in ref.places)
            adopt(ref.param, HeadParameter if is_head else StreamedParameter, self)  # the head's also rejects products

    @property
    def has_parts(self) -> bool:
        """True if other ranks have parts of every weight and gradient."""
        return not self.engine.store.shard.is_whole

    def before_foreign_step(self, optimizer: str) -> None:
        """Wait for updates before another optimizer's step; raise StreamingError if it would lose the weights' low halves."""
        if self.engine.store.precision.low_half:
            raise StreamingError(
                f"{optimizer} would round every update to bfloat16: in precision 'fp32_master' only optimizers of horizon_lm, such as "
                "AdamW, know the other 16 bits of the weights. Use one of them, or stream with precision='bf16' or 'float32'."
            )
        self.hand_out_weight()  # the optimizer reads and writes weights, so this waits

    def after_foreign_step(self) -> None:
        """Record that another optimizer has changed the weights."""
        self.engine.store.weights_changed()

    def after_ignored_cast(self, dtype: torch.dtype) -> None:
        """Warn that a cast of a weight to a wider dtype was ignored, unless the model computes in it anyway."""
        computes, stored = self.engine.options.compute_dtype, self.engine.store.precision.weight_dtype
        if computes.itemsize < dtype.itemsize:
            warn(
                f"weights of a streamed model were cast to {dtype}, which changes nothing: they stay in {stored} in host memory, and blocks "
                f"compute in {computes}; stream with compute_dtype={dtype} to compute in it",
                IgnoredCastWarning,
            )

    def hand_out_weight(self) -> None:
        """Wait for updates and saves of the weights before other code reads or writes a weight.

        Raises:
            StreamingError: other ranks have parts of it.
        """
        engine = self.engine
        engine.store.require_whole()
        # A checkpoint is written from the slabs themselves, as they are now.
        engine.saves.wait()
        # `wait` leaves out updates of the running pass that are not issued yet: this thread would have to issue them.
        if engine.cursor.active:
            engine.updates.wait(engine.cursor.tasks_of(Kind.UPDATE))
        else:
            engine.updates.finish()

    def require_known_grad(self, param: nn.Parameter) -> None:
        """Raise StreamingError if losses of the step are held back, before other code reads or writes a gradient."""
        if self.holds_losses:
            raise StreamingError(
                f"{self.engine.name_of(param)}.grad: the micro-batches of a step are computed together, after its last one, so there "
                "are no gradients between them; read or change gradients in a callback's on_pre_optimizer_step, or set "
                "gradient_accumulation_steps=1"
            )

    def hand_out_grad(self, param: nn.Parameter) -> None:
        """Wait until a gradient has landed and no update reads it, before other code uses it. Reject that with ``update_in_backward``."""
        engine, name = self.engine, self.engine.name_of(param)
        if name is None:
            return
        if engine.updates.optimizer_in_backward is not None and engine.updates.optimizer_in_backward.pending:
            raise StreamingError(
                f"{name}.grad: update_in_backward applies gradients as they land and does not keep them, so they "
                "cannot be read or clipped (clip_grad_norm_); use horizon_lm.AdamW without update_in_backward for that"
            )
        if landing_grad(param) is not None:
            self.wait_for_grads()
            self.hand_out_weight()  # an update that still reads the gradient also writes the weight
        engine.grads.hand_out(engine.store.unit_of[name])

    def before_grad_is_emptied(self, param: nn.Parameter) -> None:
        """Wait until a gradient has landed, before other code drops it. The norm of its unit includes it and is forgotten."""
        name = self.engine.name_of(param)
        if name is not None:  # None: the parameter has been replaced since, for example by PEFT
            self.wait_for_grads()
            self.engine.grads.hand_out(self.engine.store.unit_of[name])

    def wait_for_grads(self) -> None:
        """Block until the gradients of finished backward passes are in host memory. Return at once inside a backward pass."""
        self.engine.require_attached()
        if self._running.backward is not None:
            return
        try:
            self.engine.grads.wait()
        except Exception as error:
            # With update_in_backward, gradients that have landed before the error were applied at once.
            if self.engine.updates.optimizer_in_backward is not None:
                self.engine.updates.partial_update.record(error)
            raise

    def clear_grads(self) -> None:
        """Mark all gradients empty, and valid again after a fault, once the last have landed. No memory is written.

        The error of a landing is raised, once, when all gradients are empty.
        """
        self.engine.require_attached()  # otherwise the parameters belong to another engine
        try:
            self.wait_for_grads()
        except Exception:  # not after an interrupt: gradients still land
            self.engine.grads.clear()
            raise
        self.engine.grads.clear()
