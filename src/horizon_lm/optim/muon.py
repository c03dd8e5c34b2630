"""Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) for the matrices of hidden layers, and AdamW for
all other weights.

A matrix moves along its orthogonalized momentum. The arithmetic is that of torch.optim.Muon. The learning rate is scaled as in Liu et al.,
"Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.2, so that a single one serves both kinds of weights.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from horizon_lm.common.constants import ORTHOGONALIZED_AT_ONCE, ORTHOGONALIZING_STEPS
from horizon_lm.common.optimizers import NO_MATRICES, NO_MATRICES_OF_TILES
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ConfigError
from horizon_lm.memory.kernels.bits import F32, fma, inlined
from horizon_lm.memory.kernels.updates import Moment, OnDevice, Rule
from horizon_lm.optim.adamw import AdamW
from horizon_lm.optim.slab_optimizer import SlabOptimizer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial, with the steepest slope at zero
_EPS = 1e-7


def orthogonalize(matrices: torch.Tensor) -> None:
    """Replace a matrix (M, N), or each of several (E, M, N), by one with the same singular vectors and singular values near 1.

    Newton and Schulz' iteration with a polynomial of degree 5, in bfloat16.
    """
    if matrices.ndim == 3:
        for part in matrices.split(max(1, ORTHOGONALIZED_AT_ONCE // matrices[0].numel())):
            part.copy_(_iterate(part, torch.baddbmm))
        return
    matrices.copy_(_iterate(matrices, torch.addmm))


def _iterate(matrices: torch.Tensor, add_product: Any) -> torch.Tensor:
    """Return a matrix, or several, after all iterations. ``add_product`` is ``torch.addmm``, or ``torch.baddbmm`` for several."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    # Tall matrices are transposed, because wide ones have the smaller product with their transpose.
    wide = (matrices.mT if is_tall else matrices).bfloat16()
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)  # no singular value is above 1
    for _ in range(ORTHOGONALIZING_STEPS):
        gram = wide @ wide.mT
        wide = add_product(wide, add_product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


class _Numbers(NamedTuple):
    """The numbers of one step; 1 - momentum is computed in double precision.

    Attributes:
        one_minus_momentum: share of the gradient in its mean.
        back: momentum - 1, the factor on ``mean - grad`` in the step from the mean to Nesterov's direction.
        lr: distance of a step for this shape.
    """

    one_minus_momentum: np.float32
    back: np.float32
    lr: np.float32


def _numbers(
    step: int, lr: float, betas: tuple[float, float], eps: float, momentum: float, shape: tuple[int, ...]
) -> _Numbers:
    """Return the numbers of a step of matrices of this shape. ``betas`` and ``eps`` are settings of the other weights, and not used."""
    scaled = lr * 0.2 * math.sqrt(max(shape[-2:]))  # steps have the root mean square of AdamW's
    return _Numbers(np.float32(1 - momentum), np.float32(momentum) - np.float32(1), np.float32(scaled))


@inlined
def _advance(grad: Any, first: Any, second: Any, n: Any) -> Any:
    """Return the mean of the gradients after a step, and for `_pass_on` Nesterov's direction, in place of a second moment."""
    # A weighted mean is computed from the nearer of its two ends, as in torch.
    mean = fma(n.one_minus_momentum, grad - first, first)
    return mean, fma(n.back, mean - grad, mean)


@inlined
def _pass_on(first: Any, direction: Any, n: Any) -> Any:
    """Return the direction negated: it is subtracted from zero, and the device gets the result."""
    return -direction


@inlined
def _keep(orthogonalized: Any, first: Any, second: Any, n: Any) -> Any:
    """Return the device's result, which comes in place of a gradient, for `_move`."""
    return orthogonalized, F32(0)


@inlined
def _move(orthogonalized: Any, second: Any, n: Any) -> Any:
    """Return what is subtracted from the weight."""
    return n.lr * orthogonalized


def _numbers_of_others(step: int, lr: float, betas: tuple[float, float], eps: float, momentum: float) -> Any:
    """Return AdamW's numbers, for weights that are not orthogonalized."""
    return AdamW.rule.numbers(step, lr, betas, eps)


_OF_MATRICES = Rule(
    "Muon", (Moment("momentum_buffer", is_signed=True),), _numbers, _advance, _pass_on,
    on_device=OnDevice(orthogonalize, Rule("Muon", (), _numbers, _keep, _move)),
)  # fmt: skip


class Muon(SlabOptimizer):
    """Muon for the matrices of a streamed model's blocks, and AdamW for its other weights: embedding, head, norms and biases.

    It keeps one moment of a matrix instead of AdamW's two. Momenta are updated on the host, and orthogonalized on the device, block by
    block in a pass of their own, in which the gradients of matrices are used up: `step` leaves no gradients. Experts in one tensor are
    orthogonalized one by one.

    Args:
        model: a streamed model.
        lr: learning rate of AdamW; matrices use it times ``0.2 * sqrt(max(M, N))``, with which it can be that of AdamW
            (``adjust_lr_fn="match_rms_adamw"`` in torch.optim.Muon).
        momentum: decay rate of the mean of a matrix' gradients.
        betas, eps: of AdamW.
        weight_decay: decoupled weight decay of all weights, as in torch.optim.AdamW.
        max_grad_norm, params, seed, non_finite, max_consecutive_skips: as in `AdamW`.
        update_in_backward: rejected, because several backward passes may be added up before a matrix is orthogonalized.
        moments: ``float32`` (4 bytes per element of a matrix), ``bfloat16`` (2) or ``8bit`` (1, and 2% for the scales of blocks); other
            weights have twice as much.

    Attributes:
        grad_norm, unit_grad_norms, non_finite_unit: as in `AdamW`.

    Raises:
        ConfigError: no matrix of a block is trained, as with adapters.
    """

    rule = replace(AdamW.rule, name="Muon", numbers=_numbers_of_others, decay_rates=("momentum", "betas"))

    def __init__(
        self,
        model: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        max_grad_norm: float | None = None,
        params: Iterable[Any] | None = None,
        seed: int = 0,
        moments: str = "float32",
        non_finite: str = "raise",
        max_consecutive_skips: int | None = 3,
        update_in_backward: bool = False,
    ) -> None:
        engine = engine_of(model, "horizon_lm.Muon")
        self._matrices = engine.parts.hidden_matrices()
        if not self._matrices:
            raise ConfigError(NO_MATRICES)
        if engine.options.expert_tile is not None:
            raise ConfigError(NO_MATRICES_OF_TILES)
        if update_in_backward:
            raise ConfigError(
                "horizon_lm.Muon orthogonalizes whole steps, after the backward pass; use it without update_in_backward"
            )
        super().__init__(
            model,
            {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            max_grad_norm=max_grad_norm,
            params=params,
            seed=seed,
            moments=moments,
            non_finite=non_finite,
            max_consecutive_skips=max_consecutive_skips,
        )

    def rule_of(self, name: str) -> Rule:
        return _OF_MATRICES if name in self._matrices else self.rule

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss

    @staticmethod
    def hyperparameters(settings: Any) -> dict[str, Any]:
        return AdamW.hyperparameters(settings)
