"""The gradient norm of a step: sums of squares, the clipping factor, and steps skipped because the norm is not finite."""

import math
from collections.abc import Iterable, Mapping

from horizon_lm.common.quantities import counted
from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.device.cpu import dtype_name
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.errors import ConfigError, NonFiniteError, NonFiniteWarning, warn
from horizon_lm.memory.arena import as_array
from horizon_lm.memory.kernels.gradients import squared_norm_kernel
from horizon_lm.memory.unit_slabs import Slab

REMEDY = "Lower the learning rate, or look at the rows of this step."


def sum_squares(engine: EngineState, present: Mapping[Unit, Iterable[str]]) -> dict[Unit, float]:
    """Return the sum of squares of each unit's gradients, to which all ranks add their parts.

    Gradients are read from host memory only if landing did not sum their squares.

    Args:
        engine: the model's engine.
        present: the parameters with a gradient, by unit.
    """
    squared_norms = dict.fromkeys(engine.store.units, 0.0)
    for unit, slabs in engine.store.units.items():
        for slab in slabs.of_weights:
            names = [name for name in present[unit] if name in slab.layout]
            landed = engine.grads.squared_norms.of(slab) if names else None
            if landed is not None:
                squared_norms[unit] += landed
            elif names and slab.grads.numel():
                squared_norms[unit] += _squared_norm(slab, names)
    sums = engine.mesh.sums("the norm of the gradients", list(squared_norms.values()))
    return dict(zip(squared_norms, sums, strict=True))


def _squared_norm(slab: Slab, names: Iterable[str]) -> float:
    """Return the sum of squares of this rank's part of these gradients of a slab, read from host memory."""
    kernel = squared_norm_kernel(dtype_name(slab.grads))
    return sum(kernel(as_array(slab.grads[slab.grad_layout.part_of(name, slab.own_grads)])) for name in names)


def clip_factor(grad_norm: float, max_grad_norm: float | None) -> float:
    """Return the factor that clips gradients to a global norm, as torch.nn.utils.clip_grad_norm_ computes it."""
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (grad_norm + 1e-6))


def first_non_finite_unit(squared_norms: Mapping[Unit, float], num_blocks: int) -> Unit | None:
    """Return the first unit in backward order whose sum is not finite: the origin, as a backward pass spreads such values."""
    order = [HEAD, *map(block, reversed(range(num_blocks))), OUTER, EMBED]
    return next((unit for unit in order if not math.isfinite(squared_norms[unit])), None)


def check_clipping(max_grad_norm: float | None, non_finite: str, update_in_backward: bool) -> None:
    """Raise ConfigError if the global norm to clip by is not positive, or not known in time. The arguments are those of `SlabOptimizer`."""
    if max_grad_norm is not None and not max_grad_norm > 0:  # NaN, too
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be positive, or None for no clipping")
    if update_in_backward and (max_grad_norm is not None or non_finite == "skip"):
        raise ConfigError(
            "update_in_backward changes weights before all gradients are known, so it cannot clip by the global norm "
            "or skip a step; use it without max_grad_norm and non_finite='skip'"
        )


class SkippedSteps:
    """A counter of steps skipped because of a NaN or infinite gradient.

    Args:
        non_finite: ``raise`` or ``skip``.
        limit: maximum number of consecutive skipped steps; None for no limit.

    Attributes:
        may_skip: whether steps may be skipped.
        num: number of steps skipped so far.
    """

    def __init__(self, non_finite: str, limit: int | None) -> None:
        if non_finite not in ("raise", "skip"):
            raise ConfigError(f"non_finite is {non_finite!r}; choose 'raise' or 'skip'")
        if limit is not None and limit < 1:
            raise ConfigError(f"max_consecutive_skips is {limit}; it must be at least 1, or None for no limit")
        self.may_skip, self._limit = non_finite == "skip", limit
        self.num = self._num_consecutive = 0

    def skip(self, reason: str) -> None:
        """Skip a step with a NonFiniteWarning. Raise NonFiniteError if steps may not be skipped, or if too many were."""
        if not self.may_skip:
            raise NonFiniteError(f"{reason}; the weights are unchanged. {REMEDY}")
        if self._num_consecutive == self._limit:
            raise NonFiniteError(
                f"{reason}, after {counted(self._limit, 'skipped step')} in a row, the limit of max_consecutive_skips; "
                f"the weights are unchanged. {REMEDY}"
            )
        self.num += 1
        self._num_consecutive += 1
        warn(f"{reason}; this step was skipped", NonFiniteWarning)

    def reset(self) -> None:
        """End a run of consecutive skipped steps, because a step was applied."""
        self._num_consecutive = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counts as plain data."""
        return {"num": self.num, "num_consecutive": self._num_consecutive}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over what `state_dict` has returned."""
        self.num, self._num_consecutive = state["num"], state["num_consecutive"]
