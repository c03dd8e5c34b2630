"""Trainings that ranks of a pool run, and the same trainings in one process."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh

import horizon_lm
from horizon_lm.model.freezing import freeze
from tests.support import tiny_models
from tests.support.adapted_models import adapted
from tests.support.float32_llama import float32_llama

IGNORE = -100


@dataclass(frozen=True)
class Training:
    """A training of a few steps.

    Attributes:
        replicate, shard: the mesh.
        local: number of ranks of each machine; None for one machine.
        steps, first: number of steps, and of steps before them.
        accumulation: number of backward passes of a step, each over other rows.
        equal: all ranks compute the same rows; otherwise each has its own.
        settings: of `horizon_lm.stream`.
        optim: the class of the optimizer in `horizon_lm`.
        optimizer: its arguments.
        family, overrides: the model.
        adapters: the kind of its adapters, of `tests.numerics.test_adapters`; ``later`` to add some to the streamed model.
        trainable: patterns of the names of trainable weights, as in a run file; None for all.
        together: one process computes the batches of all ranks in one pass, as ranks do.
        joined: one process computes the rows of all ranks as one batch.
        in_float32: transformers keeps some weights of the family, which is Llama, in float32.
    """

    replicate: int = 1
    shard: int = 2
    local: int | None = None
    steps: int = 3
    first: int = 0
    accumulation: int = 1
    equal: bool = False
    family: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    optim: str = "AdamW"
    optimizer: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    adapters: str = ""
    trainable: str | None = None
    together: bool = False
    joined: bool = False
    in_float32: bool = False

    @property
    def world(self) -> int:
        return self.replicate * self.shard


@dataclass
class Outcome:
    """What a training has given.

    Attributes:
        losses: of each step.
        norms: of the gradients of each step.
        slabs: weights, and low halves if there are any, by unit and kind: this rank's range, and where it starts.
        moved: bytes moved by kind of operation and unit, in the last step.
        host: bytes of host memory by kind.
    """

    losses: list[float]
    norms: list[float]
    slabs: dict[str, tuple[int, torch.Tensor]]
    moved: dict[str, int]
    host: dict[str, int]


def batches_of(training: Training, step: int) -> list[dict[str, Any]]:
    """Return the batch of each rank, of different lengths."""
    seeds = [0] * training.world if training.equal else range(training.world)
    made = [tiny_models.batch(seed=100 * step + seed, padding="right", rows=2) for seed in seeds]
    total = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in made)
    return [batch | {"num_items_in_batch": total} for batch in made]


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all rows as one batch."""
    tensors = {
        name: torch.cat([batch[name] for batch in batches])
        for name, value in batches[0].items()
        if torch.is_tensor(value)
    }
    return batches[0] | tensors


def build(training: Training, **settings: Any) -> tuple[Any, Any]:
    """Return the streamed model and the optimizer of a training."""
    with float32_llama() if training.in_float32 else nullcontext():
        return _build(training, **settings)


def _build(training: Training, **settings: Any) -> tuple[Any, Any]:
    later = training.adapters == "later"
    make = partial(adapted, kind=training.adapters) if training.adapters and not later else tiny_models.build
    model = make(training.family, **training.overrides)
    freeze(model, training.trainable)
    model = horizon_lm.stream(model, **({"device": "cpu", "precision": "float32"} | training.settings | settings))
    if later:  # ranks draw other values, and get those of the first
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.train(), getattr(horizon_lm, training.optim)(model, **({"lr": 1e-2} | training.optimizer))


def run(rank: int, training: Training) -> Outcome:
    """Train as one of the ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(training.local or training.world)
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(training, device_mesh=mesh)
    return train(model, optimizer, training, [rank])


def alone(training: Training) -> Outcome:
    """Train in one process: the batches of all ranks one after the other, in their order."""
    model, optimizer = build(training)
    return train(model, optimizer, training, [0] if training.equal else list(range(training.world)))


def train(model: Any, optimizer: Any, training: Training, ranks: list[int]) -> Outcome:
    losses, norms = [], []
    engine = model._horizon.engine
    for step in range(training.first, training.first + training.steps):
        horizon_lm.synchronize(model)
        engine.device.counters.moved.clear()
        torch.manual_seed(step)
        computed: list[float] = []
        for number in range(training.accumulation):
            computed += _differentiate(model, training, ranks, step + 10 * number)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(computed)))
        norms.append(optimizer.grad_norm)
    horizon_lm.synchronize(model)
    slabs = {}
    for each in engine.store.slabs:
        kinds = {"weights": each.weights} | ({} if each.low is None else {"low": each.low})
        slabs |= {f"{each.name} {kind}": (each.own.start, slab[each.own].clone()) for kind, slab in kinds.items()}
    return Outcome(losses, norms, slabs, dict(engine.device.counters.moved), dict(engine.store.num_bytes))


def _differentiate(model: Any, training: Training, ranks: list[int], step: int) -> list[float]:
    """Add the gradients of the batches of some ranks. Return their losses."""
    batches, computed = batches_of(training, step), list[float]()
    if training.equal and len(ranks) == 1 and model._horizon.engine.mesh.size == 1:
        batches[0]["num_items_in_batch"] //= training.world
    own = [batches[rank] for rank in ranks]
    calls = [partial(_loss, model, batch) for batch in ([joined(own)] if training.joined else own)]
    for group in [calls] if training.together else [[call] for call in calls]:
        found = torch.stack(horizon_lm.run_together(group))
        found.sum().backward()
        computed += found.tolist()
    return computed


def _loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def whole(outcomes: list[Outcome], shard: int) -> dict[str, torch.Tensor]:
    """Return the slabs of the first copy of the model."""
    return {name: torch.cat([each.slabs[name][1] for each in outcomes[:shard]]) for name in outcomes[0].slabs}


def assert_same(outcomes: list[Outcome], expected: Outcome, training: Training) -> None:
    found = whole(outcomes, training.shard)
    for name, (_, slab) in expected.slabs.items():
        assert torch.equal(found[name], slab[: len(found[name])]), name
        assert not slab[len(found[name]) :].any()
    for copy in range(1, training.replicate):
        other = whole(outcomes[copy * training.shard :], training.shard)
        assert all(torch.equal(other[name], found[name]) for name in found)
