"""Compare training steps of two models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = 1e-5  # relative error of a loss, and of all gradients together
WORST_TOLERANCE = 1e-3  # error of one gradient, relative to its norm or to a thousandth of all gradients' norm


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        status: ``right`` (bit for bit, or within `TOLERANCE` if sums are in another order), ``close`` (should be
            bit for bit, and is within `TOLERANCE`), ``wrong``, ``rejected`` (by an error of Horizon-LM), ``crashed``,
            ``plain_fails`` (plain Hugging Face fails), ``cannot_build`` or ``no_such_case``.
        detail: a figure or a message.
    """

    status: str
    detail: str = ""


_SEVERITY = ("right", "close", "cannot_build", "plain_fails", "rejected", "crashed", "wrong")


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the first of the worst outcomes."""
    return max(outcomes, key=lambda outcome: _SEVERITY.index(outcome.status))


@dataclass
class Step:
    """The results of one forward and backward pass."""

    loss: torch.Tensor
    logits: torch.Tensor | None
    grads: dict[str, torch.Tensor | None]


def train_step(model: Any, batch: dict[str, torch.Tensor], **options: Any) -> Step:
    """Run a forward and a backward pass, starting from a seed."""
    torch.manual_seed(7)
    output = model(**batch, **options)
    output.loss.backward()
    logits = getattr(output, "logits", None)  # a chunked loss returns no logits
    return Step(output.loss.detach(), logits if isinstance(logits, torch.Tensor) else None, gradients(model))


def gradients(model: Any) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def same_step(one: Step, other: Step) -> bool:
    grads = all(torch.equal(_zeros(a, b), _zeros(b, a)) for a, b in _pairs(one.grads, other.grads))
    return grads and torch.equal(one.loss, other.loss)


def _pairs(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(ours.get(n), theirs[n]) for n in theirs if not (ours.get(n) is None and theirs[n] is None)]


def _zeros(grad: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    if grad is not None:
        return grad.float()
    assert other is not None
    return torch.zeros_like(other, dtype=torch.float32)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the distance, relative to the norm of the correct value."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-12))


def compare_grads(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, float, float, str]:
    """Return whether gradients are equal bit for bit, the total error, the worst error, and the name of the worst
    gradient.
    """
    missing = theirs.keys() - ours.keys()
    if missing:
        return False, float("inf"), float("inf"), f"{sorted(missing)[0]} is missing"
    same, square, norm = True, 0.0, 0.0
    errors: dict[str, tuple[float, float]] = {}
    for name, grad in theirs.items():
        if grad is None and ours[name] is None:
            continue
        a, b = _zeros(ours[name], grad), _zeros(grad, ours[name])
        same = same and torch.equal(a, b)
        errors[name] = float((a - b).norm()), float(b.norm())
        square, norm = square + errors[name][0] ** 2, norm + errors[name][1] ** 2
    whole = max(norm**0.5, 1e-12)
    worst = max(errors, key=lambda n: errors[n][0] / max(errors[n][1], 1e-3 * whole), default="")
    off = errors[worst][0] / max(errors[worst][1], 1e-3 * whole) if worst else 0.0
    return same, square**0.5 / whole, off, worst


def compare_step(ours: Step, theirs: Step, exact: bool, logits: bool = False) -> Outcome:
    """Compare loss, gradients and, on request, logits. ``exact``: expect bit-equal results."""
    same, all_off, worst_off, worst = compare_grads(ours.grads, theirs.grads)
    loss_off = relative(ours.loss, theirs.loss)
    logits_off = relative(ours.logits, theirs.logits) if logits else 0.0  # type: ignore[arg-type]
    same = same and torch.equal(ours.loss, theirs.loss)
    same = same and (not logits or torch.equal(ours.logits, theirs.logits))  # type: ignore[arg-type]
    figures = f"loss {loss_off:.1e}, logits {logits_off:.1e}, gradients {all_off:.1e}, worst {worst} {worst_off:.1e}"
    if same:
        return Outcome("right", "bit for bit")
    if not max(loss_off, logits_off, all_off) <= TOLERANCE or not worst_off <= WORST_TOLERANCE:
        return Outcome("wrong", figures)
    return Outcome("close" if exact else "right", figures)
