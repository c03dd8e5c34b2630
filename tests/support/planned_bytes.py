"""Plan the bytes of a tiny model on this machine, and compare them with those that a real run counts."""

import random
from dataclasses import dataclass
from typing import Any

import torch

import horizon_lm
from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.common.units import EMBED, HEAD, OUTER, block
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.freezing import freeze
from horizon_lm.model.source import ModelSource
from horizon_lm.model.units import find_parts
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.request import Machine, Request
from horizon_lm.planning.measure.model_outline import outline_model
from tests.support import tiny_models

HERE = Machine("here", True, None)
LENGTH = 24


def outline_of(model: Any, trainable: str | None = None, adapters: Adapters | None = None) -> Any:
    """Return the outline of a config, without weights."""
    attention = model.config._attn_implementation
    return outline_model(ModelSource(model.config, "tiny", attn_implementation=attention), length=LENGTH, dtype=torch.float32, masked=True, trainable=trainable, adapters=adapters)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Settings of a run."""

    rows: int
    options: dict[str, Any]
    moments: str
    in_backward: bool
    frozen: frozenset[str]  # units
    optim: str = "AdamW"

    @property
    def optimizer(self) -> Any:
        return getattr(horizon_lm, self.optim)

    @property
    def request(self) -> Request:
        names = (
            "precision",
            "head",
            "activation_checkpoints",
            "resident_blocks",
            "resident_graphs",
            "device_micro_batch_size",
            "head_chunk_tokens",
            "expert_tile",
        )
        grad_bytes = 4 if self.options["grad_dtype"] == torch.float32 or self.options["precision"] == "float32" else 2
        return Request(
            per_device_train_batch_size=self.rows,
            optimizer=next(each for each in OPTIMIZERS.values() if each.name == self.optim),
            moments=self.moments,
            update_in_backward=self.in_backward,
            grad_bytes=grad_bytes,
            **{name: self.options.get(name) for name in names},
        )


ELEMENTWISE = [each.name for each in OPTIMIZERS.values() if "update_in_backward" in each.settings]


def draw_case(draw: random.Random) -> Case:
    """Return random settings of a run."""
    rows = draw.randint(1, 4)
    head = draw.choice(["chunked", "whole"])
    resident = draw.randint(0, 3)
    precision = draw.choice(["fp32_master", "bf16", "float32"])
    options = {
        "device": draw.choice(["cpu", "simulated"]),
        "precision": precision,
        "head": head,
        "activation_checkpoints": draw.choice(["device", "host", 0, 1, 2]),
        "resident_blocks": resident,
        "resident_graphs": draw.randint(0, resident),
        "device_micro_batch_size": draw.choice([None, 1, rows, max(1, rows - 1)]),
        "head_chunk_tokens": draw.choice([5, 64]) if head == "chunked" else None,
        "grad_dtype": draw.choice([None, torch.float32]) if precision != "float32" else None,
    }
    frozen = draw.sample([EMBED, OUTER, HEAD, block(0), block(1)], draw.choice([0, 0, 1, 2, 3, 4]))
    moments = draw.choice(["float32", "bfloat16", "8bit"])
    return Case(rows, options, moments, draw.choice([False, True]), frozenset(frozen), draw.choice(ELEMENTWISE))


def trainable(model: Any, frozen: frozenset[str]) -> str | None:
    """Return patterns of every other weight, or of block 1 if that leaves none."""
    units = find_parts(model).units
    names = [ref.name for unit, refs in units.items() if unit not in frozen for ref in refs]
    return "|".join(names or [ref.name for ref in units[block(1)]]) if frozen else None


def batch(rows: int) -> dict[str, torch.Tensor]:
    """Return a batch that needs the most memory: as many distinct tokens as possible, and padding."""
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % tiny_models.VOCABULARY
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def train(streamed: Any, case: Case, steps: int = 2) -> None:
    optimizer = case.optimizer(streamed, lr=1e-4, moments=case.moments, update_in_backward=case.in_backward)
    for _ in range(steps):
        streamed(**batch(case.rows)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    horizon_lm.synchronize(streamed)


DEFAULTS: dict[str, Any] = {
    "precision": "float32", "head": "chunked", "activation_checkpoints": "auto", "resident_blocks": None, "resident_graphs": None,
    "device_micro_batch_size": None, "head_chunk_tokens": None, "grad_dtype": None,
}  # fmt: skip


def require_planned_bytes(family: str, case: Case) -> None:
    """Train a tiny model with these settings, and compare its buffers and host memory with the plan."""
    require_planned_bytes_of(tiny_models.build(family), case)


def require_planned_bytes_of(
    model: Any, case: Case, adapters: Adapters | None = None, planned: Case | None = None
) -> None:
    """Train a model with these settings, and compare its buffers and host memory with the plan.

    Args:
        model: a plain model, which gets ``adapters`` if there are any.
        case: the settings of the training.
        adapters: adapters to draw.
        planned: the settings of the plan; None for those of the training.
    """
    planned = planned or case
    step = choose(outline_of(model, trainable(model, planned.frozen), adapters), planned.request, HERE).step
    freeze(model, trainable(model, case.frozen))
    model = model if adapters is None else adapters.add_to(model, draw=True)
    streamed = horizon_lm.stream(model, **case.options)
    train(streamed, case)

    engine = streamed._horizon.engine
    counted = dict(engine.device.counters.allocated)
    buffers = device_use(step).buffers
    assert {kind: n for kind, n in counted.items() if n} == buffers
    assert engine.device.counters.allocated_peak == sum(buffers.values())
    kept = {kind: n for kind, n in engine.store.num_bytes.items() if n}
    if engine.boundaries.num_bytes:
        kept["boundaries"] = engine.boundaries.num_bytes
    assert kept == host_bytes(step)
