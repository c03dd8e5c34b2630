"""AdamW over slabs (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101).

The update is torch.optim.AdamW's, in fp32, whatever the weights and gradients are kept in. It runs over pieces of slabs
that fit into a cache, in the order in which the next forward needs the units.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from horizon_lm.device.moves import CopyFn, Move
from horizon_lm.engine.engine import Engine
from horizon_lm.engine.parameters import landing_grad
from horizon_lm.errors import ConfigError, NonFiniteError, StreamingError
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, block
from horizon_lm.store.store import Store, UnitSlabs

_PIECE = 1 << 18  # elements updated at once: about 4 MB of weights, gradient and moments, which a core's caches hold


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Of one parameter in one step; taken when `step` is called, because schedulers change them right after."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class AdamW(torch.optim.Optimizer):
    """AdamW for a streamed model, with moments in host memory and optional clipping by the global norm.

    Args:
        model: a streamed model.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        max_grad_norm: scale gradients down to this global norm when it is exceeded; None for no clipping.
        params: parameters or parameter groups; None for all trainable ones in one group.
        seed: of the stochastic rounding in precision ``bf16``.

    Attributes:
        grad_norm: global norm of the gradients of the last step, before clipping.
    """

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
    ) -> None:
        if not hasattr(model, "_horizon"):
            raise ConfigError("horizon_lm.AdamW needs a streamed model; call horizon_lm.stream(model) first")
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ConfigError(f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: out of range")
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be positive, or None for no clipping")
        self._engine: Engine = model._horizon.engine
        self._store: Store = self._engine.store
        self._engine.allocate_grads()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(list(params) if params is not None else self._trainable(), defaults)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        self._seed, self._step = seed, 0
        self._moments = self._allocate_moments()

    def _trainable(self) -> list[torch.nn.Parameter]:
        params = [ref.param for ref in self._engine.refs.values() if ref.param.requires_grad]
        if not params:
            raise ConfigError("nothing is trainable: every parameter of the model is frozen")
        return params

    def _allocate_moments(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """First and second moments by unit; `state` shows them by parameter, as views."""
        layouts = [slabs.grad_layout for slabs in self._store.units.values()]
        arenas = [Store.new_arena(layouts, torch.float32) for _ in range(2)]
        self._store.num_bytes["moments"] = sum(arena.num_bytes for arena in arenas)
        moments = {}
        for unit, slabs in self._store.units.items():
            first, second = (arena.take(slabs.grad_layout.numel, torch.float32) for arena in arenas)
            moments[unit] = (first, second)
            for name in slabs.grad_layout:
                self.state[self._engine.refs[name].param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": slabs.grad_layout.view(first, name),
                    "exp_avg_sq": slabs.grad_layout.view(second, name),
                }
        return moments

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; no weight has been touched.
            StreamingError: a fault invalidated the gradients; call `zero_grad` first.
        """
        loss = closure() if closure is not None else None
        engine = self._engine
        engine.check_alive()
        if engine.grads_invalid:
            raise StreamingError(
                "an error interrupted this step's forward or backward, so its gradients are incomplete; call "
                "optimizer.zero_grad() and repeat the step"
            )
        engine.wait_for_grads()
        self.grad_norm = self._global_norm()
        clip = 1.0
        if self.max_grad_norm is not None:
            clip = min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self._step += 1
        moves = {unit: self._pieces(unit, clip) for unit in self._deadline_order()}
        schedule = build.update(engine.layout, [unit for unit, pieces in moves.items() if pieces])
        engine.run_update(schedule, moves)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Mark all gradients empty; no memory is written."""
        self._engine.clear_grads()

    def _deadline_order(self) -> list[str]:
        """Units in the order in which the next forward streams them in."""
        blocks = [block(u) for u in range(self._engine.parts.num_blocks)]
        units = [OUTER, EMBED, *blocks, HEAD]
        return [u for u in units if self._store.units[u].grad_layout.numel]

    def _global_norm(self) -> float:
        """Euclidean norm of all gradients as they are stored; in pieces, because one long bf16 sum loses digits."""
        total = 0.0
        for unit, slabs in self._store.units.items():
            squares = 0.0
            for name in self._present(slabs):
                for piece in slabs.grad_layout.view(slabs.grads, name).view(-1).split(_PIECE):
                    squares += float(piece.float().square().sum(dtype=torch.float64))
            if squares != squares or squares == float("inf"):
                raise NonFiniteError(
                    f"the gradient of {unit} is not finite at step {self._step + 1}; the weights are unchanged. Lower "
                    "the learning rate, or look at the rows of this step."
                )
            total += squares
        return total**0.5

    def _present(self, slabs: UnitSlabs) -> list[str]:
        return [n for n in slabs.grad_layout if landing_grad(self._engine.refs[n].param) is not None]

    def _pieces(self, unit: str, clip: float) -> list[Move]:
        """The update of a unit, cut into pieces."""
        slabs = self._store.units[unit]
        present, groups = set(self._present(slabs)), self._groups()
        pieces: list[Move] = []
        for name in slabs.grad_layout:
            param = self._engine.refs[name].param
            if name not in present or id(param) not in groups:
                continue
            state = self.state[param]
            state["step"] += 1
            start, numel = slabs.layout.entries[name].offset, param.numel()
            grad_start = slabs.grad_layout.entries[name].offset
            for offset in range(0, numel, _PIECE):
                size = min(_PIECE, numel - offset)
                pieces.append(
                    _Piece(self, unit, start + offset, grad_start + offset, size, groups[id(param)],
                           int(state["step"]), clip)
                )  # fmt: skip
        return pieces

    def _groups(self) -> dict[int, Hyperparameters]:
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state that `state_dict` gave into the moments."""
        self._engine.check_alive()
        own = self.state_dict()
        if [len(g["params"]) for g in own["param_groups"]] != [len(g["params"]) for g in state_dict["param_groups"]]:
            raise ConfigError("the optimizer state has other parameter groups than this optimizer")
        for index, saved in state_dict["state"].items():
            for key, value in saved.items():
                own["state"][index][key].copy_(value)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        self._step = max((int(s["step"]) for s in self.state.values()), default=0)


