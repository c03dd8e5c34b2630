"""Optimizers like those of other packages."""

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """The optimizer Lion (https://arxiv.org/abs/2302.06675), written through ``p.data`` like its first version."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = average.clone().mul_(beta1).add_(param.grad, alpha=1 - beta1).sign_()
                param.data.add_(update, alpha=-group["lr"])
                average.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return closure() if closure else None


class Adam8bit(torch.optim.Optimizer):
    """An Adam optimizer with moments in blocks of int8 with one scale per block, as in bitsandbytes."""

    _BLOCK = 64

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return closure() if closure else None

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[param], param.grad
        assert grad is not None
        grad = grad.float()
        state["step"] = state.get("step", 0) + 1
        moments = []
        for name, beta, value in zip(("exp_avg", "exp_avg_sq"), group["betas"], (grad, grad * grad), strict=True):
            before = self._decode(state[name], grad) if name in state else torch.zeros_like(grad)
            moment = before.lerp_(value, 1 - beta)
            state[name] = self._encode(moment)
            moments.append(moment / (1 - beta ** state["step"]))
        update = moments[0] / (moments[1].clamp_min(0).sqrt() + group["eps"])
        param.copy_(param - group["lr"] * update.to(param.dtype))

    def _encode(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padded = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % self._BLOCK)).view(-1, self._BLOCK)
        scales = padded.abs().amax(1, keepdim=True).clamp_min(1e-12)
        return (padded / scales * 127).round().to(torch.int8), scales

    def _decode(self, encoded: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        values, scales = encoded
        return (values.float() * scales / 127).flatten()[: like.numel()].view_as(like).clone()
