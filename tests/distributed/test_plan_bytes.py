"""The planned bytes of a rank equal those that it allocates, on the host and on the device, and those that it moves."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from horizon_lm.distributed.mesh import current_shard
from horizon_lm.model.adapters import Adapters
from horizon_lm.planning.choose import choose
from horizon_lm.planning.device_memory import device_use
from horizon_lm.planning.memory import host_bytes
from horizon_lm.planning.outline import ModelOutline
from horizon_lm.planning.request import Request
from horizon_lm.schedule.ops import Kind
from tests.distributed.pool import Pool
from tests.distributed.training import Training, build
from tests.numerics.test_plan_bytes import HERE, LENGTH, outline_of
from tests.support import tiny_models
from tests.support.handmade_outlines import machine

ROWS = 3
FLOAT32, BFLOAT16 = {"grad_dtype": torch.float32}, {"precision": "bf16", "grad_dtype": None}
CASES: dict[str, Training] = {
    "two": Training(),
    "four": Training(shard=4),
    "replicas": Training(replicate=2),
    "tied": Training(shard=4, overrides={"tie_word_embeddings": True}),
    "MoE": Training(shard=4, family="qwen3_moe"),
    "bf16": Training(settings=BFLOAT16, optimizer={"moments": "8bit"}),
    "micro-batches": Training(settings={**BFLOAT16, "device_micro_batch_size": 1}),
    "fp32 master": Training(shard=4, settings={"precision": "fp32_master", **FLOAT32}),
    "in backward": Training(shard=4, optimizer={"update_in_backward": True, "moments": "bfloat16"}),
    "tied in backward": Training(optimizer={"update_in_backward": True}, overrides={"tie_word_embeddings": True}),
    "offloaded": Training(settings={"activation_checkpoints": "host", "resident_blocks": 1}),
    "whole head": Training(settings={"head": "whole"}),
    "adapters": Training(shard=4, adapters="lora"),
    "adapters, fp32 master": Training(adapters="lora", settings={"precision": "fp32_master", **FLOAT32}),
    "some weights": Training(trainable="mlp|lm_head", overrides={"intermediate_size": 93}, optimizer={"moments": "8bit"}),
    "some weights in backward": Training(
        shard=4, trainable="self_attn|norm", optimizer={"moments": "bfloat16", "update_in_backward": True}
    ),
    "odd sizes": Training(shard=4, overrides={"intermediate_size": 93, "vocab_size": 251}, optimizer={"moments": "8bit"}),
}  # fmt: skip

Bytes = tuple[dict[str, int], dict[str, int], dict[str, float]]


def batch(rank: int, world: int, vocabulary: int) -> dict[str, Any]:
    """Return a batch in which each token differs, also from those of other ranks, as long as there are tokens."""
    ids = torch.arange(ROWS * LENGTH) + rank * ROWS * LENGTH
    ids = (ids % vocabulary).view(ROWS, LENGTH)
    return {"input_ids": ids, "labels": ids.clone(), "num_items_in_batch": world * ROWS * (LENGTH - 1)}


def compare(rank: int, training: Training) -> tuple[Bytes, Bytes]:
    """Return the bytes of host and device by kind, and those moved by operation: planned, and counted."""
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(training, device_mesh=mesh)
    adapters = Adapters(r=4, lora_alpha=8, target_modules="all-linear") if training.adapters else None
    made = tiny_models.build(training.family, **training.overrides)
    outline = outline_of(made, training.trainable, adapters)
    return measure(model, optimizer, outline, training, rank)


def measure(model: Any, optimizer: Any, outline: ModelOutline, training: Training, rank: int) -> tuple[Bytes, Bytes]:
    """Train for two steps. Return the bytes as `compare` does."""
    engine, options, given = model._horizon.engine, training.settings, training.optimizer
    request = Request(
        per_device_train_batch_size=ROWS,
        moments=given.get("moments", "float32"),
        update_in_backward=given.get("update_in_backward", False),
        grad_bytes=engine.store.precision.grad_dtype.itemsize,
        shard=current_shard(engine.mesh),
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
    planned = host_bytes(step.outline.sizes, step.outline.trained, step.host_settings())
    counters = engine.device.counters
    counted = (kept, {kind: n for kind, n in counters.allocated.items() if n}, _collected(counters.moved))
    priced: dict[str, float] = {}
    cost = step.cost(machine())
    for op in (op for each in step.passes() for op in each.ops if op.kind in (Kind.GATHER, Kind.REDUCE)):
        priced[f"{op.kind}:{op.unit}"] = priced.get(f"{op.kind}:{op.unit}", 0) + cost(op)
    return (dict(planned), dict(device_use(step).buffers), priced), counted


def _collected(moved: dict[str, int]) -> dict[str, float]:
    return {name: n for name, n in moved.items() if name.startswith(("gather:", "reduce:"))}


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_of_each_rank(pool: Pool, name: str) -> None:
    training = CASES[name]
    for planned, counted in pool.run(training.world, compare, training):
        assert planned[0] == counted[0]
        assert planned[1] == counted[1]


WIDE = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 512}


@pytest.mark.parametrize(
    "training",
    [
        Training(shard=4, overrides=WIDE),
        Training(replicate=2, overrides=WIDE),
        Training(overrides=WIDE, settings={**BFLOAT16, "device_micro_batch_size": 1}),
        Training(shard=4, overrides=WIDE, settings={"resident_blocks": 1, "head": "whole"}),
    ],
    ids=str,
)
def test_priced_bytes_of_collectives(pool: Pool, training: Training) -> None:
    """The simulator prices the bytes that a rank receives, but for padding, which is much of the small outer parameters.

    Rows of the embedding are priced as if all ranks own as many of those that a step reads.
    """
    for planned, counted in pool.run(training.world, compare, training):
        priced, moved = planned[2], counted[2]
        assert priced.keys() == moved.keys()
        for name, num_bytes in moved.items():
            assert name.endswith((":outer", ":embed")) or priced[name] == pytest.approx(num_bytes, rel=0.05), name
