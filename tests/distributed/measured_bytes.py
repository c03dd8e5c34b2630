"""Planned bytes of a rank, and those counted in a step."""

from typing import Any

import torch

from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.request import Request
from horizon_lm.planning.arithmetic.step_cost import StepCost
from horizon_lm.schedule.ops import Kind, Op
from tests.distributed.training import Training
from tests.support.handmade_outlines import machine
from tests.support.planned_bytes import HERE, LENGTH

ROWS = 3
Bytes = tuple[dict[str, int], dict[str, int], dict[str, float]]


def batch(rank: int, world: int, vocabulary: int) -> dict[str, Any]:
    """Return a batch in which each token differs, also from those of other ranks, as long as there are tokens."""
    ids = torch.arange(ROWS * LENGTH) + rank * ROWS * LENGTH
    ids = (ids % vocabulary).view(ROWS, LENGTH)
    return {"input_ids": ids, "labels": ids.clone(), "num_items_in_batch": world * ROWS * (LENGTH - 1)}


def measure(model: Any, optimizer: Any, outline: ModelOutline, training: Training, rank: int) -> tuple[Bytes, Bytes]:
    """Train for two steps. Return the bytes as `compare` does."""
    engine, options, given = model._horizon.engine, training.settings, training.optimizer
    request = Request(
        per_device_train_batch_size=ROWS,
        moments=given.get("moments", "float32"),
        update_in_backward=given.get("update_in_backward", False),
        grad_bytes=engine.store.precision.grad_dtype.itemsize,
        shard=engine.mesh.shard,
        num_ranks=training.world,
        precision=options.get("precision", "float32"),
        **{name: options[name] for name in options.keys() - {"precision", "grad_dtype"}},
    )
    step = choose(outline, request, HERE).step
    for _ in range(2):
        engine.device.counters.moved.clear()
        model(**batch(rank, training.world, model.config.vocab_size)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model._horizon.engine.synchronize()
    kept = {kind: n for kind, n in engine.store.num_bytes.items() if n}
    if engine.boundaries.num_bytes:
        kept["boundaries"] = engine.boundaries.num_bytes
    planned = host_bytes(step)
    counters = engine.device.counters
    counted = (kept, {kind: n for kind, n in counters.allocated.items() if n}, _collected(counters.moved))
    priced: dict[str, float] = {}
    cost = StepCost(step, machine())
    for op in (op for each in step.passes() for op in each.ops if _is_priced(op)):
        priced[f"{op.kind}:{op.unit}"] = priced.get(f"{op.kind}:{op.unit}", 0) + cost(op)
    return (dict(planned), dict(device_use(step).buffers), priced), counted


def _is_priced(op: Op) -> bool:
    return op.kind in (Kind.GATHER, Kind.REDUCE) or (op.unit.is_tile and op.kind in (Kind.STREAM_IN, Kind.STREAM_OUT))


def _collected(moved: dict[str, int]) -> dict[str, float]:
    return {name: n for name, n in moved.items() if name.startswith(("gather:", "reduce:")) or ".tile" in name}
