"""AdamW over slabs (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101).

The update is torch.optim.AdamW's, in fp32, whatever the weights, gradients and moments are kept in. It runs in threads
on the host, unit by unit in the order in which the next forward needs them, and the forward goes on as units are done.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from horizon_lm.device.cpu import dtype_name
from horizon_lm.device.transfers import Move
from horizon_lm.engine.executor import Engine
from horizon_lm.engine.updates import TableGrads
from horizon_lm.errors import ConfigError, NonFiniteError, StreamingError
from horizon_lm.kernels.adamw import Scalars
from horizon_lm.kernels.gradients import squared_norm_kernel
from horizon_lm.optim.moments import Moments
from horizon_lm.optim.saved_state import LOW_HALF, STEPS, check_settings, check_state
from horizon_lm.optim.skipped_steps import REMEDY, SkippedSteps
from horizon_lm.optim.update_tasks import (
    Hyperparameters,
    Span,
    TableRows,
    UnitArrays,
    compile_kernels,
    noise_key,
    span_pieces,
)
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, block
from horizon_lm.store.store import Store, as_array


class AdamW(torch.optim.Optimizer):
    """AdamW for a streamed model, with moments in host memory and optional clipping by the global norm.

    Args:
        model: a streamed model.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        max_grad_norm: scale gradients down to this global norm when it is exceeded; None for no clipping.
        params: parameters or parameter groups; None for all trainable ones in one group.
        seed: of the stochastic rounding in precision ``bf16`` and of moments in fewer than 32 bits.
        moments: ``float32`` (8 bytes per parameter), ``bfloat16`` (4) or ``8bit`` (2, and 3% for the scales of blocks).
        non_finite: ``raise`` NonFiniteError at a NaN or infinite gradient, or ``skip`` that step with a warning.
        max_consecutive_skips: with ``skip``, so many steps in a row may be left out, and the next one raises NonFiniteError;
            None for no limit.
        update_in_backward: update each unit as soon as its gradient has landed, and keep no gradients. One backward a
            step, no clipping, no skipping; `step` only ends the step. A fault in the backward leaves the model partially updated.

    Attributes:
        grad_norm: global norm of the gradients of the last step, before clipping.
        unit_grad_norms: the same of each unit.
    """

    updates_slabs = True  # and not parameters, as other optimizers do

    def __init__(
        self,
        model: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        params: Iterable[Any] | None = None,
        seed: int = 0,
        moments: str = "float32",
        non_finite: str = "raise",
        max_consecutive_skips: int | None = 3,
        update_in_backward: bool = False,
    ) -> None:
        if not hasattr(model, "_horizon"):
            raise ConfigError("horizon_lm.AdamW needs a streamed model; call horizon_lm.stream(model) first")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_settings(defaults)
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be positive, or None for no clipping")
        self._skipped = SkippedSteps(non_finite, max_consecutive_skips)
        if update_in_backward and (max_grad_norm is not None or non_finite == "skip"):
            raise ConfigError(
                "update_in_backward changes weights before all gradients are known, so it cannot clip by their global norm "
                "or skip the step; use it without max_grad_norm and non_finite='skip'"
            )
        self._engine: Engine = model._horizon.engine
        self._store: Store = self._engine.store
        self._names = {id(ref.param): name for name, ref in self._engine.refs.items()}
        self._arrays: dict[str, UnitArrays] = {}
        super().__init__(list(params) if params is not None else self._trainable(), defaults)
        if update_in_backward:
            self._engine.update_in_backward(self)
        self._engine.allocate_grads()
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        self.unit_grad_norms: dict[str, float] = {}
        self._seed, self._step, self._in_backward = seed, 0, update_in_backward
        self._hyper: dict[int, Hyperparameters] = {}
        self._moments = Moments(self._store, moments)
        self._arrays.update({unit: UnitArrays(self._store, unit, self._moments) for unit in self._store.units})
        self._steps: dict[torch.Tensor, int] = {}
        for group in self.param_groups:
            self._add_states(group["params"])
        compile_kernels(self._arrays[EMBED])

    def _trainable(self) -> list[torch.nn.Parameter]:
        # in the order of torch's optimizers, so that states go from one to the other
        params = [param for param in self._engine.parts.model.parameters() if param.requires_grad]
        if not params:
            raise ConfigError("nothing is trainable: every parameter of the model is frozen")
        return params

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient. Returns when the gradients are known to be good.

        The updates go on in threads; whatever needs a weight waits for it. Read ``p.data`` after
        `horizon_lm.synchronize`.

        Raises:
            NonFiniteError: a gradient is NaN or infinite, and such steps are not skipped, or too many in a row were; no weight
                has been touched.
            StreamingError: a fault invalidated the gradients; call `zero_grad` first.
        """
        loss = closure() if closure is not None else None
        engine = self._engine
        engine.check_alive()
        if engine.grads.invalid:
            raise StreamingError(
                "an error interrupted a backward of this step, so its gradients are incomplete; call "
                "optimizer.zero_grad() and repeat the step"
            )
        engine.wait_for_grads()
        engine.foreign_writes.follow()
        present = {unit: self._present(unit) for unit in self._store.units}
        if not (self._hyper if self._in_backward else any(present.values())):  # no backward: as torch, do nothing
            return loss
        squared_norms = self._squared_norm(present)
        bad = next((unit for unit in self._backward_order() if not math.isfinite(squared_norms[unit])), None)
        if bad is not None:
            self._reject(bad)
            return loss
        self.grad_norm = sum(squared_norms.values()) ** 0.5
        self.unit_grad_norms = {unit: square**0.5 for unit, square in squared_norms.items()}
        if not self._in_backward:
            self._update(present)
        elif self._hyper:
            engine.grads.squared_norms.clear()
            self._advance()
        return loss

    @property
    def num_skipped(self) -> int:
        """Return the number of steps left out because a gradient was not finite."""
        return self._skipped.num

    @property
    def partial_update(self) -> bool:
        """Whether an update was not completed, so that the model has to be loaded again."""
        return self._engine.updates.partial_update.reason is not None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Mark all gradients empty; no memory is written."""
        if self._engine.grads.invalid:  # the backward of an update_in_backward that failed before its first update
            self._hyper = {}
        self._engine.clear_grads()

    def _squared_norm(self, present: Mapping[str, list[str]]) -> dict[str, float]:
        """By unit, the sum of squares of the gradients as they are stored; what is not known is read again."""
        squared_norms = {}
        for unit, slabs in self._store.units.items():
            names = present[unit]
            known = self._engine.grads.squared_norms.of(unit) if names else None
            if known is None and names and slabs.grads.numel():
                kernel = squared_norm_kernel(dtype_name(slabs.grads))
                known = sum(kernel(as_array(slabs.grad_layout.view(slabs.grads, n).view(-1))) for n in names)
            squared_norms[unit] = known or 0.0
        return squared_norms

    def _reject(self, unit: str) -> None:
        """Skip a step whose gradient is not finite, or raise NonFiniteError."""
        what = f"the gradient of {unit} is not finite at step {self._step + 1}"
        if not self._in_backward:
            self._skipped.skip(what)
            return
        error = NonFiniteError(
            f"{what}. It was not applied, but other units were updated as their gradients came, so the model is partially updated: load it or "
            f"a checkpoint again. {REMEDY}"
        )
        self._engine.updates.partial_update.record(error)
        raise error

    # The update after a backward

    def _update(self, present: Mapping[str, list[str]]) -> None:
        clip = 1.0
        if self.max_grad_norm is not None:
            assert self.grad_norm is not None
            clip = min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self._hyper = self._hyperparameters()
        moves = {
            unit: self._pieces(unit, present[unit], self._store.units[unit].grads, clip)
            for unit in self._deadline_order()
        }
        table = None
        if present[EMBED]:
            table = self._table(TableGrads(self._store.grad(*self._store.units[EMBED].layout), None), clip)
        schedule = build.update(self._engine.layout, [unit for unit, pieces in moves.items() if pieces])
        self._engine.run_update(schedule, moves, table)
        self._advance()

    def _deadline_order(self) -> list[str]:
        """Units in the order in which the next forward streams them in. The table's part is left to that forward."""
        blocks = [block(u) for u in range(self._engine.parts.num_blocks)]
        return [OUTER, *blocks, *([] if self._engine.parts.tied else [HEAD])]

    def _backward_order(self) -> list[str]:
        """All units, the one where a backward meets trouble first before those to which it spreads."""
        return [HEAD, *(block(u) for u in reversed(range(self._engine.parts.num_blocks))), OUTER, EMBED]

    def _present(self, unit: str) -> list[str]:
        """Return the parameters of a unit that have a gradient. The others are left as they are, as torch leaves them."""
        layout = self._store.units[unit].grad_layout
        if self._in_backward:
            return list(layout)
        return [name for name in layout if not self._engine.grads.is_empty(name)]

    # The update in a backward (`engine.updates.UpdatesInBackward`)

    def begin(self) -> None:
        if self._hyper:
            raise StreamingError(
                "update_in_backward has changed the weights already in this step's backward; call optimizer.step() after "
                "each backward, and put all rows of a step into one forward"
            )
        self._hyper = self._hyperparameters()

    @property
    def pending(self) -> bool:
        return bool(self._hyper)

    def moves(self, unit: str, names: list[str], grads: torch.Tensor) -> Sequence[Move]:
        return self._pieces(unit, names, grads, clip=1.0)

    def table(self, grads: TableGrads) -> TableRows | None:
        return self._table(grads, clip=1.0)

    # Pieces

    def _pieces(self, unit: str, names: list[str], grads: torch.Tensor, clip: float) -> Sequence[Move]:
        """Return the update of some of a unit's parameters with the gradient slab of the unit."""
        spans = self._spans(unit, names, clip)
        return span_pieces(
            self._arrays[unit], spans, as_array(grads), self._engine.updates.partial_update.record, self._guard(unit)
        )

    def _spans(self, unit: str, names: list[str], clip: float) -> list[Span]:
        """Return the parameters that are updated alike and lie one behind the other, together."""
        arrays = self._arrays[unit]
        order = {name: number for number, name in enumerate(arrays.layout)}
        spans: list[tuple[list[str], Scalars]] = []
        before: tuple[Any, ...] = ()
        for name in names:
            param = self._engine.refs[name].param
            hyper = self._hyper.get(id(param))
            if hyper is None:
                continue
            step = self._steps[param] + 1
            if arrays.mergeable and before == (order[name] - 1, hyper, step):
                spans[-1][0].append(name)
            else:
                spans.append(([name], hyper.scalars(step, clip, noise_key(self._seed, self._step + 1, unit))))
            before = order[name], hyper, step
            self._stepped.append(param)
        return [Span(*span) for span in spans]

    def _table(self, grads: TableGrads, clip: float) -> TableRows | None:
        spans = self._spans(EMBED, list(self._store.units[EMBED].layout), clip)
        if not spans:
            return None
        return TableRows(
            self._arrays[EMBED], grads, spans[0].scalars, self._engine.updates.partial_update.record, self._guard(EMBED)
        )

    def _guard(self, unit: str) -> Callable[[], bool]:
        """Whether a unit may be updated when its turn comes. After a backward that is known; in one it is not."""
        if not self._in_backward:
            return lambda: True
        squared_norms = self._engine.grads.squared_norms
        return lambda: math.isfinite(squared_norms.of(unit) or 0.0)

    def _hyperparameters(self) -> dict[int, Hyperparameters]:
        self._stepped: list[torch.nn.Parameter] = []
        return {
            id(param): Hyperparameters(
                lr=float(group["lr"]),
                beta1=float(group["betas"][0]),
                beta2=float(group["betas"][1]),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
            )
            for group in self.param_groups
            for param in group["params"]
        }

    def _advance(self) -> None:
        """The step is on its way: what comes next belongs to the next one."""
        for param in self._stepped:
            self._steps[param] += 1
        torch._foreach_add_([self.state[param]["step"] for param in self._stepped], 1.0)
        self._step += 1
        self._skipped.applied()
        self._hyper = {}

    # State

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. Parameters of other models are rejected, since nothing here would update them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group)
            if any(id(param) not in self._names for param in group["params"]):
                raise ConfigError(
                    "horizon_lm.AdamW was given a parameter that is not of this model; use another optimizer for it"
                )
        except ConfigError:
            self.param_groups.pop()
            raise
        if self._arrays:
            self._add_states(group["params"])

    def _add_states(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Make the states of parameters, as views; frozen ones have none."""
        for param in params:
            name = self._names[id(param)]
            unit = self._store.unit_of[name]
            slabs = self._store.units[unit]
            if name in slabs.grad_layout:
                self.state[param] = {"step": torch.tensor(0.0), **self._moments.state(unit, slabs.grad_layout, name)}
                if slabs.low is not None:
                    self.state[param][LOW_HALF] = slabs.layout.view(slabs.low, name)
                self._steps[param] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, once all updates are done, and the number of steps of the whole optimizer as ``step``.

        Moments, and the low halves of masters, are views and not copies.
        """
        self._engine.check_alive()
        self._engine.updates.finish()
        return super().state_dict() | {STEPS: self._step}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that `state_dict` gave, or torch.optim.AdamW's.

        Moments in other floating-point formats are converted. In precision ``fp32_master`` the low halves come with the
        state, so that the model's ``load_state_dict`` has to be called before.

        Raises:
            ConfigError: something in it does not fit; nothing has been changed.
        """
        own = self.state_dict()
        saved = check_state(state_dict, own, self._moments.kind)
        saved.copy_into(own["state"])
        self._steps = {param: int(state["step"]) for param, state in self.state.items()}
        for group, settings in zip(self.param_groups, saved.groups, strict=True):
            group.update(settings)
        self._step = saved.num_steps
