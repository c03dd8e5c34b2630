"""An optimizer over slabs: everything but the arithmetic, which is its rule.

The update is computed in fp32 for all formats of weights, gradients and moments. It runs in threads on the host, unit by unit
in the order in which the next forward pass needs them, and overlaps with that pass.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from horizon_lm.common.units import Unit
from horizon_lm.device.transfers import Move
from horizon_lm.engine.host.updates import TableGrads
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.trained_parameters import allocate_grads, apply_in_backward
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ConfigError, NonFiniteError, StreamingError
from horizon_lm.memory.kernels.updates import Rule
from horizon_lm.memory.store import Store
from horizon_lm.memory.unit_slabs import Slab
from horizon_lm.optim.grad_norm import (
    REMEDY,
    SkippedSteps,
    check_clipping,
    clip_factor,
    first_non_finite_unit,
    sum_squares,
)
from horizon_lm.optim.moments import Moments
from horizon_lm.optim.saved_state import LOW_HALF, STEPS, check_scalars, check_settings, check_state, plain_groups
from horizon_lm.optim.unit_updates import UnitUpdates
from horizon_lm.optim.update_tasks import StepUpdate, TableRows


class SlabOptimizer(torch.optim.Optimizer):
    """An optimizer for a streamed model, with moments in host memory and optional clipping by the global norm.

    A subclass has the arithmetic as its `rule`, and passes its default settings of a parameter group, among which are ``lr`` and
    ``weight_decay``. The other arguments are those of `AdamW`.

    Attributes:
        rule: what is done to each element, and the names of the moments.
        grad_norm: global norm of the gradients of the last step, before clipping.
        unit_grad_norms: norm of each unit's gradients in the last step, before clipping.
        non_finite_unit: the unit in which the gradient of the last rejected or skipped step was first not finite.
    """

    rule: ClassVar[Rule]
    updates_slabs = True  # unlike other optimizers, which update parameters

    def __init__(
        self,
        model: Any,
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None = None,
        params: Iterable[Any] | None = None,
        seed: int = 0,
        moments: str = "float32",
        non_finite: str = "raise",
        max_consecutive_skips: int | None = 3,
        update_in_backward: bool = False,
    ) -> None:
        self._engine: Engine = engine_of(model, f"horizon_lm.{self.rule.name}")
        check_settings(defaults, self.rule)
        check_clipping(max_grad_norm, non_finite, update_in_backward)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        self.unit_grad_norms: dict[str, float] = {}
        self.non_finite_unit: str | None = None
        self._skipped = SkippedSteps(non_finite, max_consecutive_skips)
        self._rejection: str | None = None  # why the next step is rejected whatever its gradients are
        self._seed, self._step, self._in_backward = seed, 0, update_in_backward
        self._steps: dict[torch.Tensor, int] = {}  # of each trained parameter
        self._step_in_backward: StepUpdate | None = None  # the step that backward passes are applying
        self._store: Store = self._engine.store
        self._names = {id(ref.param): name for name, ref in self._engine.refs.items()}
        self._has_moments = False
        super().__init__(list(params) if params is not None else self._trainable(), defaults)
        self._allocate(moments)

    def _allocate(self, kind: str) -> None:
        """Allocate gradients and moments for the parameters of all groups, which torch's constructor has added, and compile the kernels."""
        if self._in_backward:
            apply_in_backward(self._engine, self)
        allocate_grads(self._engine)
        rules = {name: self.rule_of(name) for slab in self._store.slabs for name in slab.grad_layout}
        self._moments = Moments(self._store, kind, rules)
        self._updates = UnitUpdates(self._engine, self._moments, rules, self._in_backward)
        self._has_moments = True
        for group in self.param_groups:
            self._add_states(group["params"])
        self._updates.compile(self.defaults)

    def allocate_moments(self) -> None:
        """Let the system allocate the memory of all moments now, and not in the first update. They are still zero."""
        self._moments.allocate_pages()

    def rule_of(self, name: str) -> Rule:
        """Return the rule by which a parameter is updated, by its full name."""
        return self.rule

    @staticmethod
    def hyperparameters(settings: Any) -> dict[str, Any]:
        """Return the arguments of the class that are settings, given those of a run or transformers' `TrainingArguments`."""
        raise NotImplementedError

    def _trainable(self) -> list[torch.nn.Parameter]:
        # Same order as in torch's optimizers, so that states can be exchanged between them.
        params = [param for param in self._engine.parts.model.parameters() if param.requires_grad]
        if not params:
            raise ConfigError("nothing is trainable: every parameter of the model is frozen")
        return params

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient. Return once all gradients are known to be finite.

        The updates continue in threads, and every use of a weight waits for its update. To read ``p.data``, call
        `horizon_lm.synchronize` first.

        Raises:
            NonFiniteError: if a gradient is NaN or infinite and the step may not be skipped; no weight was changed.
            StreamingError: if an error made the gradients incomplete; call `zero_grad` first.
        """
        loss = closure() if closure is not None else None
        rejection, self._rejection = self._rejection, None  # set by `reject_step`, for this step alone
        self._wait_for_grads()
        present = self._names_with_grads()
        has_grads = self.pending if self._in_backward else any(present.values())
        if not has_grads:  # as in torch, nothing is done
            return loss
        squared_norms = sum_squares(self._engine, present)
        if self._skip_or_raise(squared_norms, rejection):
            return loss
        self.grad_norm = sum(squared_norms.values()) ** 0.5
        self.unit_grad_norms = {str(unit): square**0.5 for unit, square in squared_norms.items()}
        if self._step_in_backward is not None:
            self._engine.grads.squared_norms.clear()
            self._finish_step(self._step_in_backward)
        else:
            self._issue_update(present, clip_factor(self.grad_norm, self.max_grad_norm))
        return loss

    def _wait_for_grads(self) -> None:
        """Wait until all gradients of the step are in host memory. Raise StreamingError if an error made them incomplete."""
        engine = self._engine
        engine.resume_interrupted()
        if engine.grads.invalid:
            raise StreamingError(
                "an error interrupted a backward pass of this step, so its gradients are incomplete; call "
                "optimizer.zero_grad() and repeat the step"
            )
        engine.access.wait_for_grads()
        engine.foreign_writes.follow()

    def _skip_or_raise(self, squared_norms: Mapping[Unit, float], rejection: str | None) -> bool:
        """Skip the step if a gradient is not finite, or if it was rejected. Return whether it is skipped.

        Args:
            squared_norms: the squared norm of the gradients of each unit.
            rejection: why the step is rejected whatever its gradients are; None if it is not.

        Raises:
            NonFiniteError: the step may not be skipped.
        """
        unit = first_non_finite_unit(squared_norms, self._engine.parts.num_blocks)
        if unit is not None:
            self._reject_gradient_of(unit)
        elif rejection is not None:
            self._skipped.skip(f"{rejection} at step {self._step + 1}")
        return unit is not None or rejection is not None

    def landed_grad_norm(self) -> float:
        """Return the global norm of the gradients of this step, before clipping. Wait until they are in host memory."""
        self._engine.access.wait_for_grads()
        return float(sum(sum_squares(self._engine, self._names_with_grads()).values()) ** 0.5)

    def belongs_to(self, engine: Engine) -> bool:
        """Return whether this optimizer updates the model of this engine."""
        return self._engine is engine

    @property
    def update_in_backward(self) -> bool:
        """True if units are updated in the backward pass."""
        return self._in_backward

    @property
    def num_steps(self) -> int:
        """The number of steps applied. A step counts as soon as nothing but its updates in host memory is left to do."""
        return self._step

    @property
    def skips_non_finite(self) -> bool:
        """True if a step with a NaN or infinite gradient is skipped, not an error."""
        return self._skipped.may_skip

    def reject_step(self, reason: str) -> None:
        """Let the next `step` treat its gradients as not finite: a loss that is not finite may have gradients of zero."""
        self._rejection = reason

    @property
    def num_skipped(self) -> int:
        """The number of steps skipped because a gradient was not finite."""
        return self._skipped.num

    @property
    def partial_update(self) -> bool:
        """True if an update was not completed, so that the model must be loaded again."""
        return self._engine.updates.partial_update.reason is not None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Mark all gradients empty; no memory is written."""
        if self._engine.grads.invalid:  # a backward pass with updates failed before its first update
            self._step_in_backward = None
        try:
            self._engine.access.clear_grads()
        except Exception:  # a landing failed, and with it the updates that waited for it
            self._step_in_backward = None
            raise

    def _names_with_grads(self) -> dict[Unit, list[str]]:
        """Return the parameters of each unit that have a gradient. Others are not updated, as in torch.

        Updates in the backward pass leave no gradients behind, so with them all trained parameters are returned.
        """
        grads = self._engine.grads
        return {
            unit: [name for name in slabs.grad_layout if self._in_backward or not grads.is_empty(name)]
            for unit, slabs in self._store.units.items()
        }

    def _reject_gradient_of(self, unit: Unit) -> None:
        """Skip a step in which the gradient of a unit is not finite, or raise NonFiniteError."""
        self.non_finite_unit = str(unit)
        reason = f"the gradient of {unit} is not finite at step {self._step + 1}"
        if not self._in_backward:
            self._skipped.skip(reason)
            return
        error = NonFiniteError(
            f"{reason}. It was not applied, but other units were updated as soon as their gradients landed, so the model is "
            f"partially updated: load it or a checkpoint again. {REMEDY}"
        )
        self._engine.updates.partial_update.record(error)
        raise error

    # One step

    def _new_step(self, clip: float) -> StepUpdate:
        """Return the numbers of the next step, with the present settings of the groups."""
        groups = [(group["params"], {name: group[name] for name in self.defaults}) for group in self.param_groups]
        return StepUpdate(groups, self._steps, self._seed, self._step + 1, clip)

    def _issue_update(self, present: Mapping[Unit, list[str]], clip: float) -> None:
        """Finish the updates of the last step; the embedding's is pending if no forward pass came in between. Then count this step, and
        issue the updates of all units.
        """
        self._engine.updates.finish()
        step = self._new_step(clip)
        update = self._updates.of_all(step, present)
        self._finish_step(step)
        self._engine.issue_update(update)

    def _finish_step(self, step: StepUpdate) -> None:
        """Count a step, also in the state of its parameters. Its updates may still be running, or are about to be issued."""
        for param in step.stepped:
            self._steps[param] += 1
        if step.stepped:  # torch rejects an empty list
            torch._foreach_add_([self.state[param]["step"] for param in step.stepped], 1.0)
        self._step += 1
        self._skipped.reset()
        self._step_in_backward = None

    # The interface for updates in a backward pass (`engine.host.updates.UnitOptimizer`)

    def begin(self) -> None:
        """Begin the step that a backward pass applies. Raise StreamingError if the last one was not ended by `step`."""
        if self.pending:
            raise StreamingError(
                "update_in_backward has already changed the weights in this step's backward; call optimizer.step() after "
                "each backward, and put all rows of a step into one forward, "
                "or several batches into horizon_lm.run_together"
            )
        self._step_in_backward = self._new_step(clip=1.0)

    @property
    def pending(self) -> bool:
        """True from the begin of a backward pass with updates until `step`."""
        return self._step_in_backward is not None

    def moves(self, slab: Slab, names: list[str], grads: torch.Tensor) -> Sequence[Move]:
        """Return the update of these parameters of a slab, whose gradients will be in ``grads``."""
        assert self._step_in_backward is not None
        return self._updates.of_slab(self._step_in_backward, slab, names, grads)

    def table(self, grads: TableGrads) -> TableRows | None:
        """Return the update of the embedding with these gradients, or None if it is not trained."""
        assert self._step_in_backward is not None
        return self._updates.of_table(self._step_in_backward, grads)

    # Parameter groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Reject parameters of other models, which would never be updated."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings({name: group[name] for name in self.defaults}, self.rule)
            if any(id(param) not in self._names for param in group["params"]):
                raise ConfigError(
                    f"horizon_lm.{self.rule.name} was given a parameter that is not of this model, for example of a prompt that PEFT added after "
                    "stream(); add prompts before it, stream(get_peft_model(model, config)), or use another optimizer"
                )
        except ConfigError:
            self.param_groups.pop()
            raise
        if self._has_moments:
            self._add_states(group["params"])

    def _add_states(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Create the states of trainable parameters, as views of the moments."""
        for param in params:
            name = self._names[id(param)]
            slab = self._store.slab_of(name)
            if name in slab.grad_layout:
                self.state[param] = {"step": torch.tensor(0.0), **self._moments.state(slab, name)}
                if slab.low is not None:
                    self.state[param][LOW_HALF] = slab.layout.view(slab.low, name)
                self._steps[param] = 0

    @property
    def moments(self) -> Moments:
        """The moments of all units in host memory."""
        return self._moments

    def scalars(self) -> dict[str, Any]:
        """Return the state beside the moments as plain data: steps, settings of groups, the seed and skipped steps.

        It covers all steps that were issued, although their updates may still be running.
        """
        return {
            "step": self._step,
            "steps": {self._names[id(param)]: count for param, count in self._steps.items()},
            "groups": plain_groups(self.param_groups, self._names),
            "seed": self._seed,
            "skipped": self._skipped.state_dict(),
            "grad_norm": self.grad_norm,
            "unit_grad_norms": self.unit_grad_norms,
        }

    def load_settings(self, scalars: Mapping[str, Any]) -> None:
        """Take over the settings of groups from the return value of `scalars`, which `load_scalars` has checked."""
        for group, saved in zip(self.param_groups, scalars["groups"], strict=True):
            settings = {name: value for name, value in saved.items() if name != "params"}
            group.update({name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Take over what `scalars` has returned, but for the settings of groups.

        Raises:
            ConfigError: it belongs to other parameters or groups, or is damaged; nothing was changed.
        """
        groups = [group["params"] for group in plain_groups(self.param_groups, self._names)]
        trained = {self._names[id(param)] for param in self._steps}
        check_scalars(scalars, groups, trained, self.rule, tuple(self.defaults))
        for param in self._steps:
            self._steps[param] = scalars["steps"][self._names[id(param)]]
            self.state[param]["step"].fill_(self._steps[param])
        self._step, self._seed = scalars["step"], scalars["seed"]
        self._skipped.load_state_dict(scalars["skipped"])
        self.grad_norm, self.unit_grad_norms = scalars["grad_norm"], dict(scalars["unit_grad_norms"])

    def state_dict(self) -> dict[str, Any]:
        """Wait for all updates and return the state as torch does, with the optimizer's number of steps as ``step``.

        Moments, and the low halves of fp32 masters, are views and not copies.
        """
        self._engine.resume_interrupted()
        self._engine.updates.finish()
        return super().state_dict() | {STEPS: self._step}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict` of this class, or of torch's optimizer of this name if that counts its steps as ``step``.

        Moments in other floating-point formats are converted. In precision ``fp32_master`` the state holds the low halves
        of the weights, so call the model's ``load_state_dict`` first.

        Raises:
            ConfigError: if a part of the state does not fit; nothing was changed.
        """
        own = self.state_dict()
        self._engine.access.hand_out_weight()  # a checkpoint that is being written must get the moments of before
        saved = check_state(state_dict, own, self._moments.kind, self.rule, tuple(self.defaults))
        saved.copy_into(own["state"])
        self._steps = {param: int(state["step"]) for param, state in self.state.items()}
        for group, settings in zip(self.param_groups, saved.groups, strict=True):
            group.update(settings)
        self._step = saved.num_steps