class _Piece:
    """The update of some elements of one parameter; runs once."""

    host_bytes = 0

    def __init__(
        self, owner: AdamW, unit: str, start: int, grad_start: int, size: int, hyper: Hyperparameters, step: int,
        clip: float,
    ) -> None:  # fmt: skip
        self._owner, self._unit, self._start, self._grad_start, self._size = owner, unit, start, grad_start, size
        self._hyper, self._step, self._clip = hyper, step, clip
        self._done = False

    def split(self, parts: int) -> list[Move]:
        return [self]

    def run(self, copy: CopyFn) -> None:
        if self._done:  # an interrupted pass goes on where it stopped
            return
        try:
            self._update()
        except BaseException as error:
            self._owner._engine.tear(error)
            raise
        self._done = True

    def _update(self) -> None:
        owner, hyper = self._owner, self._hyper
        store, stop = owner._store, self._start + self._size
        grads = store.units[self._unit].grads[self._grad_start : self._grad_start + self._size]
        exp_avg, exp_avg_sq = (m[self._grad_start : self._grad_start + self._size] for m in owner._moments[self._unit])
        with torch.no_grad():
            grad = grads.float() if self._clip == 1.0 else grads.float() * self._clip
            weight = store.read_masters(self._unit, self._start, stop)
            weight.mul_(1 - hyper.lr * hyper.weight_decay)
            exp_avg.lerp_(grad, 1 - hyper.beta1)
            exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
            correction1, correction2 = 1 - hyper.beta1**self._step, 1 - hyper.beta2**self._step
            denominator = (exp_avg_sq.sqrt() / correction2**0.5).add_(hyper.eps)
            weight.addcdiv_(exp_avg, denominator, value=-hyper.lr / correction1)
            generator = torch.Generator().manual_seed(self._rounding_seed())
            store.write_masters(self._unit, self._start, weight, generator)

    def _rounding_seed(self) -> int:
        """Different for every step and element, and independent of the order in which pieces run."""
        unit = list(self._owner._moments).index(self._unit)
        return hash((self._owner._seed, self._owner._step, unit, self._start)) & (2**63 - 1)
