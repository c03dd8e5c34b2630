"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101, algorithm 2).

The update equals that of torch.optim.AdamW.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from horizon_lm.memory.kernels.bits import fma, inlined
from horizon_lm.memory.kernels.updates import Moment, Rule
from horizon_lm.optim.slab_optimizer import SlabOptimizer


class _Numbers(NamedTuple):
    """The numbers of one step.

    Attributes:
        one_minus_beta1, beta2, one_minus_beta2: 1 - beta is computed in double precision; otherwise v would be off by
            1e-5.
        step_size: lr / (1 - beta1**step).
        sqrt_correction2: sqrt(1 - beta2**step).
        eps: term of the denominator.
    """

    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    step_size: np.float32
    sqrt_correction2: np.float32
    eps: np.float32


def _numbers(step: int, lr: float, betas: tuple[float, float], eps: float) -> _Numbers:
    """Return the numbers of a step, computed in double precision."""
    beta1, beta2 = betas
    return _Numbers(
        one_minus_beta1=np.float32(1 - beta1),
        beta2=np.float32(beta2),
        one_minus_beta2=np.float32(1 - beta2),
        step_size=np.float32(lr / (1 - beta1**step)),
        sqrt_correction2=np.float32((1 - beta2**step) ** 0.5),
        eps=np.float32(eps),
    )


@inlined
def _advance(grad: Any, first: Any, second: Any, n: Any) -> Any:
    """Return the mean of the gradients and that of their squares after a step."""
    return fma(n.one_minus_beta1, grad - first, first), fma(n.one_minus_beta2 * grad, grad, second * n.beta2)


@inlined
def _move(first: Any, second: Any, n: Any) -> Any:
    return n.step_size * first / (np.sqrt(second) / n.sqrt_correction2 + n.eps)


class AdamW(SlabOptimizer):
    """AdamW for a streamed model, with moments in host memory and optional clipping by the global norm.

    Args:
        model: a streamed model.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        max_grad_norm: global norm to which larger gradients are scaled down; None for no clipping.
        params: parameters or parameter groups; None for one group of all trainable parameters.
        seed: the seed of stochastic rounding, in precision ``bf16`` and for moments of fewer than 32 bits.
        moments: ``float32`` (8 bytes per parameter), ``bfloat16`` (4) or ``8bit`` (2, and 3% for the scales of blocks).
        non_finite: ``raise`` NonFiniteError for a NaN or infinite gradient, or ``skip`` that step with a warning.
        max_consecutive_skips: with ``skip``, the limit on consecutive skipped steps; the next one raises NonFiniteError.
            None for no limit.
        update_in_backward: update each unit as soon as its gradient has landed, and keep no gradients. This allows one
            backward pass per step, no clipping and no skipping, and `step` only ends the step. An error in the backward
            pass leaves the model partially updated.

    Attributes:
        grad_norm: global norm of the gradients of the last step, before clipping.
        unit_grad_norms: norm of each unit's gradients in the last step, before clipping.
        non_finite_unit: the unit in which the gradient of the last rejected or skipped step was first not finite.

    Examples:
        >>> optimizer = horizon_lm.AdamW(model, lr=1e-3, max_grad_norm=1.0)
        >>> losses = []
        >>> for _ in range(3):
        ...     loss = model(**batch).loss
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     losses.append(loss.item())
        >>> losses == sorted(losses, reverse=True)
        True
    """

    rule = Rule(
        "AdamW",
        (Moment("exp_avg", is_signed=True), Moment("exp_avg_sq", is_signed=False)),
        _numbers,
        _advance,
        _move,
        decay_rates=("betas",),
    )

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
        super().__init__(
            model,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            max_grad_norm=max_grad_norm,
            params=params,
            seed=seed,
            moments=moments,
            non_finite=non_finite,
            max_consecutive_skips=max_consecutive_skips,
            update_in_backward=update_in_backward,
        )

    @staticmethod
    def hyperparameters(settings: Any) -> dict[str, Any]:
        betas = settings.adam_beta1, settings.adam_beta2
        return {
            "lr": settings.learning_rate,
            "betas": betas,
            "eps": settings.adam_epsilon,
            "weight_decay": settings.weight_decay,
        }
