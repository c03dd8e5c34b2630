"""The planned bytes of a rank equal those that it allocates, on the host and on the device, and those that it moves."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from horizon_lm.model.adapters import Adapters
from tests.distributed.measured_bytes import Bytes, measure
from tests.distributed.pool import Pool
from tests.distributed.training import Training, build
from tests.support import tiny_models
from tests.support.adapted_models import KINDS, MIXTURES
from tests.support.float32_llama import float32_llama
from tests.support.planned_bytes import outline_of
from tests.support.thinned_cases import thinned, without

FLOAT32, BFLOAT16 = {"grad_dtype": torch.float32}, {"precision": "bf16", "grad_dtype": None}
OTHER = {"vocab_size": 101}  # pools remember outlines by config, which does not say what is kept in float32
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
    "weights in float32": Training(shard=4, in_float32=True, overrides=OTHER, settings={"precision": "fp32_master", **FLOAT32}),
    "weights in float32, micro-batches": Training(
        in_float32=True, overrides=OTHER, settings={**BFLOAT16, "device_micro_batch_size": 1, "head": "whole"}, optimizer={"moments": "8bit"}
    ),
    "weights in float32, in backward": Training(shard=4, in_float32=True, overrides=OTHER, optimizer={"update_in_backward": True}),
    "weights in float32, adapters": Training(in_float32=True, overrides=OTHER, adapters="lora", settings={"precision": "fp32_master"}),
    "adapters": Training(shard=4, adapters="lora"),
    "adapters, fp32 master": Training(adapters="lora", settings={"precision": "fp32_master", **FLOAT32}),
    "some weights": Training(trainable="mlp|lm_head", overrides={"intermediate_size": 93}, optimizer={"moments": "8bit"}),
    "some weights in backward": Training(
        shard=4, trainable="self_attn|norm", optimizer={"moments": "bfloat16", "update_in_backward": True}
    ),
    "tiles": Training(shard=4, family="qwen3_moe", settings={"expert_tile": 3}, optimizer={"moments": "8bit"}),
    "tiles of one": Training(shard=3, family="mixtral", settings={"expert_tile": 1, **BFLOAT16}),
    "tiles, dense blocks": Training(shard=3, family="deepseek_v3", settings={"expert_tile": 3, "precision": "fp32_master", **FLOAT32}),
    "tiles, micro-batches": Training(
        family="deepseek_v3", settings={"expert_tile": 2, "device_micro_batch_size": 1, "resident_blocks": 1, **BFLOAT16}
    ),
    "tiles, copies": Training(replicate=2, shard=1, family="qwen3_moe", settings={"expert_tile": 3, "device_micro_batch_size": 1, **BFLOAT16}),
    "tiles in backward": Training(shard=4, family="qwen3_moe", settings={"expert_tile": 3}, optimizer={"update_in_backward": True}),
    "tiles, adapters": Training(shard=4, family="qwen3_moe", settings={"expert_tile": 3}, adapters="lora"),
    "tiles, adapters of experts": Training(family="qwen3_moe", settings={"expert_tile": 3}, adapters="experts"),
    "tiles, offloaded": Training(family="mixtral", settings={"expert_tile": 3, "activation_checkpoints": "host"}),
    "odd sizes": Training(shard=4, overrides={"intermediate_size": 93, "vocab_size": 251}, optimizer={"moments": "8bit"}),
}  # fmt: skip

# Each of their settings is in another case, too.
IN_OTHER_CASES = (
    "two", "four", "tied", "bf16", "fp32 master", "micro-batches", "whole head", "tied in backward", "in backward", "weights in float32", "weights in float32, adapters", "weights in float32, in backward",
    "adapters, fp32 master", "some weights", "tiles", "tiles, adapters", "tiles, dense blocks", "tiles, copies", "MoE",
)  # fmt: skip


def compare(rank: int, training: Training) -> tuple[Bytes, Bytes]:
    """Return the bytes of host and device by kind, and those moved by operation: planned, and counted."""
    mesh = init_device_mesh("cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(training, device_mesh=mesh)
    targets = ("q_proj", "v_proj", "o_proj") if training.family in MIXTURES else "all-linear"
    settings = {"target_modules": targets, "lora_dropout": 0.0} | KINDS.get(training.adapters, {})
    hashable = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    adapters = Adapters(r=4, lora_alpha=8, **hashable) if training.adapters else None
    made = tiny_models.build(training.family, **training.overrides)
    with float32_llama() if training.in_float32 else nullcontext():
        outline = outline_of(made, training.trainable, adapters)
    return measure(model, optimizer, outline, training, rank)


@pytest.mark.parametrize("name", without(CASES, IN_OTHER_CASES))
def test_planned_bytes_of_each_rank(pool: Pool, name: str) -> None:
    training = CASES[name]
    for planned, counted in pool.run(training.world, compare, training):
        assert planned[0] == counted[0]
        assert planned[1] == counted[1]


WIDE = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 512}


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(Training(shard=4, overrides=WIDE), marks=pytest.mark.slow),
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


@pytest.mark.parametrize(("family", "tile"), thinned([("deepseek_v3", 2), ("qwen3_moe", 1), ("qwen3_moe", 3)]))
def test_priced_bytes_of_tiles(pool: Pool, family: str, tile: int) -> None:
    """A tile is priced for the rank that owns most of it: its link copies that part, and it sends it to each of the others."""
    training = Training(shard=4, family=family, settings={"expert_tile": tile})
    found = pool.run(4, compare, training)
    priced, moved = found[0][0][2], [counted[2] for _, counted in found]
    names = [name for name in priced if name.startswith("stream_in:") and ".tile" in name]
    assert names
    for name in names:
        unit = name.partition(":")[2]
        copied, landed = ([each.get(f"{kind}:{unit}", 0) for each in moved] for kind in ("stream_in", "stream_out"))
        assert priced[name] == max(copied)
        assert priced[f"stream_out:{unit}"] == max(landed)
        assert priced[f"gather:{unit}"] == 3 * max(copied)
        assert priced[f"reduce:{unit}"] == max(each[f"reduce:{unit}"] for each in moved) == 3 * max(landed)
    assert any(max(copied) > sum(copied) / 4 for copied in [[each.get(name, 0) for each in moved] for name in names])
