"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, algorithm 2).

The arithmetic is that of the authors' implementation in torch.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from horizon_lm.memory.kernels.bits import F32, fma, inlined
from horizon_lm.memory.kernels.updates import Moment, Rule
from horizon_lm.optim.slab_optimizer import SlabOptimizer


class _Numbers(NamedTuple):
    """The numbers of one step; 1 - beta is computed in double precision."""

    lr: np.float32
    beta1: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32


def _numbers(step: int, lr: float, betas: tuple[float, float]) -> _Numbers:
    beta1, beta2 = betas
    return _Numbers(*map(np.float32, (lr, beta1, 1 - beta1, beta2, 1 - beta2)))


@inlined
def _advance(grad: Any, first: Any, second: Any, n: Any) -> Any:
    """Return the moment after a step, and for `_move` the direction, -1, 0 or 1, in place of a second moment."""
    mean = first * n.beta1 + grad * n.one_minus_beta1
    direction = F32(mean > F32(0)) - F32(mean < F32(0))
    return fma(n.one_minus_beta2, grad, first * n.beta2), direction


@inlined
def _move(first: Any, direction: Any, n: Any) -> Any:
    """Return what is subtracted from the weight."""
    return n.lr * direction


class Lion(SlabOptimizer):
    """Lion for a streamed model: every weight moves by the learning rate, in the direction of a mean of the gradients.

    It keeps one moment instead of AdamW's two. The paper recommends a third to a tenth of AdamW's learning rate, and as many times
    its weight decay.

    Args:
        model: a streamed model.
        lr: distance that each weight moves in a step.
        betas: weight of the moment in the direction, and the moment's decay rate.
        weight_decay: decoupled weight decay, multiplied by the learning rate as in AdamW.
        max_grad_norm, params, seed, non_finite, max_consecutive_skips, update_in_backward: as in `AdamW`.
        moments: ``float32`` (4 bytes per parameter), ``bfloat16`` (2) or ``8bit`` (1, and 2% for the scales of blocks).

    Attributes:
        grad_norm, unit_grad_norms, non_finite_unit: as in `AdamW`.
    """

    rule = Rule("Lion", (Moment("exp_avg", is_signed=True),), _numbers, _advance, _move, decay_rates=("betas",))

    def __init__(
        self,
        model: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
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
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
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
        return {"lr": settings.learning_rate, "betas": betas, "weight_decay": settings.weight_decay}
