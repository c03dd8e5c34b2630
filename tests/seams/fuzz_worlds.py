"""The two models of a sequence, and the settings of the streamed model."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from tests.seams.use import copied_gradients, copied_weights
from tests.support import tiny_models


class World:
    """A model with its optimizer, and the state left by sequences of calls.

    Attributes:
        pending: losses without a backward pass so far.
        draws: dropout draws the same numbers on both models.
        rejects: calls that may be rejected in this setting, in addition to those that may be rejected in any setting.
        follows: the model whose weights are copied after each call, because this model rounds differently.
    """

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, tolerance: float, draws: bool, rejects: Collection[str] = ()
    ) -> None:
        self.model, self.optimizer, self.tolerance, self.draws, self.rejects = (
            model,
            optimizer,
            tolerance,
            draws,
            rejects,
        )
        self.follows: World | None = None
        self.sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
        self.pending: list[torch.Tensor] = []
        self.handles: list[Any] = []
        self.saved: dict[str, torch.Tensor] | None = None

    @property
    def blocks(self) -> Any:
        """Return the list of blocks."""
        return next(m for m in self.model.modules() if isinstance(m, nn.ModuleList))

    def parameter(self, chosen: random.Random) -> nn.Parameter:
        """Return a randomly chosen parameter."""
        return chosen.choice(list(self.model.parameters()))

    def linear(self, chosen: random.Random) -> nn.Module:
        """Return a random module inside a block that has parameters itself."""
        block = chosen.choice(list(self.blocks))
        return chosen.choice([m for m in block.modules() if m._parameters and m is not block])

    def state(self) -> dict[str, Any]:
        """Return a copy of all visible state."""
        return {
            "weights": copied_weights(self.model),
            "gradients": copied_gradients(self.model),
            "trained": [p.requires_grad for p in self.model.parameters()],
        }

    def follow(self) -> None:
        """Copy the weights from the model that this one follows."""
        if self.follows is not None:
            state = copied_weights(self.follows.model)
            with torch.no_grad():
                for name, value in self.model.state_dict().items():
                    if not torch.equal(value, state[name].to(value.dtype)):  # a write for autograd, too
                        value.copy_(state[name])

    def give_up(self) -> None:
        """Drop the failed step, like a training loop that catches the error."""
        self.pending.clear()
        self.model.zero_grad()


@dataclass(frozen=True)
class Setting:
    """The arguments of `horizon_lm.stream` for a sequence."""

    family: str
    head: str
    device: str
    resident_blocks: int
    resident_graphs: int
    micro_batch: int | None
    ours: bool
    precision: str = "float32"

    @classmethod
    def draw(cls, chosen: random.Random) -> "Setting":
        resident = chosen.choice((0, 0, 1, 3))
        precision = chosen.choice(("float32",) * 4 + ("bf16", "fp32_master"))
        return cls(
            family=chosen.choice(("llama", "llama", "gpt2", "mistral")),
            head=chosen.choice(("whole", "chunked")),
            device=chosen.choice(("cpu", "late", "simulated")),
            resident_blocks=resident,
            resident_graphs=chosen.choice((0, resident)),
            micro_batch=chosen.choice((None, None, 1)),
            ours=chosen.random() < 0.6 or precision == "fp32_master",
            precision=precision,
        )

    @property
    def exact(self) -> bool:
        """Return whether the streamed model computes the same bits."""
        return self.head == "whole" and self.micro_batch is None

    @property
    def tolerance(self) -> float:
        if self.precision != "float32":
            return 3e-2  # tolerance of gradients; losses are compared at equal weights
        return 1e-6 if self.exact else 2e-4

    def stream(self, model: Any) -> Any:
        """Stream a model."""
        late = {"late": 0.0, "simulated": None}
        device = SimulatedDevice(seed=1, eagerness=late[self.device]) if self.device in late else self.device
        return horizon_lm.stream(
            model, device=device, precision=self.precision, head=self.head, resident_blocks=self.resident_blocks,
            resident_graphs=self.resident_graphs, device_micro_batch_size=self.micro_batch,
            activation_checkpoints="device" if self.resident_blocks else "auto",
        )  # fmt: skip


def open_worlds(setting: Setting) -> tuple[World, World]:
    """Return a streamed and a plain model, each with an optimizer."""
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if setting.family == "gpt2" else {}
    plain = tiny_models.build(setting.family, **rates)
    streamed = setting.stream(tiny_models.build(setting.family, **rates))
    settings = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}  # eps hides gradients of rounding errors
    if setting.ours:
        optimizer: torch.optim.Optimizer = horizon_lm.AdamW(streamed, **settings)
    else:
        optimizer = torch.optim.AdamW(streamed.parameters(), fused=True, **settings)
    other = torch.optim.AdamW(plain.parameters(), fused=True, **settings)
    draws = setting.micro_batch is None
    rejects = {"step_of_another"} if setting.precision == "fp32_master" else set()
    streamed_world = World(streamed, optimizer, setting.tolerance, draws, rejects)
    plain_world = World(plain, other, setting.tolerance, draws, rejects)
    if setting.precision != "float32":
        plain_world.follows = streamed_world
        plain_world.follow()
    return streamed_world, plain_world
